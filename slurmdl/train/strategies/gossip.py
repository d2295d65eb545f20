"""Gossip: every worker updates on its own, then averages its model with another worker's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.gossip_graphs import GRAPHS
from slurmdl.train.mixing.mixers import GossipEdge, WeightedGraph, make_mixer
from slurmdl.train.strategies.push_sum import PushSum
from slurmdl.train.strategies.shared_memory_gossip import SharedMemoryGossip
from slurmdl.train.strategies.strategy import FloatArray, Strategy, StrategyContext, TriggeredStrategy
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
