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
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.topology.source import TREE_APPROXIMATION_NOTE, TopologySource, ZoneDecl, unused_link_speeds_note
from slurmdl.topology.text_tree import pluralize, truncate

#: passes over the switches in which Slurm must find the level of each, or it ends with "not a tree"
_MAX_PASSES = 21
#: longest name of a switch since Slurm 24.11 (HOST_NAME_MAX)
_MAX_NAME_LENGTH = 64
#: most nodes of a ring (topology.yaml(5))
_MAX_RING_NODES = 16
#: leaves whose sizes differ from the median by more than this factor are told
_MAX_SIZE_FACTOR = 2
_MAX_NAMES_WIDTH = 60
#: zones that are told one by one of nodes that the cluster does not have
_MAX_UNKNOWN_NODE_FINDINGS = 20
_APPROXIMATION_NOTES = [TREE_APPROXIMATION_NOTE.format(kind) for kind in ("ring", "torus")]


Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class TopologyFinding:
    """One line of the report.

    Attributes
    ----------
    grade : "error" where slurmctld ends (of some release at least), "warning" where it warns or where jobs may
        wait or go astray, "note" for what only looks odd.
    text : where it stands, and what is wrong.
    line : of the file, 0 for what concerns the whole.
    """

    severity: Severity
    text: str
    line: int = 0


def check_source(source: TopologySource, cluster_nodes: Sequence[str] | None = None) -> list[TopologyFinding]:
    """All findings on one topology.

    Parameters
    ----------
    cluster : names of the cluster's nodes; None where they are not known.
    """
    zones, known = source.zones, {zone.name: zone for zone in reversed(source.zones)}
    found = [*_bad_names(zones), *_undeclared_children(zones, known), *_cycles(zones, known), *_level_passes(zones, known),
             *_node_findings(source), *_duplicate_nodes(zones), * \
                             _multiple_parents(zones, known), *_multiple_roots(source, known),
             *(TopologyFinding("note" if note in _APPROXIMATION_NOTES else "warning", note) for note in source.notes),
             *_compare_with_cluster(zones, cluster_nodes), *_link_speed_findings(zones)]
    if not any(finding.severity == "error" for finding in found):
        try:
            source.to_topology()
        except InputError as error:
            found.append(finding_from_error(error))
        else:
            found += _irregular_shape(zones, known)
    return found


def finding_from_error(error: InputError) -> TopologyFinding:
    """What a reader refused."""
    return TopologyFinding("error", str(error), error.line or 0)


def sort_findings(findings: Iterable[TopologyFinding]) -> list[TopologyFinding]:
    """Errors first, then warnings, then notes; each by their lines."""
    return sorted(findings, key=lambda finding: (get_args(Severity).index(finding.severity), finding.line))


def _finding_at(severity: Severity, zone: ZoneDecl, message: str) -> TopologyFinding:
    return TopologyFinding(severity, str(zone.error(message)) if zone.file else message, zone.line or 0)


def _bad_names(zones: Sequence[ZoneDecl]) -> Iterator[TopologyFinding]:
    first: dict[str, ZoneDecl] = {}
    for zone in zones:
        if zone.name in first:
            at = f" (first in line {first[zone.name].line})" if first[zone.name].line else ""
            yield _finding_at("error", zone, f"zone {zone.name!r} is declared twice{at}; each name may stand once")
        first.setdefault(zone.name, zone)
        if len(zone.name) > _MAX_NAME_LENGTH:
            yield _finding_at("error", zone, f"the name has {len(zone.name)} characters; valid are at most {_MAX_NAME_LENGTH} "
                                     "(Slurm 24.11 and newer)")


