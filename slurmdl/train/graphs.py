"""What the graphs of gossip (slurmdl.graphs) do to the distance between models."""

from __future__ import annotations

import numpy as np

from slurmdl.graphs import GRAPHS, Members

__all__ = ["GRAPHS", "Members", "spectral_gap"]

#: rounds of a graph without a period that stand for all
DRAWS = 200


def spectral_gap(pattern: str, members: Members) -> float:
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
        mean = sum((graph.round(step).matrix for step in range(DRAWS)), np.zeros((count, count))) / DRAWS
        return float(1 - np.linalg.norm(mean - 1 / count, 2) ** 0.5)
    product = np.eye(count)
    for step in range(graph.period):
        its = graph.round(step)
        product = (1 - its.weight)[:, None] * product + its.weight[:, None] * product[its.source]
    return float(1 - np.linalg.norm(product - 1 / count, 2) ** (1 / graph.period))
