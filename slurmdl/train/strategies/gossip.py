"""Gossip: every worker updates by itself, then averages its parameters with those of one other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.plan import group_ranks
from slurmdl.train.comm_budget import CommCost
from slurmdl.train.mixing.collectives import AllreduceOp
from slurmdl.train.mixing.mixers import GossipEdge, make_mixer
from slurmdl.train.mixing.weighted_graph import GRAPHS, GossipGroup, WeightedGraph
from slurmdl.train.strategies.push_sum import PushSum
from slurmdl.train.strategies.shared_memory_gossip import SharedMemoryGossip
from slurmdl.train.strategies.strategy import Strategy, StrategyContext
from slurmdl.train.strategies.triggered import TriggeredStrategy


def make_gossip(ctx: StrategyContext) -> Strategy:
    """This rank's part: in step with its partners, or asynchronous; by messages alone, or in shared memory, too."""
    method = ctx.config
    by_messages = PushSum if method.asynchronous else Gossip
    return SharedMemoryGossip(ctx, by_messages) if method.shared_memory else by_messages(ctx)


class Gossip(TriggeredStrategy):
    """A weighted mean of two models in every exchange; the graph says of whose (slurmdl.gossip_graphs). Keeps the sum.

    Where a trigger looks at the models, the two of a pair tell each other by one byte whether they want to exchange,
    and do so if either wants.

    References
    ----------
    X. Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017. arXiv:1705.09056
    Y. Chen et al.: Accelerating gossip SGD with periodic global averaging. ICML 2021. arXiv:2105.09080
    """

    survives_rank_failure = True
    state_fields: tuple[str, ...] = ("_mixer",)

    def __init__(self, ctx: StrategyContext) -> None:
        self._mixer = make_mixer(ctx.config.compression, ctx.parameters, self._swap_buffers)
        count = len(ctx.workers)
        once = 8.0 * ctx.parameters.size * (count - 1) / count
        every = ctx.config.global_average_every
        super().__init__(ctx, CommCost(self._mixer.message_bytes, 1.0, once, once / every if every else 0.0))
        zones = [ctx.zones[worker] for worker in ctx.workers]
        graph = GRAPHS[ctx.config.comm_pattern or ""](GossipGroup(zones, ctx.seed, ctx.costs))
        self._unweighted_graph, self._model_weights = graph, (1.0,) * count
        self._graph = WeightedGraph(graph, self._model_weights, self._mixer.max_weight)
        self._worker_rank = ctx.worker_rank
        self._global_average: AllreduceOp | None = None
        if every:
            # not in place: where a rank is lost meanwhile, the model must still be there
            self._average_buffer = np.empty_like(ctx.parameters)
            self._global_average = AllreduceOp(ctx.p2p, group_ranks(ctx.workers, ctx.zones), self._average_buffer)
        self._vote, self._peer_vote = np.zeros(1, np.uint8), np.zeros(1, np.uint8)

    def after_optimizer_step(self, step: int) -> None:
        super().after_optimizer_step(step)
        every = self._ctx.config.global_average_every
        if self._global_average and (step + 1) % every == 0:
            self._ctx.device_copies.copy_to_host()
            np.multiply(self._ctx.parameters, np.float32(self._ctx.own_weight_share), out=self._average_buffer)
            self._ctx.comm_thread.call(self._global_average.run)
            self._ctx.parameters[:] = self._average_buffer
            self._ctx.device_copies.copy_to_device()
            self._trigger.reset_reference(step)

    def next_exchange(self, step: int) -> int:
        every = self._ctx.config.global_average_every
        due = super().next_exchange(step)
        return min(due, (step // every + 1) * every - 1) if every else due

    def exchange(self) -> bool:
        edge = self._current_edge()
        if edge.send_to == self._ctx.p2p.rank:
            return False
        random = np.random.default_rng((self._ctx.seed, self._worker_rank, self.exchange_index))
        self._mixer.mix(edge, random)
        return True

    def decide(self, urgency: float) -> bool:
        edge, messages = self._current_edge(), self._ctx.p2p
        if edge.send_to == messages.rank:
            return False
        self._vote[0] = urgency >= 1
        messages.exchange([(edge.send_to, self._vote)], [(edge.recv_from, self._peer_vote)])
        return bool(self._vote[0] or self._peer_vote[0])

    def _current_edge(self) -> GossipEdge:
        weights = self._ctx.model_weights() or self._model_weights
        if weights != self._model_weights:
            self._graph, self._model_weights = WeightedGraph(
    self._unweighted_graph, weights, self._mixer.max_weight), weights
        turn, workers = self._graph.round(self.exchange_index), self._ctx.workers
        return GossipEdge(workers[turn.target[self._worker_rank]], workers[turn.source[self._worker_rank]],
                    float(turn.weight[self._worker_rank]))

    def _swap_buffers(
        self, send_to: int, send_buffer: npt.NDArray[np.generic], recv_from: int, recv_buffer: npt.NDArray[np.generic]) -> None:
        sends, receives, messages = [(send_to, send_buffer)], [(recv_from, recv_buffer)], self._ctx.p2p

        def swap() -> None:
            messages.rendezvous_handshake(sends, receives)
            messages.exchange_chunked(sends, receives)

        self._ctx.comm_thread.call(swap)
