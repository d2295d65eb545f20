"""Gradient buckets of allreduce, shared by training and simulation.

Buckets are reduced from the last, whose gradients the backward pass produces first, to the first. The first ones are
short, since their reduction overlaps with no computation. There the number of turns matters more than bytes: a direct
exchange between few ranks of a zone, each on its own node, puts as many bytes on each link as a ring.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

#: elements of the longest bucket (4 MB) and of the first one (512 KB)
MAX_BUCKET_ELEMENTS, FIRST_BUCKET_ELEMENTS = 1 << 20, 1 << 17
#: minimum of the first bucket (128 KB), which is half of a small model, so that the other half overlaps
_MIN_FIRST_BUCKET_ELEMENTS = 1 << 15
#: elements at the start of the model that are exchanged directly
DIRECT_ELEMENTS = 2 * FIRST_BUCKET_ELEMENTS
#: maximum ranks of a direct exchange
_MAX_DIRECT_RANKS = 16


def bucket_starts(size: int) -> list[int]:
    """Start indices of the buckets of a model with `size` elements; sizes grow, and DIRECT_ELEMENTS is a boundary."""
    starts, length = [0], min(FIRST_BUCKET_ELEMENTS, MAX_BUCKET_ELEMENTS,
                              max(_MIN_FIRST_BUCKET_ELEMENTS, -(-size // 2)))
    while starts[-1] + length + (length // 2 if starts[-1] >= DIRECT_ELEMENTS else 0) < size:
        starts.append(starts[-1] + length)
        length = min(starts[-1], MAX_BUCKET_ELEMENTS)
    return starts


def uses_direct_exchange(nodes: Sequence[Hashable], zones: Sequence[str]) -> bool:
    """Whether the ranks with these nodes and leaf zones exchange the first buckets directly.

    Messages between nodes of one zone use only the links of the two nodes.
    """
    return len(set(nodes)) == len(nodes) <= _MAX_DIRECT_RANKS and len({*zones, ""}) == 2
