"""Choices that differ from another one by a single node, for traffic whose time depends on more than node counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmdl.placement.algorithms.problem import NodeChoice, make_choice
from slurmdl.placement.arrays import IntArray, run_starts
from slurmdl.placement.candidate_nodes import CandidateNodes


def single_node_swaps(pool: CandidateNodes, choice: NodeChoice) -> Iterator[NodeChoice]:
    """Choices with one node swapped for an unused node of the same tree; leaves in use come first.

    Only the last used and the first unused node of each leaf are swapped: its other nodes are no better.
    """
    is_used = np.zeros(len(pool.snapshot_index), bool)
    is_used[choice.nodes] = True
    root = choice.zone
    while pool.parent[root] >= 0:
        root = int(pool.parent[root])
    is_free = ~is_used
    is_free[:pool.node_begin[root]] = is_free[pool.node_end[root]:] = False
    used, free = np.flatnonzero(is_used), np.flatnonzero(is_free)
    removable = used[np.append(run_starts(pool.leaf[used])[1:], len(used)) - 1]
    addable = free[run_starts(pool.leaf[free])] if len(free) else free
    is_near = np.isin(pool.leaf[addable], pool.leaf[used])
    for added in np.concatenate([addable[is_near], addable[~is_near]]):
        for removed in removable:
            nodes = np.append(used[used != removed], added)
            yield make_choice(pool, _smallest_common_zone(pool, nodes), nodes)


def _smallest_common_zone(pool: CandidateNodes, nodes: IntArray) -> int:
    """Smallest zone that holds all these nodes of one tree."""
    first, last, zone = int(nodes.min()), int(nodes.max()), int(pool.leaf[nodes[0]])
    while not pool.node_begin[zone] <= first <= last < pool.node_end[zone]:
        zone = int(pool.parent[zone])
    return zone
