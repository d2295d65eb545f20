"""A time that no placement of a job on these nodes can undercut.

Each bound drops a part of the problem and keeps the rest: a ring loads every link in use alike, so the k-th widest
path of each zone is its optimum; for counted traffic, what each zone can hold within a time is added up the zones,
as if servers and workers did not have to come out even. Where neither holds there is no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slurmdl.placement.algorithms.all_to_all import TIME_STEPS, AllToAllModel, nodes_within_latency
from slurmdl.placement.algorithms.bottleneck import LatencyCap, kth_widest_paths, latency_caps
from slurmdl.placement.algorithms.ps_search import min_serving_seconds
from slurmdl.placement.algorithms.zone_candidates import (
    depends_on_counts,
    has_two_roles,
    min_node_link_seconds,
    min_node_load,
)
from slurmdl.placement.arrays import sorted_unique
from slurmdl.placement.candidate_nodes import BoolArray, CandidateNodes, FloatArray, IntArray
from slurmdl.placement.job_size import JobSize
from slurmdl.placement.traffic import Phase

#: how often the interval of times is divided again
LOWER_BOUND_ROUNDS = 3
#: more limits of delay than this are some of many: then only the shortest delay of each level counts
MAX_LATENCY_CAPS = 512


@dataclass(frozen=True)
class LowerBound:
    """Seconds that the job takes at least, and why."""

    seconds: float
    reason: str


def compute_lower_bound(pool: CandidateNodes, job: JobSize,
                        phases: Sequence[Phase], upper_bound_s: float) -> LowerBound | None:
    """The best bound that is known for this traffic, None where none is.

    Parameters
    ----------
    placed : seconds of a placement that was found; the bound is sought up to these.
    """
    if job.nodes == 1 or not phases:
        return LowerBound(0.0, "one node sends nothing")
    ring = len(phases) == 1 and not phases[0].all_pairs and not np.ndim(phases[0].bytes_per_pair)
    if not ring and not depends_on_counts(phases):
        return None
    latency = 2 * sum(phase.rounds for phase in phases) * _min_latency(pool)
    volume = min_node_load(phases, job)
    if has_two_roles(phases):
        by_nodes, by_servers = min_node_link_seconds(pool, job, volume), min_serving_seconds(pool, job, phases)
        seconds = np.maximum(by_nodes, by_servers) + latency
        basis = "the best links of nodes for the servers" if by_servers > by_nodes.min(initial=np.inf) else \
            f"the {job.nodes} best links of nodes"
    else:
        widest = kth_widest_paths(pool, job.nodes, LatencyCap(np.inf, ()))
        seconds = np.divide(volume, widest, out=np.full(len(widest), np.inf), where=widest > 0) + latency
        basis = f"the {job.nodes} best links and the uplinks on their way"
    if ring:
        seconds = np.maximum(seconds, _ring_seconds_with_latency(pool, job, phases[0]))
    found = float(seconds.min(initial=np.inf))
    if ring or found >= upper_bound_s * (1 - 1e-9):
        return LowerBound(found, basis)
    holds = _ps_feasibility(pool, job, phases) if has_two_roles(
        phases) else _all_to_all_feasibility(pool, job, phases)
    if holds is None:
        return LowerBound(found, basis)
    by_level = [
    _min_feasible_seconds(
        pool,
        holds,
        level,
        seconds,
        latency,
        upper_bound_s,
        len(phases)) for level in sorted_unique(
            pool.level)]
    better = min(by_level, default=np.inf)
    return LowerBound(max(found, better), "what each zone can hold within the time") if better > found else \
        LowerBound(found, basis)




def _min_latency(pool: CandidateNodes) -> FloatArray:
    """The shortest way within each zone: a node's link, and an uplink of every level that all nodes pass."""
    total = np.full(len(pool.topology_zone_index), float(pool.node_latency.min(initial=np.inf)))
    whole = bool((pool.level[pool.leaf] == 0).all()) and all(
        (pool.level[pool.parent[level.zones]] == pool.level[level.zones] + 1).all() for level in pool.levels)
    for level in pool.levels if whole else ():
        height = int(pool.level[level.zones[0]])
        total[pool.level > height] += float(pool.zone_latency[level.zones].min())
    return total


