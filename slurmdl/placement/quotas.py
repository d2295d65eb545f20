"""Choices by node quotas per leaf zone: even, largest first, uneven, and in parts that stay together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

import numpy as np

from slurmdl.job_request import JobSize
from slurmdl.placement.arrays import IntArray, run_starts
from slurmdl.placement.candidate_nodes import CandidateNodes
from slurmdl.placement.zones import NodeChoice, Proposal, RankedZone, SearchProblem, fitting_nodes, make_choice

MAX_UNEVEN_ZONES = 4  # zones with an uneven choice
MAX_SEGMENT_SIZES = 4  # sizes that are tried, the largest ones
MAX_GROUP_SEQUENCES = 6  # sequences of groups that are tried


def even_choices(candidates: CandidateNodes, problem: SearchProblem,
                 zones: Sequence[RankedZone]) -> Iterator[Proposal]:
    """Choices of each zone: the fewest leaves evenly, the largest leaves first, and all leaves evenly."""
    for zone in zones:
        fitting, available = fitting_nodes(candidates, zone)
        for quotas in zone_quotas(available, candidates.tie_break, problem.size.nodes):
            choice = make_choice(candidates, zone.index, take_nodes(candidates, fitting, quotas))
            yield Proposal(choice, zone.min_seconds)


def uneven_choices(candidates: CandidateNodes, size: JobSize) -> Iterator[NodeChoice]:
    """The nodes with the largest `max_tasks` of each of the lowest and smallest zones, if they hold all tasks.

    With `-n` and no --ntasks-per-node Slurm takes any nodes that together hold the tasks.
    """
    found = 0
    for zone in np.lexsort((candidates.node_count, candidates.level)):
        if candidates.node_count[zone] >= size.nodes and found < MAX_UNEVEN_ZONES:
            nodes = np.arange(int(candidates.node_begin[zone]), int(candidates.node_end[zone]))
            largest = nodes[np.argsort(-candidates.max_tasks[nodes], kind="stable")][:size.nodes]
            if candidates.max_tasks[largest].sum() >= size.tasks:
                found += 1
                yield NodeChoice(int(zone), largest, len(nodes) - size.nodes)


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


def take_nodes(candidates: CandidateNodes, nodes: IntArray, quotas: IntArray) -> IntArray:
    """The first of the nodes of each leaf, up to its quota; `nodes` ascend, `quotas` has shape (zones,)."""
    leaf = candidates.leaf[nodes]
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


def segment_choices(candidates: CandidateNodes, problem: SearchProblem, zones: Sequence[RankedZone],
                    segment: int | None = None) -> Iterator[Proposal]:
    """Choices of each zone for a segment size, or for the largest divisors of the node count that fit a leaf zone."""
    for zone in zones:
        fitting, available = fitting_nodes(candidates, zone)
        largest = int(available.max(initial=0))
        divisors = [size for size in range(min(largest, problem.size.nodes), 1, -1) if problem.size.nodes % size == 0]
        for size in [segment] if segment else divisors[:MAX_SEGMENT_SIZES]:
            quotas = segment_quotas(candidates, zone.index, available // size * size, problem.size.nodes)
            if quotas is not None:
                choice = make_choice(candidates, zone.index, take_nodes(candidates, fitting, quotas))
                yield Proposal(choice, zone.min_seconds)


def group_choices(candidates: CandidateNodes, problem: SearchProblem,
                  zones: Sequence[RankedZone]) -> Iterator[Proposal]:
    """Choices of each zone for named groups: each in as few zones as possible, one after the other."""
    sequences = list(dict.fromkeys(islice(permutations(problem.traffic.group_sizes()), MAX_GROUP_SEQUENCES)))
    for zone in zones:
        fitting, available = fitting_nodes(candidates, zone)
        for sequence in sequences:
            left = available.copy()
            for size in sequence:
                quotas = segment_quotas(candidates, zone.index, left, size)
                if quotas is None:
                    break
                left -= quotas
            else:
                choice = make_choice(candidates, zone.index, take_nodes(candidates, fitting, available - left))
                yield Proposal(choice, zone.min_seconds)


def segment_quotas(candidates: CandidateNodes, zone: int, available: IntArray, wanted: int) -> IntArray | None:
    """Nodes of each leaf below `zone` in as few zones as possible at each level; None if it has too few.

    `available`, shape (zones,), holds the nodes of each leaf in whole segments; `wanted` is a multiple of a segment.
    The smallest zone that holds the rest is filled, else the largest one.
    """
    total = available.copy()
    for level in candidates.levels:
        total[level.parents] += np.add.reduceat(total[level.zones], level.child_begin)
    if total[zone] < wanted:
        return None
    quotas = np.zeros_like(available)
    stack = [(zone, wanted)]
    while stack:
        parent, rest = stack.pop()
        # the zone's own nodes count as a child
        parts = np.append(np.flatnonzero((candidates.parent == parent) & (total > 0)), parent)
        sizes = np.append(total[parts[:-1]], available[parent])
        for i in np.lexsort((candidates.tie_break[parts], -sizes)):
            fits = np.flatnonzero(sizes >= rest)
            chosen = int(fits[sizes[fits].argmin()]) if len(fits) else int(i)
            count = min(rest, int(sizes[chosen]))
            if not count:
                continue
            sizes[chosen] = 0
            rest -= count
            if parts[chosen] == parent:
                quotas[parent] = count
            else:
                stack.append((int(parts[chosen]), count))
            if not rest:
                break
    return quotas
