"""Sizes of messages, shared by training and simulation: gradient buckets, shards of servers, compressed vectors.

Buckets are reduced from the last, whose gradients the backward pass produces first, to the first. The first ones are
short, since their reduction overlaps with no computation. There the number of turns matters more than bytes: a direct
exchange between few ranks of a zone, each on its own node, puts as many bytes on each link as a ring.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, chain, pairwise

#: elements of the longest bucket (4 MB) and of the first one (512 KB)
MAX_BUCKET_ELEMENTS, FIRST_BUCKET_ELEMENTS = 1 << 20, 1 << 17
#: minimum of the first bucket (128 KB), which is half of a small model, so that the other half overlaps
_MIN_FIRST_BUCKET_ELEMENTS = 1 << 15
#: elements at the start of the model that are exchanged directly
DIRECT_ELEMENTS = 2 * FIRST_BUCKET_ELEMENTS
#: maximum ranks of a direct exchange
_MAX_DIRECT_RANKS = 16
#: elements in which the model is assigned to parameter servers (4 MB)
SHARD_BLOCK = 1 << 20
#: elements that share a scale in compressed vectors
SCALE_BLOCK = 256
#: compressions of messages, see train.compressors
COMPRESSION_NAMES = ("none", "fp16", "int8", "int4", "sign")
#: share of the forward pass in the computation of a step
FORWARD_SHARE = 1 / 3


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


def split_offsets(size: int, parts: int) -> list[int]:
    """Starts of `parts` nearly equal parts of `size` elements; the last entry is `size`."""
    return [size * part // parts for part in range(parts + 1)]


def shard_pieces(size: int, groups: Sequence[Sequence[int]]) -> Iterator[tuple[slice, list[int]]]:
    """Split `size` elements where a shard of any group starts; yield the pieces, each with its holder per group."""
    offsets = [split_offsets(size, len(group)) for group in groups]
    for begin, end in pairwise(sorted({*chain(*offsets)})):
        yield slice(begin, end), [group[bisect_right(group_offsets, begin) - 1]
                                  for group, group_offsets in zip(groups, offsets, strict=True)]


def split_by_speed(size: int, speeds: Sequence[float]) -> list[slice]:
    """Split `size` elements in proportion to speeds, at block boundaries if there is a block for each."""
    if len(set(speeds)) == 1:
        offsets = split_offsets(size, len(speeds))
    else:
        offsets = [0, *(round(size * speed / sum(speeds)) for speed in accumulate(speeds))]
    if size >= len(speeds) * SHARD_BLOCK:
        offsets = [*(round(offset / SHARD_BLOCK) * SHARD_BLOCK for offset in offsets[:-1]), size]
    return [slice(begin, end) for begin, end in pairwise(offsets)]


def default_period(strategy: str) -> int:
    """Steps between two exchanges of models."""
    return 32 if strategy == "local-sgd" else 1


def packed_bytes(compression: str, length: int) -> int:
    """Bytes of a vector of `length` float32 elements after this compression; see train.compressors."""
    blocks = -(-length // SCALE_BLOCK)
    return {"none": 4 * length, "fp16": 2 * length, "int8": 2 * blocks + length,
            "int4": 2 * blocks + (length + 1) // 2, "sign": 2 * blocks + (length + 7) // 8}[compression]
