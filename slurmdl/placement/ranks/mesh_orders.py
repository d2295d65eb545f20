"""Rank orders of a mesh: which ranks share a node and a zone.

The ranks are numbered by boxes: those of the inner box fill a node, those of the outer box a zone, and the boxes
follow each other in each sequence of the remaining dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations, zip_longest

import numpy as np

from slurmdl.placement.arrays import IntArray
from slurmdl.placement.mesh_boxes import Box, boxes, bytes_leaving, consecutive_box
from slurmdl.placement.mesh_traffic import MeshTraffic

MAX_INNER_BOXES = 6  # boxes of a node that are tried, the ones with the least traffic first
MAX_OUTER_BOXES = 6  # boxes of a zone for each of them

Step = tuple[int, int]
"""Index of a dimension, and the factor by which the box grows along it."""


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
