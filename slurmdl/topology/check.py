"""Faults and oddities in declared zones, and differences between two topologies.

The checks are those of slurmctld at its start, and further ones.

Slurm's own messages are in src/plugins/topology/ (tree/switch_record.c, block/block_record.c) of 22.05 to 26.05;
if releases differ, the text names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar, get_args

import numpy as np

from slurmdl.errors import InputError
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize, truncate
from slurmdl.topology.source import TREE_APPROXIMATION_NOTE, ZoneDecl, ZoneDeclarations, unused_link_speeds_note
from slurmdl.topology.topology import Topology, TopologySet

_MAX_PASSES = 21  # in which Slurm must find the level of each switch; after them it ends with "not a tree"
_MAX_NAME_LENGTH = 64  # of a switch since Slurm 24.11 (HOST_NAME_MAX)
_MAX_RING_NODES = 16  # topology.yaml(5)
_MAX_SIZE_FACTOR = 2  # a leaf is irregular if its size differs from the median by more than this factor
_MAX_NAMES_WIDTH = 60
_MAX_UNKNOWN_NODE_FINDINGS = 20
_APPROXIMATION_NOTES = [TREE_APPROXIMATION_NOTE.format(kind) for kind in ("ring", "torus")]

Value = TypeVar("Value")
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class TopologyFinding:
    """One line of the report: location and problem. `line` is 0 if the finding concerns the whole file.

    It is an "error" if slurmctld of some release ends, a "warning" if it warns or jobs may wait or be misplaced, a
    "note" for oddities.
    """

    severity: Severity
    text: str
    line: int = 0


def check_declarations(source: ZoneDeclarations, cluster_nodes: Sequence[str] | None = None) -> list[TopologyFinding]:
    """Return all findings on one topology; `cluster_nodes` are the cluster's node names, None if unknown."""
    zones, known = source.zones, {zone.name: zone for zone in reversed(source.zones)}
    findings = [*_bad_names(zones, known), *_undeclared_children(zones, known), *_cycles(zones, known),
                *_level_passes(zones, known), *_node_findings(source), *_duplicate_nodes(zones),
                *_multiple_parents(zones, known), *_multiple_roots(source, known),
                *(TopologyFinding("note" if note in _APPROXIMATION_NOTES else "warning", note)
                  for note in source.notes),
                *_compare_with_cluster(zones, cluster_nodes), *_link_speed_findings(zones)]
    if not any(finding.severity == "error" for finding in findings):
        try:
            source.to_topology()
        except InputError as error:
            findings.append(finding_from_error(error))
        else:
            findings += _irregular_shape(zones)
    return findings


def finding_from_error(error: InputError) -> TopologyFinding:
    return TopologyFinding("error", str(error), error.line or 0)


def sort_findings(findings: Iterable[TopologyFinding]) -> list[TopologyFinding]:
    """Sort by severity, errors first, then by line."""
    return sorted(findings, key=lambda finding: (get_args(Severity).index(finding.severity), finding.line))


def _finding(severity: Severity, zone: ZoneDecl, message: str) -> TopologyFinding:
    return TopologyFinding(severity, str(zone.error(message)) if zone.file else message, zone.line or 0)


