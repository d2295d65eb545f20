"""Zones in saved text of `scontrol show topology` and `show topoconf`, which may hold other output of Slurm, too.

A line that is not understood is a warning here; output of the running cluster (`scontrol_topology`) must be complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from slurmdl.errors import InputError
from slurmdl.slurm import hostlist
from slurmdl.slurm.saved_output import LineProblems, SavedOutput, split_saved_output
from slurmdl.text import pluralize, truncate
from slurmdl.topology import scontrol_topology
from slurmdl.topology.source import TREE_APPROXIMATION_NOTE, TopologySource, ZoneDecl
from slurmdl.topology.topology import MAX_LEVELS, TopologySet

#: lines of `show topology`; those of topology.conf have neither these keys nor `Level=` in second place
_SHOWN_ZONE = re.compile(r"^[ \t]*(?:SwitchName=\S+ +Level=\d|BlockName=\S+ +BlockIndex=|AggregatedBlock=\S"
                         r"|RingName=\S.* RingSize=|TorusName=\S)", re.MULTILINE)
_MAX_NAMES_WIDTH = 60
_MAX_REPEATED_NAMES = 4 * hostlist.MAX_NAMES  # nodes of higher zones repeat those of leaves, once per level
_LEVEL = re.compile(r"0*[1-9]\d*")


def has_shown_topology(text: str) -> bool:
    """Return whether a text has a line of `scontrol show topology`."""
    return _SHOWN_ZONE.search(text) is not None


@dataclass(frozen=True)
class _Zones:
    """The zones of `show topology`; `sizes`: BlockSizes in their order."""

    zones: list[ZoneDecl]
    kind: str
    sizes: tuple[int, ...]
    notes: tuple[str, ...]


def parse_saved_topologies(text: str, file: str, on_warning: Callable[[str], None]) -> TopologySet:
    """Return the topologies in a saved text.

    `on_warning` gets each line that is not understood (at most a few). Raises InputError if no zone is left, a zone
    is above itself, or the sizes of blocks are invalid.
    """
    output, problems = split_saved_output(text), LineProblems(file)
    declared = _declare_topoconf(output, file, problems)
    if declared:
        sources, default = declared
        topologies = TopologySet(tuple(source.to_topology() for source in sources), default)
    else:
        shown = _read_zones(output, file, problems)
        topologies = TopologySet.single(scontrol_topology.build_shown_topology(
            shown.zones, shown.kind, shown.sizes, file, shown.notes))
    _report(output, problems, on_warning)
    return topologies


def declare_saved_topologies(text: str, file: str, on_warning: Callable[[str], None]) -> list[TopologySource]:
    """Like `parse_saved_topologies`, but return the declarations."""
    output, problems = split_saved_output(text), LineProblems(file)
    declared = _declare_topoconf(output, file, problems)
    if declared:
        sources = declared[0]
    else:
        shown = _read_zones(output, file, problems)
        smallest = min((len(zone.nodes) for zone in shown.zones if zone.nodes), default=0)
        sizes = (shown.sizes or (smallest,)) if shown.kind == "block" else ()
        sources = [TopologySource(tuple(shown.zones), shown.kind, file, notes=shown.notes, block_sizes=sizes)]
    _report(output, problems, on_warning)
    return sources


def _report(output: SavedOutput, problems: LineProblems, on_warning: Callable[[str], None]) -> None:
    for index, line in output.unknown:
        problems.add(output.line_number(index), line, "not understood")
    problems.report(on_warning)


def _declare_topoconf(output: SavedOutput, file: str,
                      problems: LineProblems) -> tuple[list[TopologySource], str] | None:
    """Return the topologies in the YAML of `show topoconf` and the default's name; None if there is none."""
    if scontrol_topology.is_empty_topoconf([line for line in output.yaml.split("\n") if line]):
        return None
    from slurmdl.topology import topology_yaml

    try:
        sources, default = topology_yaml.declare_topology_yaml(
            output.yaml, file, lambda error: problems.add(error.line or 0, error.text or "", _message(error)))
    except InputError as error:
        if not any(output.records[key] for key in ("SwitchName", "BlockName", "RingName", "TorusName")):
            raise
        problems.add(error.line or 0, error.text or "", f"`show topoconf` is not used: {_message(error)}")
        return None
    return (sources, default) if sources else None


