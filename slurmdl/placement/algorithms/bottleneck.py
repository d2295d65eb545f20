"""How good the worst link can be: for each zone the best bottleneck of so many of its nodes.

A link that is used at all carries at least what one node sends or receives. So the nodes with the k best paths
to a zone are the best k for traffic that loads every used link alike, as a ring does (the bottleneck, or
widest-path, criterion: Pollack, The maximum capacity through a network, 1960), and bound all other traffic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from slurmdl.placement.arrays import run_starts, sorted_unique
from slurmdl.placement.candidate_nodes import BoolArray, CandidateNodes, FloatArray, IntArray

#: most limits of delay that are tried, and most of their product with the nodes
MAX_LATENCY_CAPS, MAX_CAP_NODE_PRODUCT = 512, 1_000_000


@dataclass(frozen=True)
class LatencyCap:
    """The longest delays that links may have.

    Attributes
    ----------
    node : seconds, of the links of nodes.
    zone : seconds, of the uplinks of zones, by level.
    """

    node_s: float
    uplinks_s: tuple[float, ...]

    def path_latency(self, pool: CandidateNodes) -> FloatArray:
        """Seconds of one way within each zone, where the longest of these delays occur; shape (zones,)."""
        up = np.append(0.0, np.cumsum(self.uplinks_s))
        return np.asarray(self.node_s + up[np.minimum(pool.level, len(self.uplinks_s))])

    def allowed_nodes(self, pool: CandidateNodes, top: int) -> BoolArray:
        """Which of the nodes below a zone have only such links on their way to it; shape (nodes below it,)."""
        nodes = pool.nodes_below(top)
        inside = pool.node_latency[nodes] <= self.node_s
        for zones in pool.ancestors[nodes].T:
            below = (zones >= 0) & (pool.level[zones] < pool.level[top])
            inside &= ~below | (pool.zone_latency[zones] <= np.array([*self.uplinks_s, np.inf])[pool.level[zones]])
        return np.asarray(inside)


def latency_caps(pool: CandidateNodes) -> Iterator[LatencyCap]:
    """Limits of delay to try, the tightest first: all that differ where they are few, else some quantiles.

    Nothing but the last one, which allows everything, where all links of a level have the same delay.
    """
    per_level = [pool.zone_latency[(pool.level == level) & (pool.parent >= 0)]
                 for level in range(int(pool.level.max(initial=0)))]
    values = [sorted_unique(delays) for delays in (pool.node_latency, *per_level)]
    values = [delays if len(delays) else np.zeros(1) for delays in values]
    most = max(2, min(MAX_LATENCY_CAPS, MAX_CAP_NODE_PRODUCT // max(1, len(pool.snapshot_index))))
    count = int(np.prod([len(delays) for delays in values], dtype=float) > most) and \
        max(2, int(most ** (1 / max(1, sum(len(delays) > 1 for delays in values)))))
    kept = [delays[sorted_unique(np.linspace(0, len(delays) - 1, count).astype(int))] if count else delays
            for delays in values]
    found = [LatencyCap(each[0], each[1:]) for each in itertools.product(*(delays.tolist() for delays in kept))]
    yield from sorted(found, key=lambda limit: limit.node_s + sum(limit.uplinks_s))


def path_widths(pool: CandidateNodes, top: int) -> FloatArray:
    """Capacity of the narrowest link from each node below a zone up to it; shape (nodes below it,)."""
    nodes = pool.nodes_below(top)
    width = pool.node_capacity[nodes].copy()
    for zones in pool.ancestors[nodes].T:
        below = (zones >= 0) & (pool.level[zones] < pool.level[top])
        width = np.where(below, np.minimum(width, pool.zone_capacity[zones]), width)
    return width


def kth_widest_paths(pool: CandidateNodes, wanted: int, cap: LatencyCap) -> FloatArray:
    """For each zone the k-th widest path of its nodes to it, k = `wanted`, by links of such delays.

    Returns
    -------
    shape (zones,), bytes/s; 0 where too few nodes are left.
    """
    found = np.zeros(len(pool.topology_zone_index))
    width = np.where(pool.node_latency <= cap.node_s, pool.node_capacity, 0.0)
    here: IntArray = pool.leaf.copy() if len(pool.snapshot_index) else pool.snapshot_index
    for level in range(int(pool.level.max(initial=-1)) + 1):
        at = np.flatnonzero((here >= 0) & (pool.level[here] == level))
        if len(at):
            zones = here[at]
            begin = run_starts(zones)
            # the nodes of a zone stand together; where all are alike there is nothing to sort
            alike = width[at].min() == width[at].max()
            order = at if alike else at[np.lexsort((-width[at], zones))]
            enough = np.diff(np.append(begin, len(at))) >= wanted
            found[zones[begin[enough]]] = width[order][begin[enough] + wanted - 1]
            longest = cap.uplinks_s[level] if level < len(cap.uplinks_s) else np.inf
            passing = np.where(pool.zone_latency[zones] <= longest, pool.zone_capacity[zones], 0.0)
            width[at] = np.minimum(width[at], passing)
            here[at] = pool.parent[zones]
    return found

#: most limits of delay that are tried
MAX_RELEVANT_CAPS = 64

#: a share of the time that delays must make up to be looked at
MIN_LATENCY_FRACTION = 1e-4


def relevant_latency_caps(pool: CandidateNodes, seconds: float, rounds: float) -> list[LatencyCap]:
    """Limits of delay that may matter beside so much time, the tightest first."""
    found = list(latency_caps(pool))
    longest = float(found[-1].path_latency(pool).max())
    if 2 * rounds * longest < MIN_LATENCY_FRACTION * seconds:
        return found[-1:]
    return [found[i] for i in sorted_unique(np.linspace(0, len(found) - 1, MAX_RELEVANT_CAPS).astype(int))]
