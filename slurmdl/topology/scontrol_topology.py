"""Zones as `scontrol show topology` (all versions) and `show topoconf` (25.05 and newer) print them.

The output of the running cluster must be complete; in saved text a line that is not understood is skipped.
"""

from __future__ import annotations

import re
from dataclasses import replace

from slurmdl.errors import InputError, OnError, raise_error
from slurmdl.slurm import hostlist
from slurmdl.slurm.output import SlurmOutput
from slurmdl.text import pluralize, truncate
from slurmdl.topology.source import TREE_APPROXIMATION_NOTE, ZoneDecl, ZoneDeclarations, build_topologies
from slurmdl.topology.topology import MAX_LEVELS, TopologySet

_PAIR = re.compile(r"(\w+)=(\S*)")
_KINDS = {"SwitchName": "tree", "BlockName": "block", "RingName": "ring", "TorusName": "torus3d"}
#: lines of `show topology`; those of topology.conf have neither these keys nor `Level=` in second place
SHOWN_ZONE = re.compile(r"^[ \t]*(?:SwitchName=\S+ +Level=\d|BlockName=\S+ +BlockIndex=|AggregatedBlock=\S"
                        r"|RingName=\S.* RingSize=|TorusName=\S)", re.MULTILINE)
_MAX_NAMES_WIDTH = 60
_MAX_REPEATED_NAMES = 4 * hostlist.MAX_NAMES  # nodes of higher zones repeat those of leaves, once per level
_LEVEL = re.compile(r"0*[1-9]\d*")


def read_topologies(output: SlurmOutput, on_error: OnError = raise_error) -> TopologySet:
    """Return the canonical form of `parse_declarations`; raise as `ZoneDeclarations.to_topology`, too."""
    return build_topologies(*parse_declarations(output, on_error))


def parse_declarations(output: SlurmOutput, on_error: OnError = raise_error) -> tuple[list[ZoneDeclarations], str]:
    """Return the topologies in the output of `show topoconf`, else `show topology`, and the name of the default.

    A malformed line is skipped if `on_error` returns. Raises InputError if no zone is left.
    """
    if output.yaml:
        from slurmdl.topology import topology_yaml  # imports PyYAML

        try:
            sources, default = topology_yaml.parse_topology_yaml(
                output.yaml, output.file or "scontrol show topoconf", on_error)
            if sources:
                return sources, default
        except InputError as error:
            if not any(output.records[key] for key in _KINDS):
                raise
            on_error(error)
    source = _parse_shown_topology(output, on_error)
    return [source], source.name


def _parse_shown_topology(output: SlurmOutput, on_error: OnError) -> ZoneDeclarations:
    """Return the topology in the output of `show topology`.

    A switch above the leaves has both Switches and Nodes here; its Nodes repeat those of its leaves. Aggregates of
    blocks follow from the blocks and their sizes.
    """
    file = output.file or "scontrol show topology"
    declared: dict[str, dict[str, ZoneDecl]] = {kind: {} for kind in _KINDS.values()}
    sizes: dict[int, None] = {}
    names_left, repeated_left = hostlist.MAX_NAMES, _MAX_REPEATED_NAMES
    for index, text in (record for key in (*_KINDS, "AggregatedBlock") for record in output.records[key]):
        pairs = {key: "" if value == "(null)" else value for key, value in _PAIR.findall(text)}
        size = _parse_number(pairs.get("BlockSize", ""))
        if size is not None and (pairs.get("BlockName") or "AggregatedBlock" in pairs):
            sizes[size] = None
        kind = next((kind for key, kind in _KINDS.items() if pairs.get(key)), None)
        if kind is None or "PlacementDims" in pairs:
            continue
        try:
            max_names = min(repeated_left, hostlist.MAX_NAMES) if pairs.get("Switches") else names_left
            zone = _parse_zone(pairs, max_names, file, output.line_number(index), text)
            known = declared[kind].get(zone.name)
            if known and (known.children, known.nodes) != (zone.children, zone.nodes):
                raise InputError(f"zone {zone.name!r} is also in line {known.line}, with other content")
            if kind == "tree" and not zone.children and _LEVEL.fullmatch(pairs.get("Level", "")):
                raise InputError(f"Level={pairs['Level']} without Switches, as if it were cut off")
        except InputError as error:
            on_error(InputError(str(error), file, output.line_number(index), text))
            continue
        if known:
            continue
        if zone.children:
            repeated_left -= len(zone.nodes) + len(zone.children)
        else:
            names_left -= 1 + len(zone.nodes)
        declared[kind][zone.name] = zone
    for kind, by_name in declared.items():
        zones = _drop_undeclared_children(by_name, on_error)
        if zones:
            notes = [TREE_APPROXIMATION_NOTE.format(kind.removesuffix("3d"))] * (kind in ("ring", "torus3d"))
            notes += filter(None, [_nodes_without_leaf_note(zones)])
            zones = [replace(zone, nodes=()) if zone.children else zone for zone in zones]  # those of its leaves
            return ZoneDeclarations(tuple(zones), kind, file, notes=tuple(notes), block_sizes=tuple(sizes),
                                    shown=True)
    raise InputError("has no zone; " + ("expected the text of `scontrol show topology`, e.g. SwitchName=s1 Level=0 "
                                        "LinkSpeed=1 Nodes=n[1-4]" if output.file else
                                        "TopologyPlugin may be topology/flat or unset"), file)


def _parse_zone(pairs: dict[str, str], max_names: int, file: str, line: int, text: str) -> ZoneDecl:
    name = next(pairs[key] for key in _KINDS if pairs.get(key))
    children, nodes = (hostlist.expand_hostlist(pairs.get(key) or pairs.get(key.lower()) or "", max_names)
                       for key in ("Switches", "Nodes"))
    return ZoneDecl(name, tuple(children), tuple(nodes), _parse_number(pairs.get("LinkSpeed", "")), file, line, text)


def _parse_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None


def _drop_undeclared_children(declared: dict[str, ZoneDecl], on_error: OnError) -> list[ZoneDecl]:
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
            on_error(zone.error(f"{pluralize(len(missing), 'zone')} below {name!r} not declared ({missing[0]!r}"
                                f"{', ...' if len(missing) > 1 else ''})"))
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
