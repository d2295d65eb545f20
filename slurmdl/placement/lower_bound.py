"""Lower bound on the time of any placement of a job on candidate nodes.

Each bound relaxes a part of the problem. A ring loads all used links alike, so the k-th widest path of each zone is
its optimum. For count-based traffic, the tasks that each zone can hold within a time are summed up the zones, without
the condition that the totals of servers and workers match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray, sorted_unique, transfer_seconds
from slurmdl.placement.candidate_nodes import CandidateNodes
from slurmdl.placement.zones import (
    MAX_LATENCY_CAPS,
    UNCAPPED,
    SearchProblem,
    kth_widest_paths,
    latency_caps,
    min_node_bytes,
    min_node_link_seconds,
)

if TYPE_CHECKING:
    from slurmdl.placement.all_to_all import Feasibility

LOWER_BOUND_ROUNDS = 3  # subdivisions of the time interval


def compute_lower_bound(candidates: CandidateNodes, problem: SearchProblem,
                        upper_bound_s: float) -> tuple[float, str] | None:
    """Best lower bound in s, searched up to `upper_bound_s`, and the constraint that gives it; None if unknown."""
    size, phases = problem.size, problem.phases
    if size.nodes == 1 or not phases:
        return 0.0, "one node sends nothing"
    is_ring = len(phases) == 1 and not phases[0].all_pairs and not np.ndim(phases[0].bytes_per_pair)
    if not is_ring and not problem.depends_on_counts:
        return None
    latency = 2 * problem.rounds * _min_latency(candidates)
    if problem.has_two_roles:
        from slurmdl.placement.parameter_servers import min_serving_seconds

        by_nodes, by_servers = min_node_link_seconds(candidates, problem), min_serving_seconds(candidates, problem)
        seconds = np.maximum(by_nodes, by_servers) + latency
        reason = "the best node links for the servers" if by_servers > by_nodes.min(initial=np.inf) else \
            f"the {size.nodes} best node links"
    else:
        widths = kth_widest_paths(candidates, size.nodes, UNCAPPED)
        seconds = transfer_seconds(problem.min_node_bytes, widths) + latency
        reason = f"the {size.nodes} best node links and the uplinks on their paths"
    if is_ring:
        seconds = np.maximum(seconds, _ring_seconds_with_latency(candidates, problem))
    bound = float(seconds.min(initial=np.inf))
    if is_ring or bound >= upper_bound_s * (1 - 1e-9):
        return bound, reason
    from slurmdl.placement.all_to_all import AllToAllModel, narrow_time

    if problem.has_two_roles:
        can_hold_job = _ps_feasibility(candidates, problem)
    elif len(phases) == 1 and size.tasks % size.nodes == 0:  # the model has equal numbers of tasks per node
        can_hold_job = AllToAllModel(candidates, size, float(phases[0].bytes_per_pair), UNCAPPED).can_hold_job
    else:
        return bound, reason
    by_level = []
    for level in sorted_unique(candidates.level):
        zones = np.flatnonzero(candidates.level == level)
        wait, least = float(latency[zones].min()), float(seconds[zones].min())
        low, high = (least - wait) / len(phases), (upper_bound_s - wait) / len(phases)
        if 0 < low < high:
            low, _ = narrow_time(can_hold_job, zones, low, high, LOWER_BOUND_ROUNDS)
        by_level.append(low * len(phases) + wait)
    better = min(by_level, default=np.inf)
    return (better, "tasks that each zone can hold in time") if better > bound else (bound, reason)


def _min_latency(candidates: CandidateNodes) -> FloatArray:
    """Least one-way latency to the top of each zone: a node link, and an uplink of every level all nodes pass."""
    total = np.full(candidates.zone_count, float(candidates.node_latency.min(initial=np.inf)))
    parent, height = candidates.parent, candidates.level
    is_complete = bool((height[candidates.leaf] == 0).all()) and all(
        (height[parent[level.zones]] == height[level.zones] + 1).all() for level in candidates.levels)
    for level in candidates.levels if is_complete else ():
        total[height > height[level.zones[0]]] += float(candidates.zone_latency[level.zones].min())
    return total


def _ring_seconds_with_latency(candidates: CandidateNodes, problem: SearchProblem) -> FloatArray:
    """Least time of a ring in each zone over all latency caps; 0 if there are too many."""
    phase, caps = problem.phases[0], latency_caps(candidates)
    latencies = [candidates.node_latency, *(candidates.zone_latency[level.zones] for level in candidates.levels)]
    combinations = np.prod([len(sorted_unique(of_level)) for of_level in latencies], dtype=float)
    is_complete = combinations == len(caps) <= MAX_LATENCY_CAPS
    if not is_complete or (candidates.level[candidates.leaf] != 0).any():
        return np.zeros(candidates.zone_count)
    best = np.full(candidates.zone_count, np.inf)
    for cap in caps:
        time = transfer_seconds(float(phase.bytes_per_pair), kth_widest_paths(candidates, problem.size.nodes, cap))
        best = np.minimum(best, time + 2 * phase.rounds * cap.path_latency(candidates) * (time < np.inf))
    return np.where(best < np.inf, best, 0.0)


def _ps_feasibility(candidates: CandidateNodes, problem: SearchProblem) -> Feasibility:
    """Feasibility of servers and workers, with the best mix of the two in each zone."""
    size, phase = problem.size, problem.phases[0]
    all_servers, all_workers = len(phase.source), len(phase.target)
    pair_bytes, min_bytes = float(phase.bytes_per_pair), min_node_bytes(phase, size)
    servers = np.arange(all_servers + 1.0)

    def max_tasks(available: IntArray, shards: FloatArray) -> IntArray:
        """Tasks that fit into `available` slots below a link that carries `shards`; all arrays of one shape."""
        with np.errstate(divide="ignore"):
            workers = np.minimum(all_workers, np.floor(shards[:, None] / (all_servers - servers)))
            workers = np.minimum(workers, available[:, None] - servers)
            min_workers = np.where(servers > 0, np.maximum(all_workers - shards[:, None] / servers, 0.0), 0.0)
        fits = workers >= np.ceil(min_workers - 1e-9)
        return np.asarray(np.where(fits, servers + workers, 0.0).max(axis=1), np.int64)

    def can_hold_job(times: FloatArray) -> BoolArray:
        is_fast_enough = candidates.node_capacity >= min_bytes / times[:, None] * (1 - 1e-9)
        tasks = candidates.sum_per_leaf(is_fast_enough) * size.max_tasks_per_node
        for level in candidates.levels:
            # many zones have equal sizes and uplinks: each distinct pair is computed once
            capacity = sorted_unique(candidates.zone_capacity[level.zones])
            capacity_index = np.searchsorted(capacity, candidates.zone_capacity[level.zones])
            link = np.arange(len(times))[:, None] * len(capacity) + capacity_index
            keys = link * (size.tasks + 1) + np.minimum(tasks[:, level.zones], size.tasks)
            distinct = sorted_unique(keys)
            link, available = np.divmod(distinct, size.tasks + 1)
            shards = times[link // len(capacity)] * capacity[link % len(capacity)] / pair_bytes * (1 + 1e-9)
            held = max_tasks(available, shards)[np.searchsorted(distinct, keys)]
            tasks[:, level.parents] += np.add.reduceat(held, level.child_begin, axis=1)
        return np.asarray(tasks >= size.tasks)

    return can_hold_job
