"""Zone declarations, as a source gives them or of a synthetic shape, and their canonical Topology.

The checks are those that Slurm makes.
"""

from __future__ import annotations

import graphlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurmdl.errors import InputError, UsageError
from slurmdl.slurm.hostlist import MAX_NAMES, ranged_string
from slurmdl.text import pluralize
from slurmdl.topology.topology import MAX_LEVELS, Topology, TopologySet, children_by_zone, nodes_by_leaf

LINK_SPEED_UNIT = 1e6 / 8  # bytes/s; topology.conf(5) leaves the unit of LinkSpeed open: Mbit/s is assumed
PLAUSIBLE_LINK_SPEEDS = range(1_000, 10_000_000)  # in Mbit/s; a number outside this range has another unit, or none

#: a tree of zones cannot represent distances within a ring or torus
TREE_APPROXIMATION_NOTE = "each {0} is one zone; the position of a node in its {0} is not used"
_LEVEL_NAMES = ("leaf", "group", "core")  # higher levels are numbered
_DEFAULT_MULTIPLES = (2, 4, 8, 16)  # blocks per aggregate if the file gives no BlockSizes
_MAX_MULTIPLE = 2**15  # Slurm rejects larger aggregates (MAX_BLOCK_LEVELS)


@dataclass(frozen=True)
class ZoneDecl:
    """One zone as a source declares it.

    Attributes:
        children: names of the child zones; () for a leaf.
        nodes: names of the zone's nodes; used for a leaf only.
        link_speed: LinkSpeed, None if not given.
        file, line, text: location of the declaration.
    """

    name: str
    children: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    link_speed: int | None = None
    file: str | None = None
    line: int | None = None
    text: str | None = None

    def error(self, message: str) -> InputError:
        return InputError(message, self.file, self.line, self.text)

    @property
    def uplink_bandwidth(self) -> float:
        """Uplink bandwidth in bytes/s, NaN if not given or not plausible."""
        speed = self.link_speed or 0
        return speed * LINK_SPEED_UNIT if speed in PLAUSIBLE_LINK_SPEEDS else math.nan

    @property
    def has_unused_link_speed(self) -> bool:
        """Whether LinkSpeed is set, but not plausible; 1 is Slurm's default."""
        return (self.link_speed or 0) > 1 and math.isnan(self.uplink_bandwidth)


def to_link_speed(bandwidth: float) -> int | None:
    """Return the LinkSpeed of a bandwidth (bytes/s), or None if it is not plausible."""
    number = 0 if math.isnan(bandwidth) else round(bandwidth / LINK_SPEED_UNIT)
    return number if number in PLAUSIBLE_LINK_SPEEDS else None


def unused_link_speeds_note(zones: Iterable[ZoneDecl]) -> str:
    """Describe the zones whose LinkSpeed is not plausible and therefore not used, or return ""."""
    speeds = [zone.link_speed or 0 for zone in zones if zone.has_unused_link_speed]
    if not speeds:
        return ""
    values = " to ".join(f"{speed:,}" for speed in dict.fromkeys((min(speeds), max(speeds))))
    return (f"LinkSpeed of {len(speeds):,} zone{'s' * (len(speeds) > 1)} ({values}) is not used; expected Mbit/s, "
            f"{PLAUSIBLE_LINK_SPEEDS.start:,} to {PLAUSIBLE_LINK_SPEEDS.stop - 1:,}; "
            "or set link_defaults.zone_bandwidth in slurmdl.yaml")


