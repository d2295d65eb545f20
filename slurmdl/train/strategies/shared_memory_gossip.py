"""Gossip through shared memory inside each node, and by messages between one leader per node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from slurmdl.plan import group_ranks
from slurmdl.train.comm_budget import CommCost
from slurmdl.train.mixing.weighted_graph import GRAPHS, GossipGroup, WeightedGraph
from slurmdl.train.strategies.strategy import DeviceCopies, Strategy, StrategyContext
from slurmdl.train.transports.window import ModelWindow, mix_pair, weighted_mean
from slurmdl.train.triggers import TRIGGERS


def node_leaders(workers: Sequence[int], nodes: Sequence[str], zones: Sequence[str]) -> tuple[int, ...]:
    """The first worker of each node, ordered by zone."""
    first = [group[0] for group in group_ranks(workers, nodes)]
    return tuple(leader for zone in group_ranks(first, zones) for leader in zone)


class SharedMemoryGossip(Strategy):
    """Every step mixes models inside the nodes; where an exchange between nodes is due, leaders make it for all.

    The models themselves are in shared memory until the end. In a step without an exchange, the ranks of a node play
    the graph `base`: once both of a pair are there, each mixes one half of both models, in place, so that nothing is
    copied. Where an exchange is due, each node's mean is made in shared memory, a part by each of its ranks; the
    leaders, ordered by zone, play the strategy `between` with these means; and all ranks of the node go on with what
    came of it. All this keeps the sum of the models, to the rounding of fp32; where they have weights, the weighted
    sum, and a leader's is that of its node.

    Asynchronous, a rank mixes in the newest whole copy of a model that a rank of its node has published, and the
    leader plays `between` with its own model. Nobody waits, and the sum is not kept: one of two partners may mix in
    what the other has left behind. A new model is always a weighted mean of models, so none leaves their range.

    Parameters
    ----------
    between : what makes the leader's part between nodes; its workers are the leaders.

    Attributes
    ----------
    fired, skipped : exchanges between nodes; where there is one node, and asynchronous, those inside nodes, too.

    References
    ----------
    X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous decentralized parallel stochastic gradient descent. ICML 2018.
    arXiv:1710.06952
    """

    survives_rank_failure = True
    state_fields: tuple[str, ...] = ("_between", "_trigger", "_due", "_dues")

    def __init__(self, ctx: StrategyContext, make_inter_node: Callable[[StrategyContext], Strategy]) -> None:
        super().__init__(ctx)
        self.lockstep = not ctx.config.asynchronous
        self._make_inter_node = make_inter_node
        rank, groups = ctx.p2p.rank, group_ranks(ctx.workers, ctx.nodes)
        self._node_workers = next(group for group in groups if rank in group)
        leading = node_leaders(ctx.workers, ctx.nodes, ctx.zones)
        self._base_graph, self._node_weights = GRAPHS["base"](GossipGroup(
            [""] * len(self._node_workers))), (1.0,) * len(self._node_workers)
        self._intra_node = WeightedGraph(self._base_graph, self._node_weights)
        self._node_index = self._node_workers.index(rank)
        self._relative_weights_of = ctx.relative_weights_of
        share, size = ctx.p2p.transport.allocate_shared, ctx.parameters.size
        self._window = ctx.comm_thread.call(lambda: ModelWindow(share, rank, self._node_workers, size))
        if not ctx.config.asynchronous:
            ctx.relocate_parameters(self._window.model(rank))
            ctx = self._ctx = replace(ctx, parameters=self._window.model(rank))
        self._inter_node = None
        self._single_node = len(leading) == 1
        method = ctx.config
        # what is sent is the leaders' alone; steps are due for all alike
        self._trigger = TRIGGERS[method.trigger_name](
            method, ctx.parameters, ctx.sizes, ctx.learning_rate, CommCost(0.0))
        self._due_step, self._due_count = self._trigger.next_due(-1), 0
        if rank in leading and not self._single_node:
            nodes = [group for leader in leading for group in groups if leader in group]
            its = replace(ctx, workers=leading,
                          model_weights=lambda: tuple(sum(self._relative_weights_of(group)) for group in nodes))
            if not method.asynchronous:
                self._window.common[:] = ctx.parameters
                its = replace(its, parameters=self._window.common, device_copies=DeviceCopies())
            self._inter_node = make_inter_node(its)

    def after_optimizer_step(self, step: int) -> None:
        self._ctx.device_copies.copy_to_host()
        if self._ctx.config.asynchronous:
            self._mix_async(step)
        elif self._is_due(step) and not self._single_node:
            self._mix_inter_node(step)
        else:
            self._ctx.comm_thread.call(lambda: self._mix_intra_node(step))
        self._ctx.device_copies.copy_to_device()

    def _is_due(self, step: int) -> bool:
        """Whether the leaders need their nodes' means in this step: to exchange them, or to look at them."""
        trigger, due, every = self._trigger, self._due_step, self._ctx.config.global_average_every
        if step == due:
            self._due_count += 1
            self._due_step = trigger.next_due(step)
            return True
        looks = not trigger.is_unconditional(due) and step == trigger.decision_step(due)
        return looks or (bool(every) and (step + 1) % every == 0)

    def _mix_intra_node(self, step: int) -> None:
        weights = self._relative_weights_of(self._node_workers)
        if weights != self._node_weights:
            self._intra_node, self._node_weights = WeightedGraph(self._base_graph, weights), weights
        turn = self._intra_node.round(step)
        other = turn.target[self._node_index]
        rank, peer = self._ctx.p2p.rank, self._node_workers[other]
        if peer == rank:
            return
        with self._peers_ready([peer], step):
            size = self._ctx.parameters.size
            half = slice(0, size // 2) if rank < peer else slice(size // 2, size)
            mix_pair(self._window.model(rank)[half], self._window.model(peer)[half],
                     (float(turn.weight[self._node_index]), float(turn.weight[other])))
        self._wait_flag([peer], "mixed", step)
        self.exchanges += self._single_node

    @contextmanager
    def _peers_ready(self, peers: Sequence[int], step: int) -> Iterator[None]:
        """Around what reads and writes models of peers, all of which are in this step, too."""
        self._window.tell("ready", step)
        self._wait_flag(peers, "ready", step)
        yield
        self._window.tell("mixed", step)

    def _wait_flag(self, peers: Sequence[int], flag: str, step: int) -> None:
        with self._ctx.p2p.timing_wait():
            for peer in peers:
                self._window.wait(peer, flag, step)

    def _mix_inter_node(self, step: int) -> None:
        courier, window = self._ctx.comm_thread, self._window
        courier.call(lambda: self._average_node_part(step))
        if self._inter_node:
            courier.call(lambda: self._wait_flag(self._node_workers, "mixed", step))
            self._inter_node.after_optimizer_step(step)
            self.exchanges = self._inter_node.exchanges
            courier.call(lambda: window.tell("made", self.exchanges))
            courier.call(lambda: window.tell("arrived", step))
        else:
            courier.call(lambda: self._wait_flag(self._node_workers[:1], "arrived", step))
            self.exchanges = courier.call(lambda: window.told(self._node_workers[0], "made"))
        self.exchanges_skipped = self._due_count - self.exchanges
        # it stays as it is until all are ready for another mean
        self._ctx.parameters[:] = window.common

    def _average_node_part(self, step: int) -> None:
        """This rank's part of the node's mean."""
        size, count = self._ctx.parameters.size, len(self._node_workers)
        part = slice(size * self._node_index // count, size * (self._node_index + 1) // count)
        with self._peers_ready(self._node_workers, step):
            weighted_mean([self._window.model(peer)[part] for peer in self._node_workers], self._window.common[part],
                 self._relative_weights_of(self._node_workers))

    def _mix_async(self, step: int) -> None:
        if len(self._node_workers) > 1:
            draw = np.random.default_rng((self._ctx.seed, self._ctx.p2p.rank, step))
            peer = self._node_workers[self._node_index - int(draw.integers(1, len(self._node_workers)))]
            own, its = self._relative_weights_of((self._ctx.p2p.rank, peer))
            taken = self._ctx.comm_thread.call(lambda: self._window.blend(step, self._ctx.parameters, peer,
                                                                    its / (own + its)))
            self.exchanges += taken
            self.exchanges_skipped += not taken
        if self._inter_node:
            before = self._inter_node.exchanges, self._inter_node.exchanges_skipped
            self._inter_node.after_optimizer_step(step)
            self.exchanges += self._inter_node.exchanges - before[0]
            self.exchanges_skipped += self._inter_node.exchanges_skipped - before[1]

    def quiesce(self, checkpoint_number: int) -> None:
        if self._inter_node:
            self._inter_node.quiesce(checkpoint_number)

    def resume_from_average(self, state: Mapping[str, Any], step: int) -> None:
        super().resume_from_average(state, step)
        self._due_step = self._trigger.next_due(step - 1)
        if self._inter_node:
            self._inter_node.resume_from_average(state["_between"] or {}, step)

    def abort(self) -> None:
        """The window stays until the process ends, as it takes all of its ranks to give it back."""
        self._leave_window()

    def shrink(self, ctx: StrategyContext) -> Strategy:
        return SharedMemoryGossip(ctx, self._make_inter_node)

    def finish(self) -> None:
        [self.model_weight] = self._relative_weights_of((self._ctx.p2p.rank,))
        if self._inter_node:
            self._inter_node.finish()
        self._leave_window()
        self._ctx.comm_thread.call(self._window.close)

    def _leave_window(self) -> None:
        if not self._ctx.config.asynchronous:
            self._ctx.relocate_parameters(np.empty_like(self._ctx.parameters))
