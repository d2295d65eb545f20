"""Gossip: every worker updates on its own, then averages its model with another worker's, or pushes it to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.gossip_graphs import GRAPHS
from slurmdl.train.collectives import AllreduceOp
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.mixers import GossipEdge, WeightedGraph, make_mixer
from slurmdl.train.strategies.shared_memory_gossip import SharedMemoryGossip
from slurmdl.train.strategies.strategy import FloatArray, Strategy, StrategyContext, TriggeredStrategy
from slurmdl.train.transports.transport import Tag
from slurmdl.train.triggers import CommCost


def make_gossip(ctx: StrategyContext) -> Strategy:
    gossip = PushSum if ctx.config.asynchronous else Gossip
    return SharedMemoryGossip(ctx, gossip) if ctx.config.shared_memory else gossip(ctx)


class Gossip(TriggeredStrategy):
    """Weighted mean of two models in every exchange, which preserves the sum; partners by slurmdl.gossip_graphs.

    With a drift trigger, partners send each other a vote of one byte, and exchange if either wants to.

    With an outer optimizer, each worker has outer parameters z of its own, and the mixed model y only gives their
    direction: u = mu u + alpha (y - z), z += u, x = z. This is NoLoCo's step with its gamma equal to alpha, as in its
    published code; then the sum of the models remains that of the outer steps, and only one model is sent.

    Reference: X. Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017.
    arXiv:1705.09056 J. Kolehmainen et al.: NoLoCo: no-all-reduce low communication training method for large models.
    2025. arXiv:2506.10911
    """

    survives_rank_failure = True
    state_fields: tuple[str, ...] = ("_mixer", "_outer_parameters", "_outer_momentum")

    def __init__(self, ctx: StrategyContext) -> None:
        self._mixer = make_mixer(ctx.config.compression, ctx.parameters, self._swap_buffers)
        count = len(ctx.workers)
        final_average_bytes = 8.0 * ctx.parameters.size * (count - 1) / count
        super().__init__(ctx, CommCost(self._mixer.message_bytes, 1.0, final_average_bytes))
        zones = [ctx.zones[worker] for worker in ctx.workers]
        graph = GRAPHS[ctx.config.comm_pattern or ""](zones, ctx.seed)
        self._graph = WeightedGraph(graph, (1.0,) * len(zones), self._mixer.max_weight)
        self._worker_rank = ctx.worker_rank
        has_outer = ctx.config.has_outer_optimizer
        self._outer_parameters: FloatArray | None = ctx.parameters.copy() if has_outer else None
        self._outer_momentum: FloatArray | None = np.zeros_like(ctx.parameters) if has_outer else None
        self._vote, self._peer_vote = np.zeros(1, np.uint8), np.zeros(1, np.uint8)

    def exchange(self) -> bool:
        edge = self._current_edge()
        if edge.send_to == self._ctx.p2p.rank:
            return False
        self._mixer.mix(edge, np.random.default_rng((self._ctx.seed, self._worker_rank, self.exchange_index)))
        if self._outer_parameters is not None and self._outer_momentum is not None:
            rate, momentum = map(np.float32, self._ctx.config.outer_step)
            self._outer_momentum *= momentum
            self._outer_momentum += rate * (self._ctx.parameters - self._outer_parameters)
            self._outer_parameters += self._outer_momentum
            self._ctx.parameters[:] = self._outer_parameters
        return True

    def resume_from_average(self, states: Sequence[Mapping[str, Any]], step: int) -> None:
        super().resume_from_average(states, step)
        if self._outer_parameters is not None and self._outer_momentum is not None:
            for vector, name in ((self._outer_parameters, "_outer_parameters"),
                                 (self._outer_momentum, "_outer_momentum")):
                vector[:] = sum(state[name].numpy() for state in states) / np.float32(len(states))

    def decide(self, drift_ratio: float) -> bool:
        edge, p2p = self._current_edge(), self._ctx.p2p
        if edge.send_to == p2p.rank:
            return False
        self._vote[0] = drift_ratio >= 1
        p2p.exchange([(edge.send_to, self._vote)], [(edge.recv_from, self._peer_vote)])
        return bool(self._vote[0] or self._peer_vote[0])

    def _current_edge(self) -> GossipEdge:
        weights = self._ctx.model_weights()
        if weights:
            self._graph.set_weights(weights)
        mixing_round, workers = self._graph.round(self.exchange_index), self._ctx.workers
        return GossipEdge(workers[mixing_round.target[self._worker_rank]],
                          workers[mixing_round.source[self._worker_rank]],
                          float(mixing_round.weight[self._worker_rank]))

    def _swap_buffers(self, send_to: int, send_buffer: npt.NDArray[np.generic], recv_from: int,
                      recv_buffer: npt.NDArray[np.generic]) -> None:
        sends, receives, p2p = [(send_to, send_buffer)], [(recv_from, recv_buffer)], self._ctx.p2p

        def swap() -> None:
            p2p.rendezvous_handshake(sends, receives)
            p2p.exchange_chunked(sends, receives)

        self._ctx.comm_thread.call(swap)


_HEADER_BYTES = 8
#: largest share of its weight that a model gives away, and bound of the ratio between target weights
MAX_GIVEN_SHARE, MAX_WEIGHT_RATIO = 0.5, 4
#: power of its relative weight by which a light model gives away less
LIGHT_MODEL_POWER = 3
#: weight below which a model is not pushed, because it would hardly change the receiver
MIN_WEIGHT = 2.0 ** -20


class PushSum(Strategy):
    """Each model has a weight, initially 1. The sender keeps half of it and sends the model with the other half; the
    receiver takes the weighted mean of both models, and the sum of the weights. This preserves the weighted sum of
    all models, including those in flight.

    Messages to a slow worker wait for the end of its step. If halves were always sent, most of the weight would
    wait there with one of eight ranks 4 times slower. So a model below its target weight gives away w^3 / 2 of its
    relative weight w. At equal flow in both directions, a rank that sends r times as often weighs 1 / r^(1/4) as
    much. Models with larger target weights (larger nodes or batches) give away less in proportion, so that weights
    match their targets on average if all ranks send equally often.

    A push is skipped if the previous one is not complete. Messages are received during computation, and mixed in
    between the optimizer step and the next forward pass.

    Reference: M. Blot, D. Picard, M. Cord, N. Thome: Gossip training for deep learning. 2016. arXiv:1611.09726;
    M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic gradient push for distributed deep learning. ICML 2019.
    arXiv:1811.10792
    """

    lockstep = False
    survives_rank_failure = True

    def __init__(self, ctx: StrategyContext) -> None:
        super().__init__(ctx)
        config, size, count = ctx.config, ctx.parameters.size, len(ctx.workers)
        zones = [ctx.zones[worker] for worker in ctx.workers]
        self._graph = GRAPHS[config.comm_pattern or ""](zones, ctx.seed)
        self._compressor = COMPRESSORS[config.compression]
        message_bytes = _HEADER_BYTES + self._compressor.packed_bytes(size)
        self.model_weight = ctx.relative_weights[ctx.worker_rank]
        self._send_buffer, self._recv_buffer = np.empty(message_bytes, np.uint8), np.empty(message_bytes, np.uint8)
        #: of the training thread and of the communication thread
        self._compression_error, self._decompressed = np.empty_like(ctx.parameters), np.empty_like(ctx.parameters)
        #: weighted sum of the received models, and its weight; the spare inbox is all zeros
        self._inbox, self._spare_inbox = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._inbox_weight = 0.0
        self._send_request: Any = None
        self._recv_request: Any = None
        self._sent_counts = np.zeros(count, np.float32)
        self._received_count = 0
        ctx.comm_thread.add_poller(self._progress)

    def after_optimizer_step(self, step: int) -> None:
        can_send, changed = self._merge_received()
        exchange_index, steps_after_due = divmod(step + 1, self._ctx.config.exchange_period)
        if not steps_after_due:
            changed |= self._push(exchange_index - 1, can_send)
        if changed:
            self._ctx.device_copies.copy_to_device()

    def _push(self, exchange_index: int, can_send: bool) -> bool:
        """Push the model to the partner of this exchange if that does not block; return whether it was sent."""
        ctx = self._ctx
        ctx.device_copies.copy_to_host()
        target = int(self._graph.round(exchange_index).target[ctx.worker_rank])
        has_partner = target != ctx.worker_rank
        pushed = can_send and has_partner and self.model_weight >= MIN_WEIGHT
        if pushed:
            self._send_model(target)
        self.exchanges += pushed
        self.exchanges_skipped += not pushed and has_partner
        return pushed

    def drain(self, checkpoint_number: int) -> None:
        """Receive all models sent to this rank, whose number the ranks exchange."""
        ctx, counts = self._ctx, self._sent_counts
        ctx.comm_thread.call(AllreduceOp(ctx.p2p, [ctx.workers], counts).run)
        ctx.comm_thread.call(lambda: self._receive_all(int(counts[ctx.worker_rank])))
        self._merge_received()
        self._sent_counts.fill(0)
        self._received_count = 0

    def finish(self) -> None:
        self.drain(0)
        self._ctx.comm_thread.remove_poller(self._progress)

    def _send_model(self, target: int) -> None:
        ctx, parameters = self._ctx, self._ctx.parameters
        target_weights = ctx.relative_weights
        own_target = target_weights[ctx.worker_rank]
        share = (MAX_GIVEN_SHARE * min(1.0, self.model_weight / own_target) ** LIGHT_MODEL_POWER
                 * max(min(target_weights) / own_target, 1 / MAX_WEIGHT_RATIO))
        self._send_buffer[:_HEADER_BYTES].view(np.float64)[0] = share * self.model_weight
        self.model_weight -= share * self.model_weight
        self._send_buffer[_HEADER_BYTES:] = self._compressor.compress(
            parameters, np.random.default_rng((ctx.seed, ctx.worker_rank)))
        # keep the compression error here, scaled to the remaining weight
        self._compressor.decompress(self._send_buffer[_HEADER_BYTES:], self._compression_error)
        np.subtract(parameters, self._compression_error, out=self._compression_error)
        self._compression_error *= np.float32(share / (1 - share))
        parameters += self._compression_error
        self._sent_counts[target] += 1
        ctx.comm_thread.submit(lambda: self._start_send(ctx.workers[target]))

    def _start_send(self, peer: int) -> None:
        self._send_request = self._ctx.p2p.isend(peer, self._send_buffer, Tag.PUSH)

    def _merge_received(self) -> tuple[bool, bool]:
        """Mix in the received models; return whether a push would not block, and whether there were any."""
        received, weight, can_send = self._ctx.comm_thread.call(self._swap_inbox)
        if weight:
            self._ctx.device_copies.copy_to_host()
            parameters = self._ctx.parameters
            parameters *= np.float32(self.model_weight / (self.model_weight + weight))
            received *= np.float32(1 / (self.model_weight + weight))
            parameters += received
            self.model_weight += weight
            received.fill(0)
        return bool(can_send), bool(weight)

    def _swap_inbox(self) -> tuple[FloatArray, float, bool]:
        """Return the inbox, its weight, and whether no send is in flight; an op."""
        self._progress()
        inbox, weight = self._inbox, self._inbox_weight
        if weight:
            self._inbox, self._spare_inbox, self._inbox_weight = self._spare_inbox, inbox, 0.0
        return inbox, weight, self._send_request is None

    def _progress(self) -> bool:
        """Advance messages, in an op or as a poller; return whether any moved or is in flight."""
        transport = self._ctx.p2p.transport
        moved = False
        if self._send_request is not None and transport.testall([self._send_request]):
            self._send_request, moved = None, True
        if self._recv_request is None:
            peer = transport.iprobe(Tag.PUSH)
            if peer is not None:
                self._recv_request, moved = transport.irecv(peer, self._recv_buffer, Tag.PUSH), True
        if self._recv_request is not None and transport.testall([self._recv_request]):
            weight = float(self._recv_buffer[:_HEADER_BYTES].view(np.float64)[0])
            self._compressor.decompress(self._recv_buffer[_HEADER_BYTES:], self._decompressed)
            self._decompressed *= np.float32(weight)
            self._inbox += self._decompressed
            self._inbox_weight += weight
            self._received_count += 1
            self._recv_request, moved = None, True
        return moved or self._send_request is not None or self._recv_request is not None

    def _receive_all(self, expected: int) -> None:
        """Advance messages until all expected ones are received; no rank sends more."""
        while self._received_count < expected or self._send_request is not None:
            self._progress()