@dataclass(frozen=True)
class ZoneDeclarations:
    """One topology as its source declares it.

    Attributes:
        zones: for blocks, the base blocks only; their aggregates follow from order and sizes.
        kind, source, name, notes, block_sizes: as in Topology.
        shown: printed by the controller, which has checked the blocks, and has aggregates only with block sizes.
    """

    zones: tuple[ZoneDecl, ...]
    kind: str
    source: str
    name: str = "default"
    notes: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()
    shown: bool = False

    @classmethod
    def from_topology(cls, topology: Topology) -> ZoneDeclarations:
        """Return the declaration of a topology, without file locations or implausible link speeds."""
        nodes, children = nodes_by_leaf(topology), children_by_zone(topology)
        speeds = [to_link_speed(speed) for speed in topology.uplink_bandwidth.tolist()]
        zones = [ZoneDecl(name, tuple(topology.zones[child] for child in children.get(zone, ())),
                          tuple(nodes.get(zone, ())), speeds[zone])
                 for zone, name in enumerate(topology.zones) if topology.kind != "block" or not topology.level[zone]]
        return cls(tuple(zones), topology.kind, topology.source, topology.name, topology.notes, topology.block_sizes)

    def to_topology(self) -> Topology:
        """Return the canonical form; InputError as `build_topology`, or if a block is too small."""
        if self.kind == "flat":
            return Topology.flat((), self.source, self.name, self.notes)
        zones = list(self.zones)
        if self.kind == "block":
            if not self.shown:
                _check_block_nodes(zones, self.block_sizes)
            try:
                zones += aggregate_blocks(zones, () if self.shown and not self.block_sizes else
                                          level_multiples(self.block_sizes))
            except ValueError as error:
                raise InputError(f"{self.source}: {error}") from error
        return build_topology(zones, kind=self.kind, source=self.source, name=self.name, notes=self.notes,
                              block_sizes=self.block_sizes)


def build_topologies(sources: Sequence[ZoneDeclarations], default: str) -> TopologySet:
    """Return the canonical forms; InputError as `ZoneDeclarations.to_topology`."""
    return TopologySet(tuple(source.to_topology() for source in sources), default)


def build_topology(declared: Sequence[ZoneDecl], *, kind: str, source: str, name: str = "default",
                   notes: tuple[str, ...] = (), block_sizes: tuple[int, ...] = ()) -> Topology:
    """Return the canonical form of declared zones.

    A node on two leaves belongs to the first one, a zone with several parents to the lowest, then the first. Raises
    InputError for a duplicate name, an undeclared child, a zone above itself, or more than MAX_LEVELS levels.
    """
    index: dict[str, int] = {}
    for i, zone in enumerate(declared):
        if any("\n" in name for name in (zone.name, *zone.nodes)):
            raise zone.error("a name contains a line break")
        if zone.name in index:
            raise zone.error(f"zone {zone.name!r} is declared twice; expected unique names")
        index[zone.name] = i
    leaf: dict[str, int] = {}
    for i, zone in enumerate(declared):
        for child in zone.children:
            if child not in index:
                raise zone.error(f"zone {child!r} below {zone.name!r} is not declared; "
                                 f"expected a line SwitchName={child}")
        if not zone.children:
            for node in zone.nodes:
                leaf.setdefault(node, i)
    level = _zone_levels(declared, index)
    parents: dict[str, int] = {}
    for i in np.argsort(level, kind="stable").tolist():
        for child in declared[i].children:
            parents.setdefault(child, i)
    parent = np.array([parents.get(zone, -1) for zone in index], np.int32)
    bandwidth = np.array([zone.uplink_bandwidth for zone in declared], float)
    notes += tuple(filter(None, [unused_link_speeds_note(declared)]))
    return Topology(tuple(index), parent, level, bandwidth, tuple(leaf),
                    np.fromiter(leaf.values(), np.int32, len(leaf)), kind, source, name, notes, block_sizes)


def _zone_levels(declared: Sequence[ZoneDecl], index: dict[str, int]) -> np.typing.NDArray[np.int32]:
    """Return the height of each zone; InputError at a cycle."""
    level = [0] * len(declared)
    children = {i: [index[child] for child in zone.children] for i, zone in enumerate(declared)}
    try:
        for i in graphlib.TopologicalSorter(children).static_order():
            level[i] = 1 + max((level[child] for child in children[i]), default=-1)
            if level[i] >= MAX_LEVELS:
                raise declared[i].error(f"zone {declared[i].name!r} is above more than {MAX_LEVELS - 1} levels of "
                                        "zones")
    except graphlib.CycleError as error:
        zone = declared[min(error.args[1])]
        raise zone.error(f"zone {zone.name!r} is above itself; expected a forest of zones") from error
    return np.array(level, np.int32)


