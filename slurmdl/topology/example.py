"""Topologies of any shape, for examples and measurements."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from slurmdl.errors import UsageError
from slurmdl.slurm.hostlist import MAX_NAMES
from slurmdl.topology import source as block
from slurmdl.topology.source import TopologySource, ZoneDecl
from slurmdl.topology.topology import MAX_LEVELS, Topology

#: names of zones by their level; higher ones are numbered
_LEVEL_NAMES = ("leaf", "group", "core")


def parse_shape(shape: str) -> tuple[int, ...]:
    """`1x23x394x4992` -> (1, 23, 394, 4992): zones of each level from the roots down, then nodes.

    Raises
    ------
    UsageError : no numbers, fewer of a level than of the level above, too many.
    """
    parts = shape.split("x")
    if not all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts) or len(parts) < 2:
        raise UsageError(f"shape {shape!r}: valid are numbers of zones, level by level from the roots down, then of "
                         "nodes, e.g. 1x2x8 for 8 nodes on 2 leaves below 1 root")
    found = tuple(map(int, parts))
    if found[0] < 1 or list(found) != sorted(found):
        raise UsageError(f"shape {shape!r}: each number must be at least 1 and at least the one before it")
    if sum(found) > MAX_NAMES or len(found) > MAX_LEVELS:
        raise UsageError(f"shape {shape!r}: at most {MAX_NAMES} names and {MAX_LEVELS - 1} levels")
    return found


def parse_block_sizes(text: str) -> tuple[int, ...]:
    """`18,72` -> (18, 72), BlockSizes in nodes.

    Raises
    ------
    UsageError : no numbers, or they are no powers of two apart.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise UsageError(f"block sizes {text!r}: valid are numbers of nodes, e.g. 18,72")
    found = tuple(map(int, text.split(",")))
    try:
        block.level_multiples(found)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return found


def tree_topology(counts: Sequence[int]) -> Topology:
    """A tree with so many zones of each level, from the roots down, and so many nodes, dealt out evenly.

    Where a number does not divide, the first zones of the level above have one more.
    """
    *zones, nodes = counts
    below = _numbered_names("n", nodes)
    declared: list[ZoneDecl] = []
    for level, number in enumerate(reversed(zones)):
        names = _numbered_names(_LEVEL_NAMES[level] if level < len(_LEVEL_NAMES) else f"core{level}", number)
        here = [ZoneDecl(name, () if not level else share, share if not level else ())
                for name, share in zip(names, _split_evenly(below, number), strict=True)]
        declared += here
        below = names
    return TopologySource(tuple(declared), "tree", "example").to_topology()


def block_topology(counts: Sequence[int], sizes: Sequence[int] = ()) -> Topology:
    """Blocks, dealt out evenly; `counts` is the number of blocks and that of nodes, `sizes` the BlockSizes.

    Raises
    ------
    UsageError : `counts` has more than two numbers.
    InputError : the sizes do not fit the blocks (see `sizes`).
    """
    if len(counts) != 2:
        raise UsageError("blocks have no levels: valid is BLOCKSxNODES, e.g. 40x720")
    shares = _split_evenly(_numbered_names("n", counts[1]), counts[0])
    declared = [
    ZoneDecl(
        name, (), share) for name, share in zip(
            _numbered_names(
                "block", counts[0]), shares, strict=True)]
    return TopologySource(tuple(declared), "block", "example", block_sizes=tuple(sizes)).to_topology()


def _numbered_names(prefix: str, count: int) -> list[str]:
    """Numbered from 1, all of the same width; a single zone has no number."""
    width = len(str(count))
    return [f"{prefix}{i:0{width}}" for i in range(1, count + 1)] if count > 1 else [prefix]


def _split_evenly(names: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    each, more = divmod(len(names), parts)
    starts = [i * each + min(i, more) for i in range(parts + 1)]
    return [tuple(names[start:end]) for start, end in itertools.pairwise(starts)]
