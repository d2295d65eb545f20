"""Choices in parts that stay together: the segments of Slurm's --segment, and named groups of nodes.

Every leaf zone holds a multiple of a segment's nodes, so groups of a mesh that fill a segment stay inside one leaf
zone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

import numpy as np

from slurmdl.placement.algorithms.apportion import take_nodes
from slurmdl.placement.algorithms.problem import Proposal, SearchProblem, make_choice
from slurmdl.placement.algorithms.zone_candidates import ZoneCandidate, fitting_nodes
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.candidate_nodes import CandidateNodes

MAX_SEGMENT_SIZES = 4  # sizes that are tried, the largest ones
MAX_GROUP_SEQUENCES = 6  # sequences of groups that are tried


def segment_choices(pool: CandidateNodes, problem: SearchProblem, candidates: Sequence[ZoneCandidate],
                    segment: int | None = None) -> Iterator[Proposal]:
    """Choices of each zone for a segment size, or for the largest divisors of the node count that fit a leaf zone."""
    for candidate in candidates:
        fitting, available = fitting_nodes(pool, candidate)
        largest = int(available.max(initial=0))
        divisors = [size for size in range(min(largest, problem.job.nodes), 1, -1) if problem.job.nodes % size == 0]
        for size in [segment] if segment else divisors[:MAX_SEGMENT_SIZES]:
            quotas = segment_quotas(pool, candidate.zone, available // size * size, problem.job.nodes)
            if quotas is not None:
                yield Proposal(make_choice(pool, candidate.zone, take_nodes(pool, fitting, quotas)),
                               candidate.min_seconds)


def group_choices(pool: CandidateNodes, problem: SearchProblem,
                  candidates: Sequence[ZoneCandidate]) -> Iterator[Proposal]:
    """Choices of each zone for named groups: each in as few zones as possible, one after the other."""
    sequences = list(dict.fromkeys(islice(permutations(problem.group_sizes), MAX_GROUP_SEQUENCES)))
    for candidate in candidates:
        fitting, available = fitting_nodes(pool, candidate)
        for sequence in sequences:
            left = available.copy()
            for size in sequence:
                quotas = segment_quotas(pool, candidate.zone, left, size)
                if quotas is None:
                    break
                left -= quotas
            else:
                yield Proposal(make_choice(pool, candidate.zone, take_nodes(pool, fitting, available - left)),
                               candidate.min_seconds)


def segment_quotas(pool: CandidateNodes, zone: int, available: IntArray, wanted: int) -> IntArray | None:
    """Nodes of each leaf below `zone` in as few zones as possible at each level; None if it has too few.

    `available`, shape (zones,), holds the nodes of each leaf in whole segments; `wanted` is a multiple of a segment.
    The smallest zone that holds the rest is filled, else the largest one.
    """
    total = available.copy()
    for level in pool.levels:
        total[level.parents] += np.add.reduceat(total[level.zones], level.child_begin)
    if total[zone] < wanted:
        return None
    quotas = np.zeros_like(available)
    stack = [(zone, wanted)]
    while stack:
        parent, rest = stack.pop()
        # the zone's own nodes count as a child
        parts = np.append(np.flatnonzero((pool.parent == parent) & (total > 0)), parent)
        sizes = np.append(total[parts[:-1]], available[parent])
        for i in np.lexsort((pool.tie_break[parts], -sizes)):
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