def _message(error: InputError) -> str:
    """Return the text of an error without its location."""
    return str(error).rpartition("': ")[2] if error.text is not None else str(error).partition(": ")[2]


def _read_zones(output: SavedOutput, file: str, problems: LineProblems) -> _Zones:
    """Read the lines of `show topology`; InputError if no zone is left."""
    declared: dict[str, dict[str, ZoneDecl]] = {}
    sizes: dict[int, None] = {}
    names_left, repeated_left = hostlist.MAX_NAMES, _MAX_REPEATED_NAMES
    for key in ("SwitchName", "BlockName", "RingName", "TorusName", "AggregatedBlock"):
        for index, text in zip(output.record_lines[key], output.records[key], strict=True):
            line = output.line_number(index)
            pairs = {key: "" if value == "(null)" else value
                     for key, value in scontrol_topology.record_pairs(text).items()}
            size = scontrol_topology.block_size(pairs)
            if size is not None:
                sizes[size] = None
            kind = scontrol_topology.zone_kind(pairs)
            if kind is None:
                continue
            try:
                max_names = min(repeated_left, hostlist.MAX_NAMES) if pairs.get("Switches") else names_left
                zone = scontrol_topology.parse_zone(pairs, max_names, file, line, text)
            except InputError as error:
                problems.add(line, text, str(error))
                continue
            known = declared.setdefault(kind, {}).get(zone.name)
            if known:
                if (known.children, known.nodes) != (zone.children, zone.nodes):
                    problems.add(line, text, f"zone {zone.name!r} is also in line {known.line}, with other content")
                continue
            if kind == "tree" and not zone.children and _LEVEL.fullmatch(pairs.get("Level", "")):
                problems.add(line, text, f"Level={pairs['Level']} without Switches, as if it were cut off")
                continue
            if zone.children:
                repeated_left -= len(zone.nodes) + len(zone.children)
            else:
                names_left -= 1 + len(zone.nodes)
            declared[kind][zone.name] = zone
    for kind in ("tree", "block", "ring", "torus3d"):
        zones = _drop_undeclared_children(declared.get(kind, {}), problems)
        if zones:
            notes = tuple(filter(None, [_nodes_without_leaf_note(zones)]))
            zones = [replace(zone, nodes=()) if zone.children else zone for zone in zones]  # those of its leaves
            if kind in ("ring", "torus3d"):
                notes = (TREE_APPROXIMATION_NOTE.format("ring" if kind == "ring" else "torus"), *notes)
            return _Zones(zones, kind, tuple(sizes), notes)
    raise InputError("has no zone; expected the text of `scontrol show topology`, e.g. SwitchName=s1 Level=0 "
                     "LinkSpeed=1 Nodes=n[1-4]", file=file)


def _drop_undeclared_children(declared: dict[str, ZoneDecl], problems: LineProblems) -> list[ZoneDecl]:
    """Return the zones without children that are not in the text, and without zones that have no other children."""
    zones = dict(declared)
    for _ in range(MAX_LEVELS):
        lacking = {name: missing for name, zone in zones.items()
                   if (missing := [child for child in zone.children if child not in zones])}
        if not lacking:
            return list(zones.values())
        for name, missing in lacking.items():
            zone = zones[name]
            kept = tuple(child for child in zone.children if child in zones)
            problems.add(zone.line or 0, zone.text or "",
                         f"{pluralize(len(missing), 'zone')} below {name!r} not declared ({missing[0]!r}"
                         f"{', ...' if len(missing) > 1 else ''})")
            if kept:
                zones[name] = replace(zone, children=kept)
            else:
                del zones[name]
    zone = next(iter(zones.values()))
    raise zone.error(f"zones are above more than {MAX_LEVELS - 1} levels of zones")


def _nodes_without_leaf_note(zones: list[ZoneDecl]) -> str:
    """Describe the nodes of a root switch that are below no leaf, e.g. login nodes; "" for none."""
    on_leaves = {node for zone in zones if not zone.children for node in zone.nodes}
    children = {child for zone in zones for child in zone.children}
    lost = {node for zone in zones if zone.children and zone.name not in children for node in zone.nodes} - on_leaves
    if not lost:
        return ""
    names = truncate(hostlist.fold_hostlist(lost), _MAX_NAMES_WIDTH)
    return f"{pluralize(len(lost), 'node')} below no leaf switch, thus in no zone: {names}"