def _undeclared_children(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    for zone in zones:
        missing = [child for child in dict.fromkeys(zone.children) if child not in known]
        if missing:
            yield _finding_at("error", zone, f"{_format_names(missing)} below {zone.name!r} {'are' if len(missing) > 1 else 'is'} "
                                     "not declared")
        if zone.name in zone.children:
            yield _finding_at("error", zone, f"zone {zone.name!r} lies below itself")


def _cycles(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
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
        yield _finding_at("error", zone, f"{_format_names(left)} lie above each other; the zones must be a forest")


def _level_passes(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    """Slurm goes through the lines until each switch has its level; a deep tree with its roots first takes long."""
    open_zones = [zone for zone in zones if zone.children]
    solved = {zone.name for zone in zones if not zone.children}
    for _ in range(_MAX_PASSES):
        before = len(open_zones)
        still: list[ZoneDecl] = []
        for zone in open_zones:
            if all(child in solved or child not in known for child in zone.children):
                solved.add(zone.name)
            else:
                still.append(zone)
        open_zones = still
        if not open_zones or len(open_zones) == before:
            return
    yield _finding_at("error", open_zones[0], f"Slurm does not find the level of {open_zones[0].name!r} in {_MAX_PASSES} "
                                      "passes over the file; declare switches after those below them")


def _node_findings(source: TopologySource) -> Iterator[TopologyFinding]:
    if not any(zone.nodes for zone in source.zones) and source.zones:
        yield TopologyFinding("error", f"{source.source}: no zone has a node, which Slurm before 25.05 refuses")
    for zone in source.zones:
        if source.kind == "ring" and len(set(zone.nodes)) > _MAX_RING_NODES:
            yield _finding_at("error", zone, f"a ring has at most {_MAX_RING_NODES} nodes, this one has {len(set(zone.nodes))}")


def _duplicate_nodes(zones: Sequence[ZoneDecl]) -> Iterator[TopologyFinding]:
    first: dict[str, ZoneDecl] = {}
    for zone in zones:
        doubled: dict[str, list[str]] = {}
        for node in zone.nodes:
            other = first.setdefault(node, zone)
            if other is not zone:
                doubled.setdefault(other.name, []).append(node)
        for name, nodes in doubled.items():
            yield _finding_at("warning", zone, f"{_format_names(nodes)}: in zone {name!r}, too, for which slurmdl counts them alone")


def _multiple_parents(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    first: dict[str, ZoneDecl] = {}
    for zone in zones:
        for child in dict.fromkeys(zone.children):
            other = first.setdefault(child, zone)
            if child in known and other is not zone:
                yield _finding_at("warning", zone, f"zone {child!r} lies below {other.name!r}, too, for which slurmdl "
                                           "counts it alone")


def _multiple_roots(source: TopologySource, known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    """Jobs cannot span two trees. Blocks and rings are no trees: each stands alone."""
    if source.kind != "tree":
        return
    below = {child for zone in source.zones for child in zone.children}
    roots = [name for name in known if name not in below]
    if len(roots) > 1:
        yield TopologyFinding("warning", f"{source.source}: no switch reaches all nodes; {_format_names(roots)} have none above "
                                 "them, and no job can span them")


def _compare_with_cluster(zones: Sequence[ZoneDecl], cluster_nodes: Sequence[str]
                          | None) -> Iterator[TopologyFinding]:
    if cluster_nodes is None:
        return
    nodes, inside = set(cluster_nodes), {node for zone in zones for node in zone.nodes}
    strange = [(zone, names) for zone in zones
               if (names := [node for node in dict.fromkeys(zone.nodes) if node not in nodes])]
    for zone, names in strange[:_MAX_UNKNOWN_NODE_FINDINGS]:
        yield _finding_at("warning", zone, f"{_format_names(names)}: unknown to the cluster")
    more = [name for _, names in strange[_MAX_UNKNOWN_NODE_FINDINGS:] for name in names]
    if more:
        yield TopologyFinding("warning", f"{pluralize(len(more), 'node')} of further zones unknown to the cluster: {_format_names(more)}")
    alone = [node for node in cluster_nodes if node not in inside]
    if alone:
        yield TopologyFinding("warning", f"{pluralize(len(alone), 'node')} of the cluster without a zone: {_format_names(alone)}")


def _irregular_shape(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    leaves = [zone for zone in zones if zone.nodes]
    single = [zone.name for zone in leaves if len(set(zone.nodes)) == 1]
    if single:
        yield TopologyFinding("note", f"{_format_names(single)}: one node only")
    if leaves:
        middle = median(len(zone.nodes) for zone in leaves)
        uneven = [
    zone.name for zone in leaves if not middle /
    _MAX_SIZE_FACTOR <= len(
        zone.nodes) <= middle *
         _MAX_SIZE_FACTOR]
        if uneven:
            yield TopologyFinding("note", f"{_format_names(uneven)}: sizes far from those of the others, of which half have up to "
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
                yield TopologyFinding("note", f"{_format_names(names)}: {pluralize(depth, 'level')} below the root, most leaves {usual}")


def _link_speed_findings(zones: Sequence[ZoneDecl]) -> Iterator[TopologyFinding]:
    used = [zone for zone in zones if not math.isnan(zone.uplink_bandwidth)]
    if used:
        yield _finding_at("note", used[0], f"LinkSpeed of {pluralize(len(used), 'zone')} is ignored by Slurm; slurmdl takes it "
                                   "for Mbit/s of the uplink")
    unused = [zone for zone in zones if zone.has_link_speed and math.isnan(zone.uplink_bandwidth)]
    if unused:
        yield _finding_at("warning", unused[0], unused_link_speeds_note(unused))


def _format_names(names: Iterable[str]) -> str:
    return truncate(fold_hostlist(names), _MAX_NAMES_WIDTH)
