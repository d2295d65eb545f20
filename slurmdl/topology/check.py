"""What is wrong or odd in declared zones: all that Slurm would say when it starts, and what it does not say.

Slurm's own messages are those of src/plugins/topology/ (tree/switch_record.c, block/block_record.c) of 22.05 to
26.05; where releases differ, the text says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from slurmdl.errors import InputError
from slurmdl.topology.build import SIMPLIFIED, Declared, unused_speeds
from slurmdl.topology.contents import Contents
from slurmdl.topology.hostlist import fold
from slurmdl.topology.tree import count, cut

#: passes over the switches in which Slurm must find the level of each, or it ends with "not a tree"
_MAX_PASSES = 21
#: longest name of a switch since Slurm 24.11 (HOST_NAME_MAX)
_MAX_NAME = 64
#: most nodes of a ring (topology.yaml(5))
_MAX_RING = 16
#: leaves whose sizes differ from the median by more than this factor are told
_UNEVEN = 2
_MAX_NAMES = 60
#: zones that are told one by one of nodes that the cluster does not have
_MAX_LINES = 20
_SIMPLIFIED = [SIMPLIFIED.format(kind) for kind in ("ring", "torus")]


Grade = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    grade : "error" where slurmctld ends (of some release at least), "warning" where it warns or where jobs may
        wait or go astray, "note" for what only looks odd.
    text : where it stands, and what is wrong.
    line : of the file, 0 for what concerns the whole.
    """

    grade: Grade
    text: str
    line: int = 0


def check(contents: Contents, cluster: Sequence[str] | None = None) -> list[Finding]:
    """All findings on one topology.

    Parameters
    ----------
    cluster : names of the cluster's nodes; None where they are not known.
    """
    zones, known = contents.zones, {zone.name: zone for zone in reversed(contents.zones)}
    found = [*_names(zones), *_children(zones, known), *_rings(zones, known), *_passes(zones, known),
             *_members(contents), *_twice(zones), *_parents(zones, known), *_roots(contents, known),
             *(Finding("note" if note in _SIMPLIFIED else "warning", note) for note in contents.notes),
             *_cluster(zones, cluster), *_speeds(zones)]
    if not any(finding.grade == "error" for finding in found):
        try:
            contents.topology()
        except InputError as error:
            found.append(fault(error))
        else:
            found += _shape(zones, known)
    return found