def _ring_seconds_with_latency(pool: CandidateNodes, job: JobSize, phase: Phase) -> FloatArray:
    """The least time of a ring in each zone over all limits of delay; 0 where these are too many to try."""
    tried = list(latency_caps(pool))
    count = [len(sorted_unique(pool.node_latency))] + [len(sorted_unique(pool.zone_latency[level.zones]))
                                                 for level in pool.levels]
    full = np.prod(count, dtype=float) == len(tried) <= MAX_LATENCY_CAPS
    if not full or (pool.level[pool.leaf] != 0).any():
        return np.zeros(len(pool.topology_zone_index))
    best = np.full(len(pool.topology_zone_index), np.inf)
    for limit in tried:
        widest = kth_widest_paths(pool, job.nodes, limit)
        time = np.divide(float(phase.bytes_per_pair), widest, out=np.full(len(widest), np.inf), where=widest > 0)
        best = np.minimum(best, time + 2 * phase.rounds * limit.path_latency(pool) * (time < np.inf))
    return np.where(best < np.inf, best, 0.0)


def _min_feasible_seconds(pool: CandidateNodes, can_hold_job: Callable[[FloatArray], BoolArray], level: int, seconds: FloatArray,
           latency: FloatArray, upper_bound_s: float, phase_count: int) -> float:
    """The longest time tried in which no zone of a level can hold the job, delays included."""
    here = pool.level == level
    shortest = float(latency[here].min())
    low = (float(seconds[here].min()) - shortest) / phase_count
    high = (upper_bound_s - shortest) / phase_count
    if not 0 < low < high:
        return low * phase_count + shortest
    for _ in range(LOWER_BOUND_ROUNDS):
        times = np.geomspace(low, high, TIME_STEPS)
        fits = can_hold_job(times)[:, here].any(axis=1)
        if not fits.any():
            return upper_bound_s
        first = int(fits.argmax())
        low, high = float(times[max(first - 1, 0)]), float(times[first])
        if first == 0:
            break
    return low * phase_count + shortest


def _all_to_all_feasibility(pool: CandidateNodes, job: JobSize,
                            phases: Sequence[Phase]) -> Callable[[FloatArray], BoolArray] | None:
    """What zones hold of ranks that all send to each other; with the same number of tasks on every node."""
    if len(phases) > 1 or job.tasks % job.nodes:
        return None
    every = LatencyCap(np.inf, ())
    return AllToAllModel(pool, job, phases[0], every, nodes_within_latency(pool, every)).can_hold_job


def _ps_feasibility(pool: CandidateNodes, job: JobSize, phases: Sequence[Phase]) -> Callable[[FloatArray], BoolArray]:
    """What zones hold at most of servers and workers together, each mix of the two by itself."""
    servers, workers = len(phases[0].source), len(phases[0].target)
    size, load = float(phases[0].bytes_per_pair), min_node_load(phases[:1], job)
    mine = np.arange(servers + 1.0)

    def most(room: IntArray, carries: FloatArray) -> IntArray:
        """Tasks that fit behind links which carry so many shares, with so much room: two arrays of one shape."""
        with np.errstate(divide="ignore"):
            others = np.minimum(workers, np.floor(carries[:, None] / (servers - mine)))
            others = np.minimum(others, room[:, None] - mine)
            needed = np.where(mine > 0, np.maximum(workers - carries[:, None] / mine, 0.0), 0.0)
        return np.asarray(np.where(others >= np.ceil(needed - 1e-9), mine + others, 0.0).max(axis=1), np.int64)

    def holds(times: FloatArray) -> BoolArray:
        inside = pool.sum_per_leaf(pool.node_capacity >= load / times[:, None] * (1 - 1e-9)) * job.max_tasks_per_node
        for level in pool.levels:
            # many zones are alike in room and uplink: each kind is worked out once
            capacity = sorted_unique(pool.zone_capacity[level.zones])
            kind = np.searchsorted(capacity, pool.zone_capacity[level.zones])
            turn = np.arange(len(times))[:, None] * len(capacity) + kind
            below = np.minimum(inside[:, level.zones], job.tasks)
            each = turn * (job.tasks + 1) + below
            kinds = sorted_unique(each)
            turn, room = np.divmod(kinds, job.tasks + 1)
            carries = times[turn // len(capacity)] * capacity[turn % len(capacity)] / size * (1 + 1e-9)
            held = most(room, carries)[np.searchsorted(kinds, each)]
            inside[:, level.parents] += np.add.reduceat(held, level.child_begin, axis=1)
        return np.asarray(inside >= job.tasks)

    return holds
