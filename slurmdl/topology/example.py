"""Synthetic topologies of any shape, for examples and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.slurm.hostlist import MAX_NAMES
from slurmdl.topology.source import TopologySource, ZoneDecl
from slurmdl.topology.topology import MAX_LEVELS, Topology

_LEVEL_NAMES = ("leaf", "group", "core")  # higher levels are numbered


def parse_shape(shape: str) -> tuple[int, ...]:
    """Parse `1x23x394x4992` -> (1, 23, 394, 4992): zones per level from the roots down, then nodes."""
    parts = shape.split("x")
    if not all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts) or len(parts) < 2:
        raise UsageError(f"shape {shape!r}: expected zones per level from the roots down, then nodes, e.g. 1x2x8 "
                         "for 1 root, 2 leaves and 8 nodes")
    counts = tuple(map(int, parts))
    if counts[0] < 1 or list(counts) != sorted(counts):
        raise UsageError(f"shape {shape!r}: expected numbers from 1 upward, none less than the one before")
    if sum(counts) > MAX_NAMES or len(counts) > MAX_LEVELS:
        raise UsageError(f"shape {shape!r}: expected at most {MAX_NAMES} names and {MAX_LEVELS - 1} levels")
    return counts


def tree_topology(counts: Sequence[int]) -> Topology:
    """Return a tree with the given number of zones per level, from the roots down, and an even share of the nodes.

    If a count does not divide, the first zones of the level above have one more child.
    """
    *zones, nodes = counts
    children = _numbered_names("n", nodes)
    declared: list[ZoneDecl] = []
    for level, number in enumerate(reversed(zones)):
        names = _numbered_names(_LEVEL_NAMES[level] if level < len(_LEVEL_NAMES) else f"core{level}", number)
        declared += [ZoneDecl(name, share, ()) if level else ZoneDecl(name, (), share)
                     for name, share in zip(names, _split_evenly(children, number), strict=True)]
        children = names
    return TopologySource(tuple(declared), "tree", "example").to_topology()


def block_topology(counts: Sequence[int], sizes: Sequence[int] = ()) -> Topology:
    """Return (blocks, nodes) = `counts` with an even share of nodes; InputError if the BlockSizes do not fit them."""
    if len(counts) != 2:
        raise UsageError("blocks have no levels; expected BLOCKSxNODES, e.g. 40x720")
    shares = _split_evenly(_numbered_names("n", counts[1]), counts[0])
    blocks = [ZoneDecl(name, (), share)
              for name, share in zip(_numbered_names("block", counts[0]), shares, strict=True)]
    return TopologySource(tuple(blocks), "block", "example", block_sizes=tuple(sizes)).to_topology()


def _numbered_names(prefix: str, count: int) -> list[str]:
    """Return names numbered from 1, all of one width; a single name has no number."""
    width = len(str(count))
    return [f"{prefix}{i:0{width}}" for i in range(1, count + 1)] if count > 1 else [prefix]


def _split_evenly(names: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    return [tuple(part.tolist()) for part in np.array_split(names, parts)]
