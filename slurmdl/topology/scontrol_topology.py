"""Reader of `scontrol show topology` (all versions) and `scontrol show topoconf` (25.05 and newer)."""

from __future__ import annotations

import re

from slurmdl.errors import InputError
from slurmdl.slurm import hostlist
from slurmdl.topology.source import ZoneDecl, aggregate_blocks, build_topology, level_multiples
from slurmdl.topology.topology import Topology, TopologySet

SOURCE_LABEL = "scontrol show topology"

_PAIR = re.compile(r"(\w+)=(\S*)")
_KINDS = {"SwitchName": "tree", "BlockName": "block", "RingName": "ring", "TorusName": "torus3d"}
#: the YAML of `show topoconf` ends before the next output or prompt
_YAML_BEGIN = re.compile(r"""(-\s+)?["']?topology["']?\s*:""")
#: with a topology.conf, 26.05 shows one topology in which all kinds are empty
_YAML_EMPTY = re.compile(r"-?\s*(topology|cluster_default):|\s*\w+: \{\}$")
_YAML_END = re.compile(r"scontrol:|\w+\s*=|\.\.\.|[a-zA-Z ]+\.?$")


def parse_scontrol_topologies(text: str) -> TopologySet:
    """Parse the output of `show topoconf`, `show topology` or both; InputError if it is malformed or has no zone."""
    lines = text.split("\n")
    begin = next((i for i, line in enumerate(lines) if _YAML_BEGIN.match(line)), len(lines))
    end = next((i for i in range(begin, len(lines)) if _YAML_END.match(lines[i])), len(lines))
    if all(_YAML_EMPTY.match(line) for line in lines[begin:end]):
        return TopologySet.single(parse_show_topology(text))
    from slurmdl.topology import topology_yaml

    return topology_yaml.parse_topology_yaml("\n".join(lines[begin:end]), "scontrol show topoconf")


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
        key = next((key for key in _KINDS if pairs.get(key)), None)
        size = _parse_number(pairs.get("BlockSize", ""))
        if (key == "BlockName" or "AggregatedBlock" in pairs) and size is not None:
            sizes[size] = None
        if key is None or "PlacementDims" in pairs:
            continue
        children, nodes = (hostlist.expand_hostlist(pairs.get(name) or pairs.get(name.lower()) or "", names_left)
                           for name in ("Switches", "Nodes"))
        if not children:
            names_left -= 1 + len(nodes)  # the nodes of higher zones repeat these
        zones_by_kind[_KINDS[key]].append(ZoneDecl(pairs[key], tuple(children), tuple(nodes),
                                           _parse_number(pairs.get("LinkSpeed", "")), SOURCE_LABEL, number, line))
    kind = next((kind for kind, zones in zones_by_kind.items() if zones), None)
    if kind is None:
        raise InputError(f"{SOURCE_LABEL}: no zone; TopologyPlugin may be topology/flat or unset")
    zones = zones_by_kind[kind]
    if kind == "block":
        try:
            # no listed aggregate means none: one block only, or one size
            zones = [*zones, *aggregate_blocks(zones, level_multiples([*sizes]) if sizes else ())]
        except ValueError as error:
            raise InputError(f"{SOURCE_LABEL}: {error}") from error
    return build_topology(zones, kind=kind, source=SOURCE_LABEL, block_sizes=tuple(sizes))


def _parse_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None
