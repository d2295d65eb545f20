"""Gossip: every worker updates on its own, then averages its model with another worker's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.gossip_graphs import GRAPHS
from slurmdl.train.mixing.mixers import GossipEdge, make_mixer
from slurmdl.train.mixing.weighted_graph import WeightedGraph
from slurmdl.train.strategies.push_sum import PushSum
from slurmdl.train.strategies.shared_memory_gossip import SharedMemoryGossip
from slurmdl.train.strategies.strategy import Strategy, StrategyContext, TriggeredStrategy
from slurmdl.train.triggers import CommCost


def make_gossip(ctx: StrategyContext) -> Strategy:
    gossip = PushSum if ctx.config.asynchronous else Gossip
    return SharedMemoryGossip(ctx, gossip) if ctx.config.shared_memory else gossip(ctx)


class Gossip(TriggeredStrategy):
    """Weighted mean of two models in every exchange, which preserves the sum; partners by slurmdl.gossip_graphs.

    With a drift trigger, partners send each other a vote of one byte, and exchange if either wants to.

    Reference: X. Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017.
    arXiv:1705.09056
    """

    survives_rank_failure = True
    state_fields: tuple[str, ...] = ("_mixer",)

    def __init__(self, ctx: StrategyContext) -> None:
        self._mixer = make_mixer(ctx.config.compression, ctx.parameters, self._swap_buffers)
        super().__init__(ctx, CommCost(self._mixer.message_bytes, 1.0, ctx.allreduce_bytes))
        zones = [ctx.zones[worker] for worker in ctx.workers]
        graph = GRAPHS[ctx.config.comm_pattern or ""](zones, ctx.seed)
        self._graph = WeightedGraph(graph, (1.0,) * len(zones), self._mixer.max_weight)
        self._worker_rank = ctx.worker_rank
        self._vote, self._peer_vote = np.zeros(1, np.uint8), np.zeros(1, np.uint8)

    def exchange(self) -> bool:
        edge = self._current_edge()
        if edge.send_to == self._ctx.p2p.rank:
            return False
        self._mixer.mix(edge, np.random.default_rng((self._ctx.seed, self._worker_rank, self.exchange_index)))
        return True

    def decide(self, urgency: float) -> bool:
        edge, p2p = self._current_edge(), self._ctx.p2p
        if edge.send_to == p2p.rank:
            return False
        self._vote[0] = urgency >= 1
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
