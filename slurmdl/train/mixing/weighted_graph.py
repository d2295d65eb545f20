"""What the graphs of gossip (slurmdl.gossip_graphs) do to models, of one weight and of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.gossip_graphs import GRAPHS, GossipGroup, Graph, MixingRound

__all__ = ["GRAPHS", "GossipGroup", "WeightedGraph", "spectral_gap"]

#: rounds of a graph without a period that stand for all
SAMPLED_ROUNDS = 200


class WeightedGraph:
    """A graph for workers whose models stand for several: it keeps the weighted sum of the models.

    In each step as much weight as a worker sends of its model, it takes in of another. A pair whose share is 1/2 goes
    to its weighted mean; round a longer cycle goes that share of the least weight.

    Parameters
    ----------
    weights : entry i is that of worker i's model, above 0.
    most : the largest share of an edge between models of one weight; larger ones of the graph are cut.
    """

    def __init__(self, graph: Graph, weights: Sequence[float], max_share: float = 1.0) -> None:
        self._graph, self._weights, self._max_share = graph, np.array(weights, float), max_share
        self._rounds = [self._weighted_round(graph.round(step)) for step in range(graph.period)]

    def round(self, step: int) -> MixingRound:
        """As Graph.round; weights of a round are equal along its cycles only where the models' are."""
        return self._rounds[step % len(self._rounds)] if self._rounds else self._weighted_round(
            self._graph.round(step))

    def _weighted_round(self, mixing_round: MixingRound) -> MixingRound:
        own = self._weights
        share, other = np.minimum(mixing_round.weight, self._max_share), own[mixing_round.target]
        pairs = mixing_round.target[mixing_round.target] == np.arange(len(own))
        flow = np.where(pairs, np.minimum(2 * share * own * other / (own + other), np.minimum(own, other)),
                        share * own.min())
        return MixingRound(mixing_round.target, flow / own)


def spectral_gap(pattern: str, members: GossipGroup) -> float:
    """The share of the models' distance from their mean that a step of a graph takes away, 0 to 1.

    For graphs with turns it is 1 - s^(1/k), s the largest singular value of the product of a period's k mixing
    matrices besides that of the mean. For partners that are drawn it is 1 - s^(1/2), s the second eigenvalue of the
    mean mixing matrix, whose steps shrink the squared distance by s in the mean (Boyd et al. 2006); where links
    differ, that matrix is the mean of DRAWS steps.
    """
    count = len(members)
    graph = GRAPHS[pattern](members)
    if pattern == "random" and count > 1:
        # two workers are partners with probability 1 / (count - 1 + count % 2)
        return float(1 - (1 - count / (count - 1 + count % 2) / 2) ** 0.5)
    if not graph.period:
        mean = sum((graph.round(step).matrix for step in range(SAMPLED_ROUNDS)),
                   np.zeros((count, count))) / SAMPLED_ROUNDS
        return float(1 - np.linalg.norm(mean - 1 / count, 2) ** 0.5)
    product = np.eye(count)
    for step in range(graph.period):
        its = graph.round(step)
        product = (1 - its.weight)[:, None] * product + its.weight[:, None] * product[its.source]
    return float(1 - np.linalg.norm(product - 1 / count, 2) ** (1 / graph.period))
