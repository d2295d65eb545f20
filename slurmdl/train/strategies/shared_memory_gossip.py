"""Gossip through shared memory inside each node, and by messages between one leader per node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.gossip_graphs import Base2Graph
from slurmdl.plan import group_ranks
from slurmdl.train.mixers import WeightedGraph
from slurmdl.train.strategies.strategy import DeviceCopies, Strategy, StrategyContext
from slurmdl.train.transports.transport import RankFailedError
from slurmdl.train.transports.window import ModelWindow, mix_pair, weighted_mean


def node_leaders(workers: Sequence[int], nodes: Sequence[str], zones: Sequence[str]) -> tuple[int, ...]:
    """The first worker of each node, ordered by zone."""
    leaders = [group[0] for group in group_ranks(workers, nodes)]
    return tuple(leader for zone_leaders in group_ranks(leaders, zones) for leader in zone_leaders)


class SharedMemoryGossip(Strategy):
    """Mixes models inside the nodes in every step; leaders make the due exchanges between nodes.

    Synchronous: the models are in shared memory. In other steps, the ranks of a node use the graph `base-2`: both
    ranks of a pair mix half of their two models each, in place. In a due step, the ranks compute their node's mean in
    shared memory, a slice each; the leaders exchange these means by the inter-node strategy; and all ranks of the
    node copy the result. This preserves the (weighted) sum of the models up to rounding; the weight of a leader is
    its node's.

    Asynchronous: a rank mixes in the newest complete version that a rank of its node has published, and the leader
    uses the inter-node strategy with its own model. No rank blocks. The sum is not preserved, because a rank may mix
    in an outdated model; but new models are weighted means of models, so none leaves their range.

    Args:
        make_inter_node: makes the leader's inter-node strategy, whose workers are the leaders.

    Attributes:
        exchanges, exchanges_skipped: exchanges between nodes; with a single node or asynchronous, also those inside.

    Reference: X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous decentralized parallel stochastic gradient descent.
    ICML 2018. arXiv:1710.06952
    """

    survives_rank_failure = True
    state_fields: tuple[str, ...] = ("_inter_node",)

    def __init__(self, ctx: StrategyContext, make_inter_node: Callable[[StrategyContext], Strategy]) -> None:
        super().__init__(ctx)
        self.lockstep = not ctx.config.asynchronous
        self._make_inter_node = make_inter_node
        rank, groups = ctx.p2p.rank, group_ranks(ctx.workers, ctx.nodes)
        self._node_workers = next(group for group in groups if rank in group)
        self._node_index = self._node_workers.index(rank)
        count = len(self._node_workers)
        self._intra_node = WeightedGraph(Base2Graph([""] * count), (1.0,) * count)
        allocate_shared, size = ctx.p2p.transport.allocate_shared, ctx.parameters.size
        try:
            self._window: ModelWindow = ctx.comm_thread.call(
                lambda: ModelWindow(allocate_shared, rank, self._node_workers, size))
        except RankFailedError:
            raise
        except TrainError as error:
            raise TrainError(f"--shared-memory: {error}") from error
        if self.lockstep:
            model = self._window.live_model(rank)
            ctx.relocate_parameters(model)
            ctx = self._ctx = replace(ctx, parameters=model)
        leaders = node_leaders(ctx.workers, ctx.nodes, ctx.zones)
        self._single_node = len(leaders) == 1
        self._inter_node = None
        if rank in leaders and not self._single_node:
            leader_groups = [group for leader in leaders for group in groups if leader in group]
            leader_ctx = replace(ctx, workers=leaders, model_weights=lambda: tuple(
                sum(self._ctx.relative_weights_of(group)) for group in leader_groups))
            if self.lockstep:
                self._window.node_mean[:] = ctx.parameters
                leader_ctx = replace(leader_ctx, parameters=self._window.node_mean, device_copies=DeviceCopies())
            self._inter_node = make_inter_node(leader_ctx)

    def after_optimizer_step(self, step: int) -> None:
        self._ctx.device_copies.copy_to_host()
        if not self.lockstep:
            self._mix_async(step)
        elif not (step + 1) % self._ctx.config.exchange_period and not self._single_node:
            self._mix_inter_node(step)
        else:
            self._ctx.comm_thread.call(lambda: self._mix_intra_node(step))
        self._ctx.device_copies.copy_to_device()

    def _mix_intra_node(self, step: int) -> None:
        self._intra_node.set_weights(self._ctx.relative_weights_of(self._node_workers))
        mixing_round = self._intra_node.round(step)
        peer_index = mixing_round.target[self._node_index]
        rank, peer = self._ctx.p2p.rank, self._node_workers[peer_index]
        if peer == rank:
            return
        with self._peers_ready([peer], step):
            size = self._ctx.parameters.size
            half = slice(0, size // 2) if rank < peer else slice(size // 2, size)
            mix_pair(self._window.live_model(rank)[half], self._window.live_model(peer)[half],
                     (float(mixing_round.weight[self._node_index]), float(mixing_round.weight[peer_index])))
        self._wait_flag([peer], "mixed", step)
        self.exchanges += self._single_node

    @contextmanager
    def _peers_ready(self, peers: Sequence[int], step: int) -> Iterator[None]:
        """Access the models of peers in the block, after they have reached this step."""
        self._window.set_flag("ready", step)
        self._wait_flag(peers, "ready", step)
        yield
        self._window.set_flag("mixed", step)

    def _wait_flag(self, peers: Sequence[int], flag: str, step: int) -> None:
        with self._ctx.p2p.timing_wait():
            for peer in peers:
                self._window.wait_flag(peer, flag, step)

    def _mix_inter_node(self, step: int) -> None:
        comm_thread, window = self._ctx.comm_thread, self._window
        comm_thread.call(lambda: self._average_node_slice(step))
        if self._inter_node:
            comm_thread.call(lambda: self._wait_flag(self._node_workers, "mixed", step))
            self._inter_node.after_optimizer_step(step)
            self.exchanges = self._inter_node.exchanges
            comm_thread.call(lambda: window.set_flag("exchanges", self.exchanges))
            comm_thread.call(lambda: window.set_flag("averaged", step))
        else:
            comm_thread.call(lambda: self._wait_flag(self._node_workers[:1], "averaged", step))
            self.exchanges = comm_thread.call(lambda: window.get_flag(self._node_workers[0], "exchanges"))
        self.exchanges_skipped = (step + 1) // self._ctx.config.exchange_period - self.exchanges
        # unchanged until all ranks of the node are ready for another mean
        self._ctx.parameters[:] = window.node_mean

    def _average_node_slice(self, step: int) -> None:
        """Compute this rank's slice of the node's mean."""
        size, count = self._ctx.parameters.size, len(self._node_workers)
        part = slice(size * self._node_index // count, size * (self._node_index + 1) // count)
        with self._peers_ready(self._node_workers, step):
            weighted_mean([self._window.live_model(peer)[part] for peer in self._node_workers],
                          self._window.node_mean[part], self._ctx.relative_weights_of(self._node_workers))

    def _mix_async(self, step: int) -> None:
        ctx, count = self._ctx, len(self._node_workers)
        if count > 1:
            random = np.random.default_rng((ctx.seed, ctx.p2p.rank, step))
            peer = self._node_workers[self._node_index - int(random.integers(1, count))]
            own_weight, peer_weight = self._ctx.relative_weights_of((ctx.p2p.rank, peer))
            mixed = ctx.comm_thread.call(lambda: self._window.mix_newest(
                step, ctx.parameters, peer, peer_weight / (own_weight + peer_weight)))
            self.exchanges += mixed
            self.exchanges_skipped += not mixed
        if self._inter_node:
            before = self._inter_node.exchanges, self._inter_node.exchanges_skipped
            self._inter_node.after_optimizer_step(step)
            self.exchanges += self._inter_node.exchanges - before[0]
            self.exchanges_skipped += self._inter_node.exchanges_skipped - before[1]

    def drain(self, checkpoint_number: int) -> None:
        if self._inter_node:
            self._inter_node.drain(checkpoint_number)

    def resume_from_average(self, states: Sequence[Mapping[str, Any]], step: int) -> None:
        super().resume_from_average(states, step)
        if self._inter_node:
            self._inter_node.resume_from_average([states[0]["_inter_node"] or {}], step)

    def abort(self) -> None:
        """Leave the window open, because closing it would involve the failed rank."""
        self._leave_window()

    def without_failed_ranks(self, ctx: StrategyContext) -> Strategy:
        return SharedMemoryGossip(ctx, self._make_inter_node)

    def finish(self) -> None:
        [self.model_weight] = self._ctx.relative_weights_of((self._ctx.p2p.rank,))
        if self._inter_node:
            self._inter_node.finish()
        self._leave_window()

    def close(self) -> None:
        self._ctx.comm_thread.call(self._window.close)

    def _leave_window(self) -> None:
        if self.lockstep:
            self._ctx.relocate_parameters(np.empty_like(self._ctx.parameters))