def fault(error: InputError) -> Finding:
    """What a reader refused."""
    return Finding("error", str(error), error.line or 0)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; each by their lines."""
    return sorted(findings, key=lambda finding: (get_args(Grade).index(finding.grade), finding.line))


def _at(grade: Grade, zone: Declared, message: str) -> Finding:
    return Finding(grade, str(zone.error(message)) if zone.file else message, zone.line or 0)


def _names(zones: Sequence[Declared]) -> Iterator[Finding]:
    first: dict[str, Declared] = {}
    for zone in zones:
        if zone.name in first:
            at = f" (first in line {first[zone.name].line})" if first[zone.name].line else ""
            yield _at("error", zone, f"zone {zone.name!r} is declared twice{at}; each name may stand once")
        first.setdefault(zone.name, zone)
        if len(zone.name) > _MAX_NAME:
            yield _at("error", zone, f"the name has {len(zone.name)} characters; valid are at most {_MAX_NAME} "
                                     "(Slurm 24.11 and newer)")


def _children(zones: Sequence[Declared], known: dict[str, Declared]) -> Iterator[Finding]:
    for zone in zones:
        missing = [child for child in dict.fromkeys(zone.children) if child not in known]
        if missing:
            yield _at("error", zone, f"{_some(missing)} below {zone.name!r} {'are' if len(missing) > 1 else 'is'} "
                                     "not declared")
        if zone.name in zone.children:
            yield _at("error", zone, f"zone {zone.name!r} lies below itself")


def _rings(zones: Sequence[Declared], known: dict[str, Declared]) -> Iterator[Finding]:
    """Zones above each other: what is left once those with nothing below, then with nothing above are taken away."""
    left = {zone.name: {child for child in zone.children if child in known} - {zone.name} for zone in zones}
    for _ in range(2):
        above: dict[str, set[str]] = {name: set() for name in left}
        for name, below in left.items():
            for child in below & left.keys():
                above[child].add(name)
        waiting = {name: len(below & left.keys()) for name, below in left.items()}
        ready = [name for name, open_below in waiting.items() if not open_below]
        while ready:
            name = ready.pop()
            for parent in above[name]:
                waiting[parent] -= 1
                if not waiting[parent]:
                    ready.append(parent)
        left = {name: above[name] & waiting.keys() for name, open_below in waiting.items() if open_below}
    if left:
        zone = next(zone for zone in zones if zone.name in left)
        yield _at("error", zone, f"{_some(left)} lie above each other; the zones must be a forest")


def _passes(zones: Sequence[Declared], known: dict[str, Declared]) -> Iterator[Finding]:
    """Slurm goes through the lines until each switch has its level; a deep tree with its roots first takes long."""
    open_zones = [zone for zone in zones if zone.children]
    solved = {zone.name for zone in zones if not zone.children}
    for _ in range(_MAX_PASSES):
        before = len(open_zones)
        still: list[Declared] = []
        for zone in open_zones:
            if all(child in solved or child not in known for child in zone.children):
                solved.add(zone.name)
            else:
                still.append(zone)
        open_zones = still
        if not open_zones or len(open_zones) == before:
            return
    yield _at("error", open_zones[0], f"Slurm does not find the level of {open_zones[0].name!r} in {_MAX_PASSES} "
                                      "passes over the file; declare switches after those below them")


def _members(contents: Contents) -> Iterator[Finding]:
    if not any(zone.nodes for zone in contents.zones) and contents.zones:
        yield Finding("error", f"{contents.source}: no zone has a node, which Slurm before 25.05 refuses")
    for zone in contents.zones:
        if contents.kind == "ring" and len(set(zone.nodes)) > _MAX_RING:
            yield _at("error", zone, f"a ring has at most {_MAX_RING} nodes, this one has {len(set(zone.nodes))}")


def _twice(zones: Sequence[Declared]) -> Iterator[Finding]:
    first: dict[str, Declared] = {}
    for zone in zones:
        doubled: dict[str, list[str]] = {}
        for node in zone.nodes:
            other = first.setdefault(node, zone)
            if other is not zone:
                doubled.setdefault(other.name, []).append(node)
        for name, nodes in doubled.items():
            yield _at("warning", zone, f"{_some(nodes)}: in zone {name!r}, too, for which slurmdl counts them alone")


def _parents(zones: Sequence[Declared], known: dict[str, Declared]) -> Iterator[Finding]:
    first: dict[str, Declared] = {}
    for zone in zones:
        for child in dict.fromkeys(zone.children):
            other = first.setdefault(child, zone)
            if child in known and other is not zone:
                yield _at("warning", zone, f"zone {child!r} lies below {other.name!r}, too, for which slurmdl "
                                           "counts it alone")


def _roots(contents: Contents, known: dict[str, Declared]) -> Iterator[Finding]:
    """Jobs cannot span two trees. Blocks and rings are no trees: each stands alone."""
    if contents.kind != "tree":
        return
    below = {child for zone in contents.zones for child in zone.children}
    roots = [name for name in known if name not in below]
    if len(roots) > 1:
        yield Finding("warning", f"{contents.source}: no switch reaches all nodes; {_some(roots)} have none above "
                                 "them, and no job can span them")


def _cluster(zones: Sequence[Declared], cluster: Sequence[str] | None) -> Iterator[Finding]:
    if cluster is None:
        return
    nodes, inside = set(cluster), {node for zone in zones for node in zone.nodes}
    strange = [(zone, names) for zone in zones
               if (names := [node for node in dict.fromkeys(zone.nodes) if node not in nodes])]
    for zone, names in strange[:_MAX_LINES]:
        yield _at("warning", zone, f"{_some(names)}: unknown to the cluster")
    more = [name for _, names in strange[_MAX_LINES:] for name in names]
    if more:
        yield Finding("warning", f"{count(len(more), 'node')} of further zones unknown to the cluster: {_some(more)}")
    alone = [node for node in cluster if node not in inside]
    if alone:
        yield Finding("warning", f"{count(len(alone), 'node')} of the cluster without a zone: {_some(alone)}")


def _shape(zones: Sequence[Declared], known: dict[str, Declared]) -> Iterator[Finding]:
    leaves = [zone for zone in zones if zone.nodes]
    single = [zone.name for zone in leaves if len(set(zone.nodes)) == 1]
    if single:
        yield Finding("note", f"{_some(single)}: one node only")
    if leaves:
        middle = median(len(zone.nodes) for zone in leaves)
        uneven = [zone.name for zone in leaves if not middle / _UNEVEN <= len(zone.nodes) <= middle * _UNEVEN]
        if uneven:
            yield Finding("note", f"{_some(uneven)}: sizes far from those of the others, of which half have up to "
                                  f"{middle:g} nodes")
    parent = {child: zone.name for zone in reversed(zones) for child in zone.children}
    depths: dict[int, list[str]] = {}
    for zone in leaves:
        depth, name = 0, zone.name
        while name in parent and depth < len(known):
            depth, name = depth + 1, parent[name]
        depths.setdefault(depth, []).append(zone.name)
    if len(depths) > 1:
        usual = max(depths, key=lambda depth: len(depths[depth]))
        for depth, names in sorted(depths.items()):
            if depth != usual:
                yield Finding("note", f"{_some(names)}: {count(depth, 'level')} below the root, most leaves {usual}")


def _speeds(zones: Sequence[Declared]) -> Iterator[Finding]:
    used = [zone for zone in zones if not math.isnan(zone.speed)]
    if used:
        yield _at("note", used[0], f"LinkSpeed of {count(len(used), 'zone')} is ignored by Slurm; slurmdl takes it "
                                   "for Mbit/s of the uplink")
    unused = [zone for zone in zones if zone.has_speed and math.isnan(zone.speed)]
    if unused:
        yield _at("warning", unused[0], unused_speeds(unused))


def _some(names: Iterable[str]) -> str:
    return cut(fold(names), _MAX_NAMES)
