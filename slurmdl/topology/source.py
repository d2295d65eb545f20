"""From lines that declare zones to the canonical Topology, with the checks that Slurm itself makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurmdl.errors import InputError
from slurmdl.slurm.hostlist import ranged_string
from slurmdl.topology.text_tree import children_by_zone, nodes_by_leaf
from slurmdl.topology.topology import MAX_LEVELS, Topology

#: bytes/s behind one unit of LinkSpeed. Slurm leaves the unit open (topology.conf(5)); Mbit/s is assumed here.
LINK_SPEED_UNIT = 1e6 / 8
#: speeds that the uplink of a zone can have, in Mbit/s: from 1 Gbit/s to less than 10 Tbit/s. A number outside this
#: range has another unit, or none.
PLAUSIBLE_LINK_SPEEDS = range(1_000, 10_000_000)

#: remark on rings and tori, whose distances no tree of zones can hold
TREE_APPROXIMATION_NOTE = "each {0} is taken as one zone; where a node stands in its {0} is not used"


@dataclass(frozen=True)
class ZoneDecl:
    """One zone as a source declares it.

    Attributes
    ----------
    children : names of the zones below; () for a leaf.
    nodes : names of its own nodes; read for a leaf only.
    link_speed : LinkSpeed, None if not given.
    file, line, text : where it stands.
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
    def has_link_speed(self) -> bool:
        """Whether LinkSpeed says something: 1 is Slurm's default."""
        return (self.link_speed or 0) > 1

    @property
    def uplink_bandwidth(self) -> float:
        """Bytes/s of the uplink, NaN if not given or not plausible."""
        speed = self.link_speed or 0
        return speed * LINK_SPEED_UNIT if speed in PLAUSIBLE_LINK_SPEEDS else math.nan


def to_link_speed(bandwidth: float) -> int | None:
    """The LinkSpeed that reads as this speed (bytes/s), None if there is none."""
    number = 0 if math.isnan(bandwidth) else round(bandwidth / LINK_SPEED_UNIT)
    return number if number in PLAUSIBLE_LINK_SPEEDS else None


def unused_link_speeds_note(zones: Iterable[ZoneDecl]) -> str:
    """One sentence about the zones whose LinkSpeed is not plausible and therefore not used, "" if there are none."""
    odd = [zone.link_speed or 0 for zone in zones if zone.has_link_speed and math.isnan(zone.uplink_bandwidth)]
    if not odd:
        return ""
    values = " to ".join(f"{each:,}" for each in dict.fromkeys((min(odd), max(odd))))
    return (f"LinkSpeed of {len(odd):,} zone{'s' * (len(odd) > 1)} ({values}) is not used: it is taken for Mbit/s; "
            f"plausible: {PLAUSIBLE_LINK_SPEEDS.start:,} to {PLAUSIBLE_LINK_SPEEDS.stop - 1:,}, or links.zone in slurmdl.yaml")


def build_topology(declared: Sequence[ZoneDecl], *, kind: str, source: str, name: str = "default",
          notes: tuple[str, ...] = (), block_sizes: tuple[int, ...] = ()) -> Topology:
    """The canonical form of the declared zones.

    A node on two leaves belongs to the first, a zone with several parents to the lowest, then the first.

    Raises
    ------
    InputError : duplicate names, undefined children, a zone above itself, more than MAX_LEVELS levels.
    """
    index: dict[str, int] = {}
    for i, zone in enumerate(declared):
        if any("\n" in name for name in (zone.name, *zone.nodes)):
            raise zone.error("a name has a line break; valid: names of one line")
        if zone.name in index:
            raise zone.error(f"zone {zone.name!r} is declared twice; each name may stand once")
        index[zone.name] = i
    leaf: dict[str, int] = {}
    for i, zone in enumerate(declared):
        for child in zone.children:
            if child not in index:
                raise zone.error(f"zone {child!r} below {zone.name!r} is not declared; "
                                 f"a line SwitchName={child} is needed")
        if not zone.children:
            for node in zone.nodes:
                leaf.setdefault(node, i)
    level = _zone_levels(declared, index)
    parents: dict[str, int] = {}
    for i in np.argsort(level, kind="stable").tolist():
        for child in declared[i].children:
            parents.setdefault(child, i)
    parent = np.array([parents.get(zone, -1) for zone in index], np.int32)
    speed = np.array([zone.uplink_bandwidth for zone in declared], float)
    unused = unused_link_speeds_note(declared)
    notes += (unused,) * bool(unused)
    return Topology(tuple(index), parent, level, speed, tuple(leaf),
                    np.fromiter(leaf.values(), np.int32, len(leaf)), kind, source, name, notes, block_sizes)


def _zone_levels(declared: Sequence[ZoneDecl], index: dict[str, int]) -> np.typing.NDArray[np.int32]:
    """Height of each zone; InputError at a cycle."""
    level = np.full(len(declared), -1, np.int32)
    open_children = [len(set(zone.children)) for zone in declared]
    parents: list[list[int]] = [[] for _ in declared]
    for i, zone in enumerate(declared):
        for child in set(zone.children):
            parents[index[child]].append(i)
    ready = [i for i, count in enumerate(open_children) if not count]
    level[ready] = 0
    while ready:
        i = ready.pop()
        for above in parents[i]:
            level[above] = max(level[above], level[i] + 1)
            if level[above] >= MAX_LEVELS:
                raise declared[above].error(f"zone {declared[above].name!r} lies above more than {MAX_LEVELS - 1} "
                                            "levels of zones")
            open_children[above] -= 1
            if not open_children[above]:
                ready.append(above)
    for i, count in enumerate(open_children):
        if count:
            raise declared[i].error(f"zone {declared[i].name!r} lies above itself; the zones must be a forest")
    return level


