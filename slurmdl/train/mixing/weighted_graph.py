"""Gossip graphs (slurmdl.gossip_graphs) for weighted models, and their spectral gap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.gossip_graphs import GRAPHS, Graph, MixingRound


class WeightedGraph:
    """A graph for models with weights, which preserves the weighted sum of the models.

    In each round a worker receives as much weight as it sends. A pair with share 1/2 goes to its weighted mean; a
    longer cycle exchanges that share of the smallest weight.

    Args:
        weights: of the workers' models, above 0.
        max_share: upper bound for shares of the graph, for models of equal weight.
    """

    def __init__(self, graph: Graph, weights: Sequence[float], max_share: float = 1.0) -> None:
        self._graph, self._max_share = graph, max_share
        self._weights: tuple[float, ...] = ()
        self.set_weights(weights)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Recompute the rounds if the weights have changed."""
        if self._weights != tuple(weights):
            self._weights = tuple(weights)
            self._rounds = [self._weighted_round(self._graph.round(step)) for step in range(self._graph.period)]

    def round(self, step: int) -> MixingRound:
        """Like Graph.round; weights along a cycle are equal only if those of the models are."""
        return self._rounds[step % len(self._rounds)] if self._rounds else self._weighted_round(
            self._graph.round(step))

    def _weighted_round(self, mixing_round: MixingRound) -> MixingRound:
        own = np.array(self._weights, float)
        share, other = np.minimum(mixing_round.weight, self._max_share), own[mixing_round.target]
        pairs = mixing_round.target[mixing_round.target] == np.arange(len(own))
        flow = np.where(pairs, np.minimum(2 * share * own * other / (own + other), np.minimum(own, other)),
                        share * own.min())
        return MixingRound(mixing_round.target, flow / own)


def spectral_gap(pattern: str, zones: Sequence[str]) -> float:
    """Share of the models' distance from their mean that a round removes, 0 to 1.

    For graphs of period k it is 1 - s^(1/k), s the second singular value of the product of the k mixing matrices. For
    random matching it is 1 - s^(1/2), s the second eigenvalue of the mean mixing matrix, by which rounds shrink the
    squared distance on average (Boyd et al. 2006).
    """
    count = len(zones)
    graph = GRAPHS[pattern](zones)
    if count == 1:
        return 1.0
    if not graph.period:
        # two workers are matched with probability 1 / (count - 1 + count % 2)
        return float(1 - (1 - count / (count - 1 + count % 2) / 2) ** 0.5)
    product = np.eye(count)
    for step in range(graph.period):
        product = graph.round(step).mix(product)
    return float(1 - np.linalg.norm(product - 1 / count, 2) ** (1 / graph.period))
