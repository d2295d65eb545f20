"""Choices by node quotas per leaf zone: even, largest first, or uneven by the tasks that nodes can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slurmdl.placement.algorithms.problem import NodeChoice, Proposal, SearchProblem, make_choice
from slurmdl.placement.algorithms.zone_candidates import ZoneCandidate, fitting_nodes
from slurmdl.placement.arrays import IntArray, run_starts
from slurmdl.placement.candidate_nodes import CandidateNodes
from slurmdl.placement.job_size import JobSize

MAX_UNEVEN_ZONES = 4  # zones with an uneven choice


def even_choices(pool: CandidateNodes, problem: SearchProblem,
                 candidates: Sequence[ZoneCandidate]) -> Iterator[Proposal]:
    """Choices of each zone: the fewest leaves evenly, the largest leaves first, and all leaves evenly."""
    for candidate in candidates:
        fitting, available = fitting_nodes(pool, candidate)
        for quotas in zone_quotas(available, pool.tie_break, problem.job.nodes):
            choice = make_choice(pool, candidate.zone, take_nodes(pool, fitting, quotas))
            yield Proposal(choice, candidate.min_seconds)


def uneven_choices(pool: CandidateNodes, job: JobSize) -> Iterator[NodeChoice]:
    """The nodes with the largest `max_tasks` of each of the lowest and smallest zones, if they hold all tasks.

    With `-n` and no --ntasks-per-node Slurm takes any nodes that together hold the tasks.
    """
    found = 0
    for zone in np.lexsort((pool.node_count, pool.level)):
        if pool.node_count[zone] >= job.nodes and found < MAX_UNEVEN_ZONES:
            nodes = np.arange(int(pool.node_begin[zone]), int(pool.node_end[zone]))
            largest = nodes[np.argsort(-pool.max_tasks[nodes], kind="stable")][:job.nodes]
            if pool.max_tasks[largest].sum() >= job.tasks:
                found += 1
                yield NodeChoice(int(zone), largest, len(nodes) - job.nodes)


def zone_quotas(available: IntArray, tie_break: IntArray, wanted: int) -> Iterator[IntArray]:
    """Distinct quotas per zone; all arrays of shape (zones,), `tie_break` orders equal zones."""
    leaves = np.flatnonzero(available)
    leaves = leaves[np.argsort(tie_break[leaves], kind="stable")]
    sizes = available[leaves]
    by_size = np.argsort(-sizes, kind="stable")
    fewest = int(np.searchsorted(np.cumsum(sizes[by_size]), wanted) + 1)
    largest = np.zeros_like(sizes)
    largest[by_size[:fewest]] = sizes[by_size[:fewest]]
    leaf_quotas = (water_fill(largest, wanted), fill_largest_first(sizes, wanted), water_fill(sizes, wanted))
    for quota in {quota.tobytes(): quota for quota in leaf_quotas}.values():
        quotas = np.zeros_like(available)
        quotas[leaves] = quota
        yield quotas


def take_nodes(pool: CandidateNodes, nodes: IntArray, quotas: IntArray) -> IntArray:
    """The first of the nodes (ascending pool indices) of each leaf, up to its quota; `quotas` has shape (zones,)."""
    leaf = pool.leaf[nodes]
    begin = run_starts(leaf)
    position = np.arange(len(nodes)) - np.repeat(begin, np.diff(np.append(begin, len(nodes))))
    return nodes[position < quotas[leaf]]


def fill_largest_first(available: IntArray, wanted: int) -> IntArray:
    """Quotas that fill the zones in descending order of size, and put the remainder where it fits best."""
    quotas, remaining = np.zeros_like(available), wanted
    for zone in np.argsort(-available, kind="stable"):
        if remaining <= available[zone]:
            open_zones = np.flatnonzero((quotas == 0) & (available >= remaining))
            quotas[open_zones[available[open_zones].argmin()]] = remaining
            break
        quotas[zone] = available[zone]
        remaining -= int(available[zone])
    return quotas


def water_fill(available: IntArray, wanted: int) -> IntArray:
    """Quotas as even as the sizes allow; the remainder goes to the zones with most free nodes."""
    quotas, remaining = np.zeros_like(available), wanted
    while remaining > 0:
        open_zones = np.flatnonzero(quotas < available)
        step = remaining // len(open_zones)
        if step == 0:
            by_free = open_zones[np.argsort(quotas[open_zones] - available[open_zones], kind="stable")]
            quotas[by_free[:remaining]] += 1
            break
        taken = np.minimum(step, available[open_zones] - quotas[open_zones])
        quotas[open_zones] += taken
        remaining -= int(taken.sum())
    return quotas
