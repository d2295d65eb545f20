"""How many nodes of each zone, from the room that each has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmdl.placement.algorithms.bottleneck import path_widths
from slurmdl.placement.algorithms.zone_candidates import NodeChoice, ZoneCandidate, make_choice
from slurmdl.placement.arrays import run_starts
from slurmdl.placement.candidate_nodes import CandidateNodes, IntArray
from slurmdl.placement.job_size import JobSize


def zone_quotas(free_nodes: IntArray, tie_break: IntArray, wanted: int, place: str) -> Iterator[IntArray]:
    """Nodes per zone, from the room of each: shape (zones,) as `room`; `turn` is the order of equal zones."""
    leaves = np.flatnonzero(free_nodes)
    leaves = leaves[np.argsort(tie_break[leaves], kind="stable")]
    sizes = free_nodes[leaves]
    found: list[IntArray] = []
    if place == "spread" or len(leaves) == 1:
        found.append(water_fill(sizes, wanted))
    else:
        fullest = np.argsort(-sizes, kind="stable")
        fewest = int(np.searchsorted(np.cumsum(sizes[fullest]), wanted) + 1)
        chosen = np.zeros_like(sizes)
        chosen[fullest[:fewest]] = sizes[fullest[:fewest]]
        found.append(water_fill(chosen, wanted))
        if place == "pack":
            found += [fill_largest_first(sizes, wanted), water_fill(sizes, wanted)]
    seen = set()
    for quota in found:
        if quota.tobytes() not in seen:
            seen.add(quota.tobytes())
            total = np.zeros_like(free_nodes)
            total[leaves] = quota
            yield total


def take_nodes(pool: CandidateNodes, nodes: IntArray, quota: IntArray) -> IntArray:
    """Of the given nodes the first ones in each leaf.

    Parameters
    ----------
    nodes : indices in the pool, ascending.
    quota : shape (zones,), how many of each leaf.
    """
    leaf = pool.leaf[nodes]
    begin = run_starts(leaf)
    turn = np.arange(len(nodes)) - np.repeat(begin, np.diff(np.append(begin, len(nodes))))
    return nodes[turn < quota[leaf]]


def fill_largest_first(available: IntArray, wanted: int) -> IntArray:
    """Full zones in descending order, and for the rest the zone that it fits best."""
    quota, left = np.zeros_like(available), wanted
    for zone in np.argsort(-available, kind="stable"):
        if left <= available[zone]:
            open_zones = np.flatnonzero((quota == 0) & (available >= left))
            quota[open_zones[available[open_zones].argmin()]] = left
            break
        quota[zone] = available[zone]
        left -= int(available[zone])
    return quota


def water_fill(available: IntArray, wanted: int) -> IntArray:
    """As even as the room allows: the level of water that `wanted` units reach."""
    quota, left = np.zeros_like(available), wanted
    while left > 0:
        open_zones = np.flatnonzero(quota < available)
        step = left // len(open_zones)
        if step == 0:
            # the last units go to the roomiest zones
            last = open_zones[np.argsort(quota[open_zones] - available[open_zones], kind="stable")[:left]]
            quota[last] += 1
            break
        taken = np.minimum(step, available[open_zones] - quota[open_zones])
        quota[open_zones] += taken
        left -= int(taken.sum())
    return quota


# MERGED: Nodes for a job that no zone can serve with an even share of its tasks on every node.

#: most zones that are looked at
MAX_UNEVEN_ZONES = 4


def uneven_choices(pool: CandidateNodes, job: JobSize) -> Iterator[NodeChoice]:
    """The roomiest nodes of each of the lowest and smallest zones where these hold all tasks.

    Slurm takes any nodes with room for the tasks together where `-n` is given without --ntasks-per-node.
    """
    found = 0
    for zone in np.lexsort((pool.node_count, pool.level)):
        if pool.node_count[zone] >= job.nodes and found < MAX_UNEVEN_ZONES:
            nodes = np.arange(int(pool.node_begin[zone]), int(pool.node_end[zone]))
            roomiest = nodes[np.argsort(-pool.max_tasks[nodes], kind="stable")][:job.nodes]
            if pool.max_tasks[roomiest].sum() >= job.tasks:
                found += 1
                yield NodeChoice(int(zone), roomiest, len(nodes) - job.nodes)


def even_choices(pool: CandidateNodes, candidate: ZoneCandidate, wanted: int, place: str) -> Iterator[NodeChoice]:
    """Ways to choose `wanted` nodes below one zone.

    `pack` tries the fewest leaves evenly, the same filled one after the other, and all leaves evenly; `balance`
    the fewest leaves evenly; `spread` all leaves evenly.
    """
    nodes = pool.nodes_below(candidate.zone)
    if place == "spread":
        # over all leaves, whatever their uplinks, but not to nodes whose own links would slow down all others
        fits = (pool.node_capacity[nodes] >= candidate.min_capacity) & (
            pool.node_latency[nodes] <= candidate.latency_cap.node_s)
    else:
        fits = (
    path_widths(
        pool,
        candidate.zone) >= candidate.min_capacity) & candidate.latency_cap.allowed_nodes(
            pool,
             candidate.zone)
    inside = nodes.start + np.flatnonzero(fits)
    for quota in zone_quotas(np.bincount(pool.leaf[inside], minlength=len(
        pool.topology_zone_index)), pool.tie_break, wanted, place):
        yield make_choice(pool, candidate.zone, take_nodes(pool, inside, quota))
