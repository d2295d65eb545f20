"""How allreduce cuts a model's gradients into buckets; the simulation goes by the same.

The buckets are summed one after the other, from the last, whose gradients the backward pass brings first, to the
first, whose gradients come at its end: the first ones are short, since what is left of the sum then is hidden behind
nothing. There turns cost more than bytes, and where few ranks of a zone, each on a node of its own, send each other
their parts at once, every node's link carries as many bytes as round a ring.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

#: elements of the longest bucket (4 MB), and of the first one (512 KB)
MAX_BUCKET_ELEMENTS, FIRST_BUCKET_ELEMENTS = 1 << 20, 1 << 17
#: the first bucket is half of a smaller model, so that the rest is summed meanwhile, but not shorter (128 KB)
_MIN_FIRST_BUCKET_ELEMENTS = 1 << 15
#: the buckets of so many first elements are exchanged at once
DIRECT_ELEMENTS = 2 * FIRST_BUCKET_ELEMENTS
#: most ranks of a zone that do so
_MAX_DIRECT_RANKS = 16


def bucket_starts(size: int) -> list[int]:
    """Where the buckets of so many elements begin: the first is the smallest, and they grow.

    One begins where those end that are exchanged at once.
    """
    found, length = [0], min(FIRST_BUCKET_ELEMENTS, MAX_BUCKET_ELEMENTS,
                             max(_MIN_FIRST_BUCKET_ELEMENTS, -(-size // 2)))
    while found[-1] + length + (length // 2 if found[-1] >= DIRECT_ELEMENTS else 0) < size:
        found.append(found[-1] + length)
        length = min(found[-1], MAX_BUCKET_ELEMENTS)
    return found


def uses_direct_exchange(nodes: Sequence[Hashable], zones: Sequence[str]) -> bool:
    """Whether the ranks of a group exchange the first buckets at once; entry i is the node, the leaf zone of one.

    Between the nodes of one zone all links that a message goes by are those of its ends.
    """
    return len(set(nodes)) == len(nodes) <= _MAX_DIRECT_RANKS and len({*zones, ""}) == 2
