"""Reader of `scontrol show topology` (all versions) and `scontrol show topoconf` (25.05 and newer)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurmdl.errors import InputError
from slurmdl.slurm import hostlist
from slurmdl.slurm.topoconf_text import find_topoconf
from slurmdl.topology.source import ZoneDecl, aggregate_blocks, build_topology, level_multiples
from slurmdl.topology.topology import Topology, TopologySet

SOURCE_LABEL = "scontrol show topology"

_PAIR = re.compile(r"(\w+)=(\S*)")
_KINDS = {"SwitchName": "tree", "BlockName": "block", "RingName": "ring", "TorusName": "torus3d"}
#: with a topology.conf, 26.05 shows one topology in which all kinds are empty
_YAML_EMPTY = re.compile(r"-?\s*(topology|cluster_default):|\s*\w+: \{\}$")


def parse_scontrol_topologies(text: str) -> TopologySet:
    """Parse the output of `show topoconf`, `show topology` or both; InputError if it is malformed or has no zone."""
    lines = text.split("\n")
    begin, end = find_topoconf(lines)
    if is_empty_topoconf(lines[begin:end]):
        return TopologySet.single(parse_show_topology(text))
    from slurmdl.topology import topology_yaml

    return topology_yaml.parse_topology_yaml("\n".join(lines[begin:end]), "scontrol show topoconf")


def is_empty_topoconf(lines: Sequence[str]) -> bool:
    """Return whether the YAML of `show topoconf` has no topology of its own, because there is a topology.conf."""
    return all(_YAML_EMPTY.match(line) for line in lines)


def parse_show_topology(text: str) -> Topology:
    """Return the topology in the output of `scontrol show topology`, with or without -o.

    A switch above the leaves has both Switches and Nodes here; its Nodes repeat those of its leaves. Aggregates of
    blocks follow from the blocks and their sizes. Other lines (prompts, messages) are ignored. Raises InputError if
    the text has no zone, or a child zone is missing.
    """
    zones_by_kind: dict[str, list[ZoneDecl]] = {kind: [] for kind in _KINDS.values()}
    sizes: dict[int, None] = {}
    names_left = hostlist.MAX_NAMES
    for number, line in enumerate(text.split("\n"), 1):
        pairs = dict(_PAIR.findall(line))
        size = block_size(pairs)
        if size is not None:
            sizes[size] = None
        kind = zone_kind(pairs)
        if kind is None:
            continue
        zone = parse_zone(pairs, names_left, SOURCE_LABEL, number, line)
        if not zone.children:
            names_left -= 1 + len(zone.nodes)  # the nodes of higher zones repeat these
        zones_by_kind[kind].append(zone)
    kind = next((kind for kind, zones in zones_by_kind.items() if zones), None)
    if kind is None:
        raise InputError(f"{SOURCE_LABEL}: no zone; TopologyPlugin may be topology/flat or unset")
    return build_shown_topology(zones_by_kind[kind], kind, tuple(sizes), SOURCE_LABEL)


def record_pairs(line: str) -> dict[str, str]:
    """Return the values of one line by key."""
    return dict(_PAIR.findall(line))


def block_size(pairs: dict[str, str]) -> int | None:
    """Return the BlockSize of a block or aggregate; None for other lines."""
    is_block = pairs.get("BlockName") or "AggregatedBlock" in pairs
    return _parse_number(pairs.get("BlockSize", "")) if is_block else None


def zone_kind(pairs: dict[str, str]) -> str | None:
    """Return the kind of topology that a line declares a zone of, or None if it declares none."""
    key = next((key for key in _KINDS if pairs.get(key)), None)
    return None if key is None or "PlacementDims" in pairs else _KINDS[key]


def parse_zone(pairs: dict[str, str], names_left: int, source: str, line: int, text: str) -> ZoneDecl:
    """Return the zone of a line that declares one; InputError for a malformed hostlist, or too many names."""
    name = next(pairs[key] for key in _KINDS if pairs.get(key))
    children, nodes = (hostlist.expand_hostlist(pairs.get(key) or pairs.get(key.lower()) or "", names_left)
                       for key in ("Switches", "Nodes"))
    speed = _parse_number(pairs.get("LinkSpeed", ""))
    return ZoneDecl(name, tuple(children), tuple(nodes), speed, source, line, text)


def build_shown_topology(zones: Sequence[ZoneDecl], kind: str, sizes: Sequence[int], source: str,
                         notes: tuple[str, ...] = ()) -> Topology:
    """Return the topology of the zones of `show topology`; InputError as `build_topology`, or for invalid sizes."""
    if kind == "block":
        try:
            # no listed aggregate means none: one block only, or one size
            zones = [*zones, *aggregate_blocks(zones, level_multiples(sizes) if sizes else ())]
        except ValueError as error:
            raise InputError(f"{source}: {error}") from error
    return build_topology(zones, kind=kind, source=source, notes=notes, block_sizes=tuple(sizes))


def _parse_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None
