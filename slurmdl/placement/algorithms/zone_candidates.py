"""Which nodes: for each zone that may win, a few ways to take them from the leaves below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmdl.placement.algorithms.bottleneck import LatencyCap, kth_widest_paths, latency_caps
from slurmdl.placement.arrays import sorted_unique
from slurmdl.placement.candidate_nodes import CandidateNodes, FloatArray, IntArray, round_mantissa
from slurmdl.placement.job_size import JobSize
from slurmdl.placement.traffic import Phase

#: most zones of one level that are looked at: the best by their links, then those that fit tightest
MAX_ZONES_PER_LEVEL = 8


@dataclass(frozen=True, eq=False)
class NodeChoice:
    """One way to choose the nodes.

    Attributes
    ----------
    zone : index in the pool of the smallest zone that holds them all.
    nodes : indices in the pool.
    left : nodes of the pool below `zone` that are left over.
    smallest : no zone below `zone` has enough nodes.
    """

    zone: int
    nodes: IntArray
    unused_nodes: int
    is_smallest_zone: bool = True


@dataclass(frozen=True, eq=False)
class ZoneCandidate:
    """A zone to choose in, and the worst links that its best nodes need.

    Attributes
    ----------
    zone : index in the pool.
    seconds : no choice in this zone that is in none of the zones below it takes less time than that.
    floor : bytes/s of the narrowest link.
    limit : longest delays.
    """

    zone: int
    min_seconds: float
    min_capacity: float
    latency_cap: LatencyCap


def make_choice(pool: CandidateNodes, zone: int, nodes: IntArray) -> NodeChoice:
    """The choice of these nodes, all below `zone`."""
    smallest = not (pool.node_count[pool.parent == zone] >= len(nodes)).any()
    return NodeChoice(zone, nodes, int(pool.node_count[zone]) - len(nodes), smallest)


def rank_zones(pool: CandidateNodes, job: JobSize, place: str,
               phases: Sequence[Phase], is_zone_dependent: bool = False) -> list[ZoneCandidate]:
    """The zones to choose in, the most promising first.

    With `spread` these are the highest that fit. Else, where only the worst link counts, a zone stands back behind
    one below it that is as good.

    Parameters
    ----------
    follows_zones : ranks in more zones send other phases than these: less over the uplinks, and in fewer rounds.
    """
    volume, rounds = min_node_load(phases, job), sum(phase.rounds for phase in phases)
    seconds = np.full(len(pool.topology_zone_index), np.inf)
    floor = np.zeros(len(pool.topology_zone_index))
    which = np.zeros(len(pool.topology_zone_index), np.int64)
    tried: list[LatencyCap] = []
    fastest = float(pool.node_capacity.max())
    for limit in latency_caps(pool):
        if volume / fastest + 2 * rounds * limit.node_s > seconds.min(initial=np.inf) and tried:
            break
        widest = kth_widest_paths(pool, job.nodes, limit)
        time = np.divide(volume, widest, out=np.full(len(widest), np.inf), where=widest > 0)
        time = round_mantissa(time + 2 * rounds * limit.path_latency(pool) * (time < np.inf))
        better = time < seconds
        seconds[better], floor[better], which[better] = time[better], widest[better], len(tried)
        tried.append(limit)
    found = seconds < np.inf
    if has_two_roles(phases) or is_zone_dependent:
        # an uplink, e.g. with servers and workers on both sides, may carry less than a node's link
        seconds = np.where(found, min_node_link_seconds(pool, job, volume), np.inf)
    if place == "spread":
        found &= pool.parent < 0
    elif not depends_on_counts(phases) and not is_zone_dependent:
        best_below = np.full(len(pool.topology_zone_index), np.inf)
        for level in pool.levels:
            np.minimum.at(best_below, pool.parent[level.zones],
                          np.minimum(seconds, best_below)[level.zones])
        found &= seconds < best_below
    zones = np.flatnonzero(found)
    zones = zones[np.lexsort((pool.tie_break[zones], pool.node_count[zones], pool.level[zones], seconds[zones]))]
    kept = np.concatenate([zones[pool.level[zones] == level][:MAX_ZONES_PER_LEVEL]
                          for level in sorted_unique(pool.level[zones])])
    zones = zones[np.isin(zones, kept)]
    return [ZoneCandidate(int(zone), float(seconds[zone]), float(floor[zone]), tried[which[zone]]) for zone in zones]


def min_node_link_seconds(pool: CandidateNodes, job: JobSize, node_bytes: float) -> FloatArray:
    """Seconds that so many bytes take over the k-th best node's link alone; shape (zones,)."""
    nodes_only = replace(pool, zone_capacity=np.full(len(pool.topology_zone_index), np.inf))
    widest = kth_widest_paths(nodes_only, job.nodes, LatencyCap(np.inf, ()))
    seconds = np.full(len(widest), np.inf)
    return np.asarray(np.divide(node_bytes, widest, out=seconds, where=widest > 0))


def has_two_roles(phases: Sequence[Phase]) -> bool:
    """Whether the phases go between two roles, as with parameter servers."""
    return depends_on_counts(phases) and bool(phases[0].source[0] != phases[0].target[0])


def depends_on_counts(phases: Sequence[Phase]) -> bool:
    """Whether the time depends on how many ranks are below each link, not only on which links are used."""
    return bool(phases) and all(phase.all_pairs for phase in phases)


def min_node_load(phases: Sequence[Phase], job: JobSize) -> float:
    """Bytes that the busiest link of every node in use carries at least, summed over the phases."""
    if job.nodes == 1:
        return 0.0
    total = 0.0
    for phase in phases:
        held = np.array([job.tasks // job.nodes, job.max_tasks_per_node])
        if not phase.all_pairs:
            total += float(np.mean(phase.bytes_per_pair)) * bool(len(phase.source))
        elif not has_two_roles([phase]):
            total += float(np.min(phase.bytes_per_pair * held * (job.tasks - held)))
        else:
            servers, workers = len(phase.source), len(phase.target)
            mine = np.arange(min(servers, job.max_tasks_per_node) + 1)
            others = np.clip(held[:, None] - mine, 0, workers)
            total += float(np.min(phase.bytes_per_pair * np.maximum(mine * \
                           (workers - others), others * (servers - mine))))
    return total