# MERGED: What a source declares of one topology, line by line, before it is looked at as a whole.

#: called with a fault where the reader can go on; the readers raise it, `check` collects it
OnError = Callable[[InputError], None]


def raise_error(error: InputError) -> None:
    raise error


@dataclass(frozen=True)
class TopologySource:
    """One topology as its source declares it.

    Attributes
    ----------
    zones : of blocks the base blocks only; their aggregates follow from the order and the sizes.
    kind, source, name, notes, block_sizes : as in Topology.
    """

    zones: tuple[ZoneDecl, ...]
    kind: str
    source: str
    name: str = "default"
    notes: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()

    @classmethod
    def from_topology(cls, topology: Topology) -> TopologySource:
        """What a source would declare of this topology, without a place in a file.

        A speed that no reader would take from a LinkSpeed is left out.
        """
        nodes, below = nodes_by_leaf(topology), children_by_zone(topology)
        speeds = [to_link_speed(speed) for speed in topology.uplink_bandwidth.tolist()]
        zones = [ZoneDecl(name, tuple(topology.zones[child] for child in below.get(zone, ())),
                          tuple(nodes.get(zone, ())), speeds[zone])
                 for zone, name in enumerate(topology.zones) if topology.kind != "block" or not topology.level[zone]]
        return cls(tuple(zones), topology.kind, topology.source, topology.name, topology.notes, topology.block_sizes)

    def to_topology(self) -> Topology:
        """The canonical form.

        Raises
        ------
        InputError : the zones are no forest, a name stands twice or is not declared, a block is too small.
        """
        if self.kind == "flat":
            return Topology.flat((), self.source, self.name, self.notes)
        zones = list(self.zones)
        if self.kind == "block":
            small = undersized_block(zones, self.block_sizes)
            if small:
                raise small[0].error(small[1])
            zones += aggregate_blocks(zones, level_multiples(self.block_sizes))
        return build_topology(zones, kind=self.kind, source=self.source, name=self.name, notes=self.notes,
                     block_sizes=self.block_sizes)


# MERGED: Blocks of nodes (topology/block): the sizes that are planned with, and the aggregates of neighbours.

#: blocks in the aggregates where the file gives no BlockSizes
_DEFAULT_MULTIPLES = (2, 4, 8, 16)
#: aggregates of more blocks are refused by Slurm (MAX_BLOCK_LEVELS)
_MAX_MULTIPLE = 2**15


def level_multiples(sizes: Sequence[int]) -> tuple[int, ...]:
    """Blocks in the aggregates of each level, for BlockSizes in nodes; the first size is that of a base block.

    Raises
    ------
    ValueError : a size is not the first one times a power of two; the text says which.
    """
    if not sizes:
        return _DEFAULT_MULTIPLES
    found = set()
    for size in sizes:
        step, rest = divmod(size, sizes[0]) if sizes[0] else (0, 0)
        if rest or step & (step - 1) or not 1 <= step <= _MAX_MULTIPLE:
            raise ValueError(f"BlockSizes: {size} is not {sizes[0]} times a power of two up to {_MAX_MULTIPLE}")
        found.add(step)
    return tuple(sorted(found - {1}))


def aggregate_blocks(blocks: Sequence[ZoneDecl], multiples: Sequence[int]) -> list[ZoneDecl]:
    """The zones above the base blocks, named by their members as Slurm does: b1, b2 -> b[1-2].

    Aggregates of a level begin at multiples of its step, so the order of the blocks matters. An aggregate that
    would hold one zone only is left out.
    """
    found: list[ZoneDecl] = []
    tops = [(i, 1, block.name) for i, block in enumerate(blocks)]
    for step in multiples:
        merged: list[tuple[int, int, str]] = []
        groups: dict[int, list[tuple[int, int, str]]] = {}
        for top in tops:
            groups.setdefault(top[0] // step, []).append(top)
        for group in groups.values():
            if len(group) == 1:
                merged += group
                continue
            first, last = group[0][0], group[-1][0] + group[-1][1]
            name = ranged_string(block.name for block in blocks[first:last])
            found.append(ZoneDecl(name, tuple(name for _, _, name in group)))
            merged.append((first, last - first, name))
        tops = merged
        if step >= len(blocks):
            break
    return found


def undersized_block(blocks: Sequence[ZoneDecl], sizes: Sequence[int]) -> tuple[ZoneDecl, str] | None:
    """The first block with fewer nodes than a base block needs, and what is wrong; empty ones wait for nodes."""
    counts = [len(set(block.nodes)) for block in blocks]
    base = sizes[0] if sizes else next((count for count in counts if count), 0)
    for block, count in zip(blocks, counts, strict=True):
        if 0 < count < base:
            return block, (f"block {block.name!r} has {count} nodes; a block has at least the {base} of "
                           f"{'BlockSizes' if sizes else 'the first block'}")
    return None