def parse_block_sizes(text: str) -> tuple[int, ...]:
    """Parse BlockSizes in nodes, e.g. `18,72`; ValueError if they are invalid."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}(, *[1-9][0-9]{0,8})*", text):
        raise ValueError(f"BlockSizes={text}: expected numbers of nodes, e.g. 18,72")
    sizes = tuple(map(int, text.split(",")))
    level_multiples(sizes)
    return sizes


def level_multiples(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks per aggregate of each level for BlockSizes in nodes; ValueError if these are invalid."""
    if not sizes:
        return _DEFAULT_MULTIPLES
    multiples = set()
    for size in sizes:
        multiple, remainder = divmod(size, sizes[0]) if sizes[0] else (0, 0)
        if remainder or multiple & (multiple - 1) or not 1 <= multiple <= _MAX_MULTIPLE:
            raise ValueError(f"BlockSizes: {size} is not {sizes[0]} times a power of two up to {_MAX_MULTIPLE}")
        multiples.add(multiple)
    return tuple(sorted(multiples - {1}))


def aggregate_blocks(blocks: Sequence[ZoneDecl], multiples: Sequence[int]) -> list[ZoneDecl]:
    """Return the zones above the base blocks, named after their blocks as Slurm does: b1, b2 -> b[1-2].

    They begin at multiples of their block count, so the order of the blocks matters; those of one zone are omitted.
    """
    aggregates: list[ZoneDecl] = []
    tops = [(i, 1, block.name) for i, block in enumerate(blocks)]
    for multiple in multiples:
        merged: list[tuple[int, int, str]] = []
        groups: dict[int, list[tuple[int, int, str]]] = {}
        for top in tops:
            groups.setdefault(top[0] // multiple, []).append(top)
        for group in groups.values():
            if len(group) == 1:
                merged += group
                continue
            first, last = group[0][0], group[-1][0] + group[-1][1]
            name = ranged_string(block.name for block in blocks[first:last])
            aggregates.append(ZoneDecl(name, tuple(name for _, _, name in group)))
            merged.append((first, last - first, name))
        tops = merged
        if multiple >= len(blocks):
            break
    return aggregates


def _check_block_nodes(blocks: Sequence[ZoneDecl], sizes: Sequence[int]) -> None:
    """Raise InputError for a block with fewer nodes than a base block needs; empty blocks are valid."""
    counts = [len(set(block.nodes)) for block in blocks]
    base = sizes[0] if sizes else next(filter(None, counts), 0)
    for block, count in zip(blocks, counts, strict=True):
        if 0 < count < base:
            raise block.error(f"block {block.name!r} has {pluralize(count, 'node')}; expected at least {base}, as in "
                              f"{'BlockSizes' if sizes else 'the first block'}")


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
    return ZoneDeclarations(tuple(declared), "tree", "example").to_topology()


def block_topology(counts: Sequence[int], sizes: Sequence[int] = ()) -> Topology:
    """Return (blocks, nodes) = `counts` with an even share of nodes; InputError if the BlockSizes do not fit them."""
    if len(counts) != 2:
        raise UsageError("blocks have no levels; expected BLOCKSxNODES, e.g. 40x720")
    shares = _split_evenly(_numbered_names("n", counts[1]), counts[0])
    blocks = [ZoneDecl(name, (), share)
              for name, share in zip(_numbered_names("block", counts[0]), shares, strict=True)]
    return ZoneDeclarations(tuple(blocks), "block", "example", block_sizes=tuple(sizes)).to_topology()


def _numbered_names(prefix: str, count: int) -> list[str]:
    """Return names numbered from 1, all of one width; a single name has no number."""
    width = len(str(count))
    return [f"{prefix}{i:0{width}}" for i in range(1, count + 1)] if count > 1 else [prefix]


def _split_evenly(names: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    return [tuple(part.tolist()) for part in np.array_split(names, parts)]
