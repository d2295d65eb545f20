"""Asynchronous gossip: a worker pushes its model to another one, and nobody waits for anybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slurmdl.train.comm_budget import CommCost
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.mixing.collectives import AllreduceOp
from slurmdl.train.mixing.weighted_graph import GRAPHS, GossipGroup
from slurmdl.train.strategies.strategy import Strategy, StrategyContext
from slurmdl.train.triggers import TRIGGERS

#: of messages that carry a model
_PUSH_TAG = 1
_HEADER_BYTES = 8
#: the part of its weight that a model gives away at most, and how many times as much as one that is to weigh more
MAX_GIVEN_SHARE, MAX_WEIGHT_RATIO = 0.5, 4
#: the power of its weight by which a light model gives away less
LIGHT_MODEL_POWER = 3
#: a model of less weight is not halved any more: others have hardly anything to gain from it
MIN_WEIGHT = 2.0 ** -20


class PushSum(Strategy):
    """Each model has a weight, 1 at first. A sender keeps one half and sends the model with the other; the receiver
    takes the weighted mean of its own and of what came, and the sum of the weights. So the weighted sum of all
    models, those under way included, stays what it is.

    What is sent to a slow worker lies there until its step is over. Were always halves sent, most of the weight would
    lie there where one of eight is 4 times slower, and the others' steps count for little. So a model that weighs
    less than it is to weigh gives away less: w^3 / 2 of its weight w. Where as much flows from each to the others,
    a rank that sends r times as often weighs 1 / r^(1/4) as much. One that is to weigh more than others, since it
    stands for several ranks or for larger batches, gives away less in that ratio, too; then, where all send as often,
    weights are in the mean what they are to be.

    A push that would have to wait for the one before it is left out. Messages are received while the rank computes,
    and mixed in between the optimizer's step and the next forward pass.

    References
    ----------
    M. Blot, D. Picard, M. Cord, N. Thome: Gossip training for deep learning. 2016. arXiv:1611.09726
    M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic gradient push for distributed deep learning. ICML 2019.
    arXiv:1811.10792
    """

    lockstep = False
    survives_rank_failure = True
    state_fields: tuple[str, ...] = ("_trigger", "_due", "_turn")

    def __init__(self, ctx: StrategyContext) -> None:
        super().__init__(ctx)
        method, size = ctx.config, ctx.parameters.size
        zones = [ctx.zones[worker] for worker in ctx.workers]
        self._graph = GRAPHS[method.comm_pattern or ""](GossipGroup(zones, ctx.seed, ctx.costs))
        self._compressor = COMPRESSORS[method.compression]
        message = _HEADER_BYTES + self._compressor.packed_bytes(size)
        count = len(ctx.workers)
        cost = CommCost(message, 0.0, 8.0 * (size + count) * (count - 1) / count)
        self._trigger = TRIGGERS[method.trigger_name](method, ctx.parameters, ctx.sizes, ctx.learning_rate, cost)
        self._due_step = self._trigger.next_due(-1)
        self._exchange_index = 0
        self.model_weight = ctx.relative_weights[ctx.worker_rank]
        self._send_buffer, self._recv_buffer = np.empty(message, np.uint8), np.empty(message, np.uint8)
        #: one for each of the two threads
        self._compression_error, self._decompressed = np.empty_like(ctx.parameters), np.empty_like(ctx.parameters)
        #: weighted sum of what came, and its weight; the spare one is empty
        self._inbox, self._spare_inbox, self._inbox_weight = np.zeros(
            size, np.float32), np.zeros(size, np.float32), 0.0
        self._send_request: Any = None
        self._recv_request: Any = None
        self._sent_counts = np.zeros(count, np.float32)
        self._received_count = 0
        ctx.comm_thread.add_poller(self._progress)

    def after_optimizer_step(self, step: int) -> None:
        free, changed = self._merge_received()
        if step == self._due_step:
            changed |= self._push_if_due(step, free)
        if changed:
            self._ctx.device_copies.copy_to_device()

    def _push_if_due(self, step: int, can_send: bool) -> bool:
        """Push in a step that is due, where that is wanted and a push can leave at once; whether it has."""
        trigger, its = self._trigger, self._ctx
        its.device_copies.copy_to_host()
        wanted = trigger.is_unconditional(step) or trigger.urgency(step) >= 1
        to = int(self._graph.round(self._exchange_index).target[its.worker_rank])
        self._exchange_index += 1
        going = wanted and can_send and to != its.worker_rank and self.model_weight >= MIN_WEIGHT
        if going:
            self._send_model(to)
        self.exchanges += going
        self.exchanges_skipped += not going and to != its.worker_rank
        trigger.observe(step, going)
        self._due_step = trigger.next_due(step)
        return going

    def quiesce(self, checkpoint_number: int) -> None:
        """Receive all that was sent to this rank: the ranks tell each other how much that is."""
        its = self._ctx
        arriving = self._sent_counts
        its.comm_thread.call(AllreduceOp(its.p2p, [its.workers], arriving).run)
        its.comm_thread.call(lambda: self._drain(int(arriving[its.worker_rank])))
        self._merge_received()
        self._sent_counts.fill(0)
        self._received_count = 0

    def resume_from_average(self, state: Mapping[str, Any], step: int) -> None:
        super().resume_from_average(state, step)
        self._exchange_index, self._due_step = state.get("_turn", 0), self._trigger.next_due(step - 1)
        self._trigger.reset_reference(step - 1)

    def finish(self) -> None:
        self.quiesce(0)
        self._ctx.comm_thread.remove_poller(self._progress)

    def _send_model(self, target: int) -> None:
        its, parameters = self._ctx, self._ctx.parameters
        weights = its.relative_weights
        its_own = weights[its.worker_rank]
        part = MAX_GIVEN_SHARE * min(1.0, self.model_weight / its_own) ** LIGHT_MODEL_POWER * \
                                     max(min(weights) / its_own, 1 / MAX_WEIGHT_RATIO)
        self._send_buffer[:_HEADER_BYTES].view(np.float64)[0] = part * self.model_weight
        self.model_weight -= part * self.model_weight
        self._send_buffer[_HEADER_BYTES:] = self._compressor.compress(
            parameters, np.random.default_rng((its.seed, its.worker_rank)))
        # what the compressor leaves out stays here, with the weight that stays
        self._compressor.decompress(self._send_buffer[_HEADER_BYTES:], self._compression_error)
        np.subtract(parameters, self._compression_error, out=self._compression_error)
        self._compression_error *= np.float32(part / (1 - part))
        parameters += self._compression_error
        self._sent_counts[target] += 1
        its.comm_thread.submit(lambda: self._start_send(its.workers[target]))

    def _start_send(self, peer: int) -> None:
        self._send_request = self._ctx.p2p.isend(peer, self._send_buffer, _PUSH_TAG)

    def _merge_received(self) -> tuple[bool, bool]:
        """Mix in what came; whether a push can leave at once, and whether any came."""
        box, weight, free = self._ctx.comm_thread.call(self._swap_inbox)
        if weight:
            self._ctx.device_copies.copy_to_host()
            parameters = self._ctx.parameters
            parameters *= np.float32(self.model_weight / (self.model_weight + weight))
            box *= np.float32(1 / (self.model_weight + weight))
            parameters += box
            self.model_weight += weight
            box.fill(0)
        return bool(free), bool(weight)

    def _swap_inbox(self) -> tuple[Any, float, bool]:
        """What came, its weight, and whether nothing is leaving; an errand."""
        self._progress()
        full, weight = self._inbox, self._inbox_weight
        if weight:
            self._inbox, self._spare_inbox, self._inbox_weight = self._spare_inbox, full, 0.0
        return full, weight, self._send_request is None

    def _progress(self) -> bool:
        """Help messages on; an errand, or between errands. Whether any came, or is under way."""
        transport = self._ctx.p2p.transport
        moved = False
        if self._send_request is not None and transport.testall([self._send_request]):
            self._send_request, moved = None, True
        if self._recv_request is None:
            peer = transport.iprobe(_PUSH_TAG)
            if peer is not None:
                self._recv_request, moved = transport.irecv(peer, self._recv_buffer, _PUSH_TAG), True
        if self._recv_request is not None and transport.testall([self._recv_request]):
            weight = float(self._recv_buffer[:_HEADER_BYTES].view(np.float64)[0])
            self._compressor.decompress(self._recv_buffer[_HEADER_BYTES:], self._decompressed)
            self._decompressed *= np.float32(weight)
            self._inbox += self._decompressed
            self._inbox_weight += weight
            self._received_count += 1
            self._recv_request, moved = None, True
        return moved or self._send_request is not None or self._recv_request is not None

    def _drain(self, expected: int) -> None:
        """Nobody sends any more: what is under way arrives without a wait for anybody."""
        while self._received_count < expected or self._send_request is not None:
            self._progress()
