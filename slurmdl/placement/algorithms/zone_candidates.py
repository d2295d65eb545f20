"""Zones that may hold the best choice of nodes, ranked by a lower bound on their time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from slurmdl.placement.algorithms.bottleneck import UNCAPPED, LatencyCap, kth_widest_paths, latency_caps
from slurmdl.placement.algorithms.problem import SearchProblem
from slurmdl.placement.arrays import FloatArray, round_mantissa, sorted_unique, transfer_seconds
from slurmdl.placement.candidate_nodes import CandidateNodes

MAX_ZONES_PER_LEVEL = 8  # zones with the best links first, then the smallest ones


@dataclass(frozen=True, eq=False)
class ZoneCandidate:
    """A zone to choose nodes in, and the worst links that its best nodes need.

    Attributes
    ----------
    zone : pool index.
    min_seconds : lower bound for choices in this zone that fit in none of its children.
    min_capacity : bytes/s of the narrowest link.
    latency_cap : upper bounds on the latency.
    """

    zone: int
    min_seconds: float
    min_capacity: float
    latency_cap: LatencyCap


def rank_zones(pool: CandidateNodes, problem: SearchProblem) -> list[ZoneCandidate]:
    """Zones to choose nodes in, the most promising first.

    "spread" uses root zones only. If only the worst link matters, a zone is dropped if a zone below it is as good.
    """
    is_root = pool.parent < 0
    reachable = is_root if problem.place == "spread" else np.ones(pool.zone_count, bool)
    seconds = np.full(pool.zone_count, np.inf)
    capacity = np.zeros(pool.zone_count)
    cap_index = np.zeros(pool.zone_count, np.int64)
    caps: list[LatencyCap] = []
    min_transfer = problem.min_node_bytes / float(pool.node_capacity.max())
    for cap in latency_caps(pool):
        if caps and min_transfer + 2 * problem.rounds * cap.node_s > seconds[reachable].min(initial=np.inf):
            break
        widths = kth_widest_paths(pool, problem.job.nodes, cap)
        time = transfer_seconds(problem.min_node_bytes, widths)
        time = round_mantissa(time + 2 * problem.rounds * cap.path_latency(pool) * (time < np.inf))
        better = time < seconds
        seconds[better], capacity[better], cap_index[better] = time[better], widths[better], len(caps)
        caps.append(cap)
    kept = seconds < np.inf
    if problem.has_two_roles or problem.is_zone_dependent:
        # an uplink, e.g. with servers and workers on both sides, may carry less than a node link
        seconds = np.where(kept, min_node_link_seconds(pool, problem), np.inf)
    if problem.place == "spread":
        kept &= is_root
    elif not problem.depends_on_counts and not problem.is_zone_dependent:
        best_below = np.full(pool.zone_count, np.inf)
        for level in pool.levels:
            np.minimum.at(best_below, pool.parent[level.zones], np.minimum(seconds, best_below)[level.zones])
        kept &= seconds < best_below
    zones = np.flatnonzero(kept)
    zones = zones[np.lexsort((pool.tie_break[zones], pool.node_count[zones], pool.level[zones], seconds[zones]))]
    first_of_level = np.concatenate([zones[pool.level[zones] == level][:MAX_ZONES_PER_LEVEL]
                                     for level in sorted_unique(pool.level[zones])])
    return [ZoneCandidate(int(zone), float(seconds[zone]), float(capacity[zone]), caps[cap_index[zone]])
            for zone in zones[np.isin(zones, first_of_level)]]


def min_node_link_seconds(pool: CandidateNodes, problem: SearchProblem) -> FloatArray:
    """Lower bound from node links alone: seconds over the k-th widest one of each zone; shape (zones,)."""
    nodes_only = replace(pool, zone_capacity=np.full(pool.zone_count, np.inf))
    return transfer_seconds(problem.min_node_bytes, kth_widest_paths(nodes_only, problem.job.nodes, UNCAPPED))