def _bad_names(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    for zone in zones:
        first = known[zone.name]
        if first is not zone:
            location = f" (first in line {first.line})" if first.line else ""
            yield _finding("error", zone, f"zone {zone.name!r} is declared twice{location}; expected unique names")
        if len(zone.name) > _MAX_NAME_LENGTH:
            yield _finding("error", zone, f"name of {len(zone.name)} characters; expected at most "
                                          f"{_MAX_NAME_LENGTH} (Slurm 24.11 and newer)")


def _undeclared_children(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    for zone in zones:
        missing = [child for child in dict.fromkeys(zone.children) if child not in known]
        if missing:
            verb = "are" if len(missing) > 1 else "is"
            yield _finding("error", zone, f"{_format_names(missing)} below {zone.name!r} {verb} not declared")
        if zone.name in zone.children:
            yield _finding("error", zone, f"zone {zone.name!r} is below itself")


def _cycles(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    """Find zones above each other: remove leaves repeatedly, then roots; the remaining zones are on cycles."""
    remaining = {zone.name: {child for child in zone.children if child in known} - {zone.name} for zone in zones}
    for _ in range(2):
        parents: dict[str, set[str]] = {name: set() for name in remaining}
        for name, children in remaining.items():
            for child in children & remaining.keys():
                parents[child].add(name)
        child_counts = {name: len(children & remaining.keys()) for name, children in remaining.items()}
        ready = [name for name, count in child_counts.items() if not count]
        while ready:
            for parent in parents[ready.pop()]:
                child_counts[parent] -= 1
                if not child_counts[parent]:
                    ready.append(parent)
        # the second pass sees the edges reversed
        remaining = {name: parents[name] & child_counts.keys() for name, count in child_counts.items() if count}
    if remaining:
        zone = next(zone for zone in zones if zone.name in remaining)
        yield _finding("error", zone, f"{_format_names(remaining)} form a cycle; expected a forest of zones")


def _level_passes(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    """Repeat Slurm's passes over the lines until each switch has its level; roots first in the file need many."""
    pending = [zone for zone in zones if zone.children]
    resolved = {zone.name for zone in zones if not zone.children}
    for _ in range(_MAX_PASSES):
        unresolved: list[ZoneDecl] = []
        for zone in pending:
            if all(child in resolved or child not in known for child in zone.children):
                resolved.add(zone.name)
            else:
                unresolved.append(zone)
        if not unresolved or len(unresolved) == len(pending):
            return
        pending = unresolved
    yield _finding("error", pending[0], f"Slurm does not find the level of {pending[0].name!r} in {_MAX_PASSES} "
                                        "passes over the file; declare switches after their child switches")


def _node_findings(source: ZoneDeclarations) -> Iterator[TopologyFinding]:
    if source.zones and not any(zone.nodes for zone in source.zones):
        yield TopologyFinding("error", f"{source.source}: no zone has a node; Slurm before 25.05 rejects it")
    for zone in source.zones:
        if source.kind == "ring" and len(set(zone.nodes)) > _MAX_RING_NODES:
            yield _finding("error", zone, f"ring of {len(set(zone.nodes))} nodes; expected at most {_MAX_RING_NODES}")


def _duplicate_nodes(zones: Sequence[ZoneDecl]) -> Iterator[TopologyFinding]:
    first: dict[str, ZoneDecl] = {}
    for zone in zones:
        duplicates: dict[str, list[str]] = {}
        for node in zone.nodes:
            first_zone = first.setdefault(node, zone)
            if first_zone is not zone:
                duplicates.setdefault(first_zone.name, []).append(node)
        for name, nodes in duplicates.items():
            yield _finding("warning", zone, f"{_format_names(nodes)}: also in zone {name!r}, the only one used")


def _multiple_parents(zones: Sequence[ZoneDecl], known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    first: dict[str, ZoneDecl] = {}
    for zone in zones:
        for child in dict.fromkeys(zone.children):
            first_parent = first.setdefault(child, zone)
            if child in known and first_parent is not zone:
                yield _finding("warning", zone, f"zone {child!r}: also below {first_parent.name!r}, the only "
                                                "parent used")


def _multiple_roots(source: ZoneDeclarations, known: dict[str, ZoneDecl]) -> Iterator[TopologyFinding]:
    """Find disjoint trees, which no job can span. Blocks and rings need no common root."""
    if source.kind != "tree":
        return
    children = {child for zone in source.zones for child in zone.children}
    roots = [name for name in known if name not in children]
    if len(roots) > 1:
        yield TopologyFinding("warning", f"{source.source}: no switch reaches all nodes; no job can span the roots "
                                         f"{_format_names(roots)}")


def _compare_with_cluster(zones: Sequence[ZoneDecl],
                          cluster_nodes: Sequence[str] | None) -> Iterator[TopologyFinding]:
    if cluster_nodes is None:
        return
    known, in_zones = set(cluster_nodes), {node for zone in zones for node in zone.nodes}
    unknown = [(zone, names) for zone in zones
               if (names := [node for node in dict.fromkeys(zone.nodes) if node not in known])]
    for zone, names in unknown[:_MAX_UNKNOWN_NODE_FINDINGS]:
        yield _finding("warning", zone, f"{_format_names(names)}: unknown to the cluster")
    further = [name for _, names in unknown[_MAX_UNKNOWN_NODE_FINDINGS:] for name in names]
    if further:
        yield TopologyFinding("warning", f"{_format_names(further)}: {pluralize(len(further), 'node')} of further "
                                         "zones, unknown to the cluster")
    zoneless = [node for node in cluster_nodes if node not in in_zones]
    if zoneless:
        yield TopologyFinding("warning", f"{pluralize(len(zoneless), 'node')} of the cluster without a zone: "
                                         f"{_format_names(zoneless)}")


def _irregular_shape(zones: Sequence[ZoneDecl]) -> Iterator[TopologyFinding]:
    leaves = [zone for zone in zones if zone.nodes]
    single = [zone.name for zone in leaves if len(set(zone.nodes)) == 1]
    if single:
        yield TopologyFinding("note", f"{_format_names(single)}: one node only")
    if leaves:
        median_size = median(len(zone.nodes) for zone in leaves)
        uneven = [zone.name for zone in leaves
                  if not median_size / _MAX_SIZE_FACTOR <= len(zone.nodes) <= median_size * _MAX_SIZE_FACTOR]
        if uneven:
            yield TopologyFinding("note", f"{_format_names(uneven)}: size far from the median, {median_size:g} "
                                          f"node{'s' * (median_size != 1)}")
    parent = {child: zone.name for zone in reversed(zones) for child in zone.children}
    leaves_by_depth: dict[int, list[str]] = {}
    for zone in leaves:
        depth, name = 0, zone.name
        while name in parent:
            depth, name = depth + 1, parent[name]
        leaves_by_depth.setdefault(depth, []).append(zone.name)
    if len(leaves_by_depth) > 1:
        common = max(leaves_by_depth, key=lambda depth: len(leaves_by_depth[depth]))
        for depth, names in sorted(leaves_by_depth.items()):
            if depth != common:
                yield TopologyFinding("note", f"{_format_names(names)}: {pluralize(depth, 'level')} below the root, "
                                              f"most leaves {common}")


def _link_speed_findings(zones: Sequence[ZoneDecl]) -> Iterator[TopologyFinding]:
    used = [zone for zone in zones if not math.isnan(zone.uplink_bandwidth)]
    if used:
        yield _finding("note", used[0], f"LinkSpeed of {pluralize(len(used), 'zone')}: ignored by Slurm, used by "
                                        "slurmdl as Mbit/s of the uplink")
    unused = [zone for zone in zones if zone.has_unused_link_speed]
    if unused:
        yield _finding("warning", unused[0], unused_link_speeds_note(unused))


def _format_names(names: Iterable[str]) -> str:
    return truncate(fold_hostlist(names), _MAX_NAMES_WIDTH)


def diff_sets(left: TopologySet, right: TopologySet, labels: tuple[str, str], name: str | None = None) -> list[str]:
    """Return one line per difference; `labels` name the two sides, e.g. a file name and "the controller".

    Only the topology `name` is compared if it is given. If each side has one topology, the two are compared even if
    their names differ: topology.conf has no names. Raises InputError: a side has no topology of that name.
    """
    if len(left.topologies) == len(right.topologies) == 1:
        return diff_topologies(left.get(name), right.topologies[0], labels)
    lines = [] if name else list(_only_on_one_side(left.names, right.names, "topology", labels))
    if name is None and left.default != right.default:
        lines.append(f"default topology: {left.default} in {labels[0]}, {right.default} in {labels[1]}")
    for common in [name] if name else [name for name in left.names if name in right.names]:
        lines += [f"{common}: {line}" for line in diff_topologies(left.get(common), right.get(common), labels)]
    return lines


def diff_topologies(left: Topology, right: Topology, labels: tuple[str, str]) -> list[str]:
    """Return one line per difference; equal changes share a line.

    The order of names is ignored, except for blocks: Slurm aggregates neighbors. LinkSpeed is compared if both sides
    give it.
    """
    return [*_diff_kinds(left, right, labels), *_diff_zones(left, right, labels), *_diff_nodes(left, right, labels)]


def _diff_kinds(left: Topology, right: Topology, labels: tuple[str, str]) -> Iterator[str]:
    if left.kind != right.kind:
        yield f"kind: {left.kind} in {labels[0]}, {right.kind} in {labels[1]}"
    elif left.kind == "block":
        left_blocks, right_blocks = ([zone for zone, level in zip(side.zones, side.level.tolist(), strict=True)
                                      if not level] for side in (left, right))
        if left_blocks != right_blocks and sorted(left_blocks) == sorted(right_blocks):
            number, a, b = next((i, a, b) for i, (a, b) in enumerate(zip(left_blocks, right_blocks, strict=True), 1)
                                if a != b)
            yield f"order of blocks: number {number} is {a} in {labels[0]}, {b} in {labels[1]}"


def _diff_zones(left: Topology, right: Topology, labels: tuple[str, str]) -> Iterator[str]:
    yield from _only_on_one_side(left.zones, right.zones, "zone", labels)
    common = [(i, right.zone_index[zone]) for i, zone in enumerate(left.zones) if zone in right.zone_index]
    yield from _format_changes("zone", "below {}".format, labels, (
        (left.zones[i], _zone_name(left, left.parent[i]), _zone_name(right, right.parent[j])) for i, j in common))
    yield from _format_changes("zone", lambda speed: f"{speed * 8e-9:g} Gbit/s", labels, (
        (left.zones[i], left.uplink_bandwidth[i], right.uplink_bandwidth[j]) for i, j in common
        if not np.isnan(left.uplink_bandwidth[i] + right.uplink_bandwidth[j])))


def _diff_nodes(left: Topology, right: Topology, labels: tuple[str, str]) -> Iterator[str]:
    yield from _only_on_one_side(left.nodes, right.nodes, "node", labels)
    yield from _format_changes("node", "in {}".format, labels, (
        (node, _zone_name(left, leaf), _zone_name(right, right.leaf[right.node_index[node]]))
        for node, leaf in zip(left.nodes, left.leaf.tolist(), strict=True) if node in right.node_index))


def _format_changes(noun: str, format_value: Callable[[Value], str], labels: tuple[str, str],
                    values: Iterable[tuple[str, Value, Value]]) -> Iterator[str]:
    """Yield a line for each distinct change among the entries (name, left value, right value)."""
    changes: dict[tuple[Value, Value], list[str]] = {}
    for name, left, right in values:
        if left != right:
            changes.setdefault((left, right), []).append(name)
    for (left, right), names in changes.items():
        yield (f"{_format_counted_names(names, noun)}: {format_value(left)} in {labels[0]}, "
               f"{format_value(right)} in {labels[1]}")


def _only_on_one_side(left: Sequence[str], right: Sequence[str], noun: str, labels: tuple[str, str]) -> Iterator[str]:
    for names, other_names, side in ((left, set(right), labels[0]), (right, set(left), labels[1])):
        unmatched = [name for name in names if name not in other_names]
        if unmatched:
            yield f"{_format_counted_names(unmatched, noun)}: only in {side}"


def _zone_name(topology: Topology, zone: int) -> str:
    return topology.zones[zone] if zone >= 0 else "no zone"


def _format_counted_names(names: Sequence[str], noun: str) -> str:
    plural = noun if len(names) == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{plural} {truncate(fold_hostlist(names), _MAX_NAMES_WIDTH)}" + \
        (f" ({len(names):,})" if len(names) > 1 else "")
