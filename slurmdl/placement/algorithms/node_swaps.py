"""Choices that differ from one by a single node: for traffic whose time is not told by counts per zone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmdl.placement.algorithms.zone_candidates import NodeChoice, make_choice
from slurmdl.placement.arrays import run_starts
from slurmdl.placement.candidate_nodes import CandidateNodes, IntArray


def single_node_swaps(pool: CandidateNodes, choice: NodeChoice) -> Iterator[NodeChoice]:
    """One node of the choice for one of the same tree that is not in it.

    Of each leaf the last node that is in gives way, and the first one that is out comes in: the others of a leaf are
    no better. Leaves that are in use come first.
    """
    used = np.zeros(len(pool.snapshot_index), bool)
    used[choice.nodes] = True
    root = choice.zone
    while pool.parent[root] >= 0:
        root = int(pool.parent[root])
    free = ~used
    free[:pool.node_begin[root]] = free[pool.node_end[root]:] = False
    inside, outside = np.flatnonzero(used), np.flatnonzero(free)
    leaving = inside[np.append(run_starts(pool.leaf[inside])[1:], len(inside)) - 1]
    coming = outside[run_starts(pool.leaf[outside])] if len(outside) else outside
    near = np.isin(pool.leaf[coming], pool.leaf[inside])
    for new in np.concatenate([coming[near], coming[~near]]):
        for old in leaving:
            nodes = np.append(inside[inside != old], new)
            yield make_choice(pool, _smallest_common_zone(pool, nodes), nodes)


def _smallest_common_zone(pool: CandidateNodes, nodes: IntArray) -> int:
    """The smallest zone that holds all these nodes, which are in one tree."""
    first, last, zone = int(nodes.min()), int(nodes.max()), int(pool.leaf[nodes[0]])
    while not pool.node_begin[zone] <= first <= last < pool.node_end[zone]:
        zone = int(pool.parent[zone])
    return zone
