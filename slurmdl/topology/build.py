"""From lines that declare zones to the canonical Topology, with the checks that Slurm itself makes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurmdl.errors import InputError
from slurmdl.topology.model import MAX_LEVELS, Topology

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
