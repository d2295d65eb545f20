"""Nodes of named groups: each group in as few zones as possible, the groups in different sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

import numpy as np

from slurmdl.placement.arrays import IntArray
from slurmdl.placement.iteration_cost import NetworkLinks

MAX_SEQUENCES = 24  # sequences of the groups that are tried


def group_nodes(network: NetworkLinks, depth: IntArray, sizes: Sequence[int],
                first: int | None) -> Iterator[tuple[IntArray, ...]]:
    """Distinct choices of the nodes of each group, in depth-first order.

    Args:
        depth: nodes in depth-first order.
        sizes: nodes of each group.
        first: node that the first group must have; None for any.
    """
    seen = set()
    for sequence in islice(permutations(range(len(sizes))), MAX_SEQUENCES):
        for take in (_take_next, _take_compact):
            free, groups = depth, [depth[:0]] * len(sizes)
            for group in sequence:
                groups[group] = take(network, free, sizes[group])
                free = free[~np.isin(free, groups[group])]
            if first is not None:
                _exchange_first(network, groups, first)
            key = tuple(nodes.tobytes() for nodes in groups)
            if key not in seen:
                seen.add(key)
                yield tuple(depth[np.isin(depth, nodes)] for nodes in groups)


def _take_next(network: NetworkLinks, free: IntArray, count: int) -> IntArray:
    return free[:count]


def _take_compact(network: NetworkLinks, free: IntArray, count: int) -> IntArray:
    """Nodes of the smallest zone with enough free nodes; in it those of the largest zone with fewer, and so on."""
    taken = []
    while count:
        counts = _nodes_below(network, free)
        if (counts >= count).any():
            free = _below(network, free, int(np.where(counts >= count, counts, len(free) + 1).argmin()))
            counts = _nodes_below(network, free)
        parts = np.where(counts < count, counts, 0)
        is_divided = len(free) > count and parts.max(initial=0) > 0
        taken.append(_below(network, free, int(parts.argmax())) if is_divided else free[:count])
        free = free[~np.isin(free, taken[-1])]
        count -= len(taken[-1])
    return np.concatenate(taken)


def _nodes_below(network: NetworkLinks, nodes: IntArray) -> IntArray:
    """Number of these nodes below each zone; shape (zones,)."""
    return np.bincount(network.ancestors[nodes].ravel() + 1, minlength=len(network.zones) + 1)[1:]


def _below(network: NetworkLinks, nodes: IntArray, zone: int) -> IntArray:
    return np.asarray(nodes[(network.ancestors[nodes] == zone).any(axis=1)])


def _exchange_first(network: NetworkLinks, groups: list[IntArray], first: int) -> None:
    """Exchange a node of the first group for `first`, if another group has it; one of its leaf zone if possible."""
    other = next(i for i, nodes in enumerate(groups) if first in nodes)
    if other:
        own = groups[0]
        given = own[int((network.leaf[own] != network.leaf[first]).argmin())]
        groups[0] = np.where(own == given, first, own)
        groups[other] = np.where(groups[other] == first, given, groups[other])
