"""Boxes of a mesh: the ranks that share a node or zone, as a number of coordinates in each dimension.

Parallel groups that lie inside a box send nothing over its link. So the boxes that fill a node, and those that fill a
zone, decide what the links carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from slurmdl.placement.mesh_traffic import DimensionTraffic, MeshTraffic

Box = tuple[int, ...]
"""Coordinates of the box in each dimension of the mesh."""


def boxes(sizes: Box, ranks: int, inner: Box) -> Iterator[Box]:
    """Boxes of `ranks` ranks that consist of whole inner boxes and divide the mesh; none if nothing fits."""
    if not sizes:
        if ranks == 1:
            yield ()
        return
    for count in range(inner[0], sizes[0] + 1, inner[0]):
        if sizes[0] % count == 0 and ranks % count == 0:
            for rest in boxes(sizes[1:], ranks // count, inner[1:]):
                yield (count, *rest)


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


def bytes_leaving(traffic: MeshTraffic, box: Box) -> float:
    """Bytes that leave a box per iteration, summed over the phases, in the busier direction of each."""
    return sum(_dimension_bytes(dimension, traffic.mesh.sizes, box) for dimension in traffic.dimensions)


def _dimension_bytes(dimension: DimensionTraffic, sizes: Box, box: Box) -> float:
    inside = math.prod(box[i] for i in dimension.dims)
    if inside == dimension.size:
        return 0.0
    groups = math.prod(box) // inside
    if dimension.pairs == "all":
        return groups * inside * (dimension.size - inside) * dimension.bytes_per_message
    # neighbors in a group: a part of consecutive ranks is left once, with several parts once for each
    parts, is_partial = 1, False
    for i in reversed(dimension.dims):
        parts *= box[i] if is_partial else 1
        is_partial = is_partial or box[i] < sizes[i]
    directions = 2 if dimension.pairs == "line" else 1
    return directions * groups * parts * dimension.bytes_per_message


def min_bytes_leaving(traffic: MeshTraffic, ranks: int) -> float:
    """Least bytes that leave a node with this number of ranks, over all boxes; 0 if no box has that size."""
    sizes = traffic.mesh.sizes
    return min((bytes_leaving(traffic, box) for box in boxes(sizes, ranks, (1,) * len(sizes))), default=0.0)
