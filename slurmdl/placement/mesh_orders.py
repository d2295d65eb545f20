"""Rank orders of meshes and of named groups: which ranks share a node and a zone.

Parallel groups of a mesh that lie inside a box of ranks send nothing over its link. So the boxes that fill a node,
and those that fill a zone, decide what the links carry: the ranks of the inner box fill a node, those of the outer
box a zone, and the boxes follow each other in each sequence of the remaining dimensions. Named groups of nodes each
take as few zones as possible, in different sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, permutations, zip_longest

import numpy as np

from slurmdl.mesh import Box, MeshTraffic, boxes, bytes_leaving
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.iteration_cost import NetworkLinks

MAX_INNER_BOXES = 6  # boxes of a node that are tried, the ones with the least traffic first
MAX_OUTER_BOXES = 6  # boxes of a zone for each of them
MAX_SEQUENCES = 24  # sequences of named groups that are tried

Step = tuple[int, int]
"""Index of a dimension, and the factor by which the box grows along it."""


def consecutive_box(sizes: Box, ranks: int) -> Box | None:
    """The box of the first `ranks` ranks; None if they are none."""
    box = []
    for size in reversed(sizes):
        count = math.gcd(size, ranks)
        box.append(count)
        ranks //= count
        if count < size and ranks > 1:
            return None
    return tuple(reversed(box)) if ranks == 1 else None


def mesh_orders(traffic: MeshTraffic, ranks_per_node: int, nodes_per_zone: Sequence[int], *,
                node_by_node: bool = False) -> Iterator[IntArray]:
    """Distinct orders, the most promising first: the rank of each slot, shape (ranks,); rank 0 has slot 0.

    Args:
        ranks_per_node: ranks of each node; 0 if the nodes differ.
        nodes_per_zone: numbers of nodes that a part of a zone may have.
        node_by_node: the ranks of a node are consecutive.
    """
    sizes = traffic.mesh.sizes
    ones = (1,) * len(sizes)
    consecutive = consecutive_box(sizes, ranks_per_node) if ranks_per_node else None
    if node_by_node and consecutive is None:
        return
    inner_boxes = [consecutive] if node_by_node and consecutive else \
        _best_boxes(traffic, ranks_per_node, ones, MAX_INNER_BOXES)
    if consecutive in inner_boxes:
        inner_boxes.sort(key=lambda box: (bytes_leaving(traffic, box), box != consecutive))
    seen = set()
    for sequence in _interleave([_box_orders(traffic, inner, ranks_per_node, nodes_per_zone)
                                 for inner in inner_boxes or [ones]]):
        order = _rank_order(sizes, sequence)
        if order.tobytes() not in seen:
            seen.add(order.tobytes())
            yield order


def _best_boxes(traffic: MeshTraffic, ranks: int, inner: Box, count: int) -> list[Box]:
    """The boxes of this many ranks with the least traffic to the others."""
    found = boxes(traffic.mesh.sizes, ranks, inner) if ranks else ()
    return sorted(found, key=lambda box: bytes_leaving(traffic, box))[:count]


def _box_orders(traffic: MeshTraffic, inner: Box, ranks_per_node: int,
                nodes_per_zone: Sequence[int]) -> Iterator[list[Step]]:
    outer_boxes = {box: None for nodes in nodes_per_zone
                   for box in _best_boxes(traffic, nodes * ranks_per_node, inner, MAX_OUTER_BOXES)}
    return _interleave([_sequences(traffic.mesh.sizes, inner, outer) for outer in (inner, *outer_boxes)])


def _sequences(sizes: Box, inner: Box, outer: Box) -> Iterator[list[Step]]:
    """Fill the inner box, then the outer one, then the mesh in each sequence of its dimensions.

    In the first sequence the slowest dimension comes last, as the ranks are numbered.
    """
    dims = range(len(sizes) - 1, -1, -1)
    inside = [(i, inner[i]) for i in dims if inner[i] > 1]
    zone = [(i, outer[i] // inner[i]) for i in dims if outer[i] > inner[i]]
    rest = [(i, sizes[i] // outer[i]) for i in dims if sizes[i] > outer[i]]
    for last in permutations(rest):
        yield [*inside, *zone, *last]


def _rank_order(sizes: Box, steps: Sequence[Step]) -> IntArray:
    """Rank of each slot if the slots count through the steps, the first step fastest."""
    # difference between ranks that are neighbors along a dimension, times the coordinates that are filled already
    stride = [math.prod(sizes[i + 1:]) for i in range(len(sizes))]
    order = np.zeros(1, np.int64)
    for i, factor in steps:
        order = (np.arange(factor)[:, None] * stride[i] + order).ravel()
        stride[i] *= factor
    return order


def _interleave(sources: Sequence[Iterator[list[Step]]]) -> Iterator[list[Step]]:
    """The first of each, the second of each, ..."""
    for row in zip_longest(*sources):
        yield from (steps for steps in row if steps is not None)


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
            ordered = tuple(depth[np.isin(depth, nodes)] for nodes in groups)
            key = tuple(nodes.tobytes() for nodes in ordered)
            if key not in seen:
                seen.add(key)
                yield ordered


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
