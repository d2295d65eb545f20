"""Bottleneck paths: for each zone the k-th widest path from its nodes to it.

Each used link carries at least the bytes of one node. If every used link carries the same load, as in a ring, the
nodes with the k widest paths are optimal; for other traffic they give a bound (widest-path criterion: Pollack, The
maximum capacity through a network, 1960).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray, run_starts, sorted_unique
from slurmdl.placement.candidate_nodes import CandidateNodes

MAX_LATENCY_CAPS = 512  # caps that are tried
MAX_CAP_NODE_PRODUCT = 1_000_000  # caps times nodes
MAX_RELEVANT_CAPS = 64  # caps that are tried by searches with a step per cap
MIN_LATENCY_FRACTION = 1e-4  # smaller fractions of the time are ignored


@dataclass(frozen=True)
class LatencyCap:
    """Upper bounds on the latency of links.

    `node_s` applies to node links, `uplinks_s` to the zone uplinks of each level.
    """

    node_s: float
    uplinks_s: tuple[float, ...]

    def path_latency(self, pool: CandidateNodes) -> FloatArray:
        """One-way seconds to the top of each zone if every link has the maximum latency; shape (zones,)."""
        up = np.append(0.0, np.cumsum(self.uplinks_s))
        return np.asarray(self.node_s + up[np.minimum(pool.level, len(self.uplinks_s))])

    def max_uplink_latency(self, level: IntArray) -> FloatArray:
        """Seconds, for uplinks of these levels; infinite above the highest level with uplinks."""
        return np.append(np.array(self.uplinks_s), np.inf)[np.minimum(level, len(self.uplinks_s))]

    def allowed_nodes(self, pool: CandidateNodes, top: int) -> BoolArray:
        """Mask of the nodes below zone `top` whose path to it keeps the cap; shape (nodes below it,)."""
        nodes = pool.nodes_below(top)
        allowed = pool.node_latency[nodes] <= self.node_s
        for zones in pool.ancestors[nodes].T:
            below = (zones >= 0) & (pool.level[zones] < pool.level[top])
            allowed &= ~below | (pool.zone_latency[zones] <= self.max_uplink_latency(pool.level[zones]))
        return np.asarray(allowed)


UNCAPPED = LatencyCap(np.inf, ())


def latency_caps(pool: CandidateNodes) -> Iterator[LatencyCap]:
    """Latency caps to try, the tightest first: all combinations of latencies, or quantiles if these are too many.

    If all links of a level have the same latency, the only cap allows all links.
    """
    per_level = [pool.zone_latency[(pool.level == level) & (pool.parent >= 0)]
                 for level in range(int(pool.level.max(initial=0)))]
    values = [sorted_unique(latencies) for latencies in (pool.node_latency, *per_level)]
    values = [latencies if len(latencies) else np.zeros(1) for latencies in values]
    max_caps = max(2, min(MAX_LATENCY_CAPS, MAX_CAP_NODE_PRODUCT // max(1, len(pool.snapshot_index))))
    if np.prod([len(latencies) for latencies in values], dtype=float) > max_caps:
        quantiles = max(2, int(max_caps ** (1 / max(1, sum(len(latencies) > 1 for latencies in values)))))
        values = [latencies[sorted_unique(np.linspace(0, len(latencies) - 1, quantiles).astype(int))]
                  for latencies in values]
    caps = [LatencyCap(node_s, tuple(uplinks_s))
            for node_s, *uplinks_s in itertools.product(*(latencies.tolist() for latencies in values))]
    yield from sorted(caps, key=lambda cap: cap.node_s + sum(cap.uplinks_s))


def relevant_latency_caps(pool: CandidateNodes, seconds: float, rounds: float) -> list[LatencyCap]:
    """Latency caps that may matter for an iteration of at least `seconds`, the tightest first."""
    caps = list(latency_caps(pool))
    if 2 * rounds * float(caps[-1].path_latency(pool).max()) < MIN_LATENCY_FRACTION * seconds:
        return caps[-1:]
    return [caps[i] for i in sorted_unique(np.linspace(0, len(caps) - 1, MAX_RELEVANT_CAPS).astype(int))]


def path_widths(pool: CandidateNodes, top: int) -> FloatArray:
    """Bytes/s of the narrowest link between each node below zone `top` and that zone; shape (nodes below it,)."""
    nodes = pool.nodes_below(top)
    width = pool.node_capacity[nodes].copy()
    for zones in pool.ancestors[nodes].T:
        below = (zones >= 0) & (pool.level[zones] < pool.level[top])
        width = np.where(below, np.minimum(width, pool.zone_capacity[zones]), width)
    return width


def kth_widest_paths(pool: CandidateNodes, k: int, cap: LatencyCap) -> FloatArray:
    """Bytes/s of the k-th widest path from the nodes of each zone to it, over links that keep the cap.

    The shape is (zones,); 0 if fewer than k nodes have such a path.
    """
    widths = np.zeros(pool.zone_count)
    width = np.where(pool.node_latency <= cap.node_s, pool.node_capacity, 0.0)
    zone: IntArray = pool.leaf.copy() if len(pool.snapshot_index) else pool.snapshot_index
    for level in range(int(pool.level.max(initial=-1)) + 1):
        nodes = np.flatnonzero((zone >= 0) & (pool.level[zone] == level))
        if len(nodes):
            zones = zone[nodes]
            begin = run_starts(zones)
            # the nodes of a zone are contiguous: equal widths need no sorting
            is_uniform = width[nodes].min() == width[nodes].max()
            order = nodes if is_uniform else nodes[np.lexsort((-width[nodes], zones))]
            has_enough = np.diff(np.append(begin, len(nodes))) >= k
            widths[zones[begin[has_enough]]] = width[order][begin[has_enough] + k - 1]
            allowed = pool.zone_latency[zones] <= cap.max_uplink_latency(np.array([level]))
            width[nodes] = np.minimum(width[nodes], np.where(allowed, pool.zone_capacity[zones], 0.0))
            zone[nodes] = pool.parent[zones]
    return widths
