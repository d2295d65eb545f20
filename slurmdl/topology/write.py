"""Writers of topology.conf, topology.yaml, JSON and GraphML, and what each format cannot represent.

Further, zones as node features for slurm.conf(5): a job can request a zone, and slurmdl can prefer one. A node may be
on one NodeName line only (slurmctld ends with "Duplicated NodeName"), so the existing lines are rewritten and split
by zone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from slurmdl.errors import InputError
from slurmdl.slurm.hostlist import fold_hostlist, ranged_string
from slurmdl.text import pluralize
from slurmdl.topology.source import ZoneDeclarations, to_link_speed
from slurmdl.topology.topology import Topology, TopologySet
from slurmdl.topology.topology_conf import LogicalLine, logical_lines

_NAME = re.compile(r"[^\s,\[\]{}\"'#\\=]+")  # names that both formats and hostlists can represent
_PLAIN_SCALAR = re.compile(r"[A-Za-z][A-Za-z0-9_.,\-\[\]]*")  # needs no quotes in YAML
_YAML_KEYWORDS = ("y", "yes", "t", "true", "on", "n", "no", "f", "false", "off", "null")
_SINGLE_FORMATS = {"conf": "topology.conf", "graphml": "GraphML file"}  # files of one topology
_CONF_KEYS = {"tree": "SwitchName", "block": "BlockName", "ring": "RingName"}
_YAML_KEYS = {"tree": ("switches", "switch"), "block": ("blocks", "block"), "ring": ("rings", "ring")}
_FEATURE = re.compile(r"[^\s,&|*()\[\]{}\"'#=\\]+")  # other characters have a meaning in constraints (sbatch(1))
_SLURM_CONF_PAIR = re.compile(r"""(\w+)\s*=\s*("[^"]*"|\S+)""")
_PER_NODE = ("nodeaddr", "nodehostname", "bcastaddr", "port")  # keys with one value for all nodes, or one per node


def checked_hostlist(names: Sequence[str]) -> str:
    """Return a hostlist of these names in this order, repeats included: n3,n1,n2,login -> n[3,1-2],login.

    Only trailing digits are folded: Slurm 22.05 rejects a suffix after the last bracket. Raises InputError if a name
    is not valid in a hostlist.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r}: not valid in a hostlist; blanks and , [ ] {{ }} \" ' # = \\ are invalid")
    return ranged_string(names)


def format_topology(topologies: TopologySet, name: str | None, format_name: str) -> str:
    """Return the text of a file in the format "conf", "yaml", "json" or "graphml".

    `name` selects one topology; None means all if the format holds several, else the default. Raises InputError if
    the format cannot represent the topology, or there is none of that name; UnavailableError if the format needs a
    missing package.
    """
    if format_name == "graphml":
        return format_topology_graphml(topologies.get(name))
    if format_name == "conf":
        return format_topology_conf(topologies.get(name))
    if name:
        topologies = TopologySet.single(topologies.get(name))
    return format_topology_yaml(topologies) if format_name == "yaml" else \
        json.dumps(topologies.to_json(), indent=1) + "\n"


def format_topology_conf(topology: Topology) -> str:
    """Return the text of a topology.conf; InputError if it cannot represent the kind, or a name."""
    if topology.kind not in _CONF_KEYS:
        raise InputError(f"{topology.source}: {topology.kind}: not valid in a topology.conf; expected "
                         f"{', '.join(_CONF_KEYS)}")
    lines = []
    for zone in ZoneDeclarations.from_topology(topology).zones:
        lists = [f" {key}={checked_hostlist(names)}"
                 for key, names in (("Switches", zone.children), ("Nodes", zone.nodes)) if names]
        speed = f" LinkSpeed={zone.link_speed}" if zone.link_speed is not None else ""
        lines.append(f"{_CONF_KEYS[topology.kind]}={checked_hostlist([zone.name])}{''.join(lists)}{speed}")
    if topology.block_sizes:
        lines.append(f"BlockSizes={','.join(map(str, topology.block_sizes))}")
    return "".join(f"{line}\n" for line in lines)


def format_topology_yaml(topologies: TopologySet) -> str:
    """Return the text of a topology.yaml; InputError for a torus3d, whose layout is unknown, or an invalid name."""
    lines = ["---"]
    for topology in topologies.topologies:
        lines += [f"- topology: {_yaml_scalar(topology.name)}",
                  f"  cluster_default: {'true' if topology.name == topologies.default else 'false'}"]
        if topology.kind == "flat":
            lines.append("  flat: true")
            continue
        if topology.kind not in _YAML_KEYS:
            raise InputError(f"{topology.source}: topology {topology.name!r}: the layout of a {topology.kind} is "
                             f"unknown; expected {', '.join(_YAML_KEYS)}, flat")
        items, key = _YAML_KEYS[topology.kind]
        lines.append(f"  {topology.kind}:")
        if topology.block_sizes:
            lines += ["    block_sizes:", *(f"      - {size}" for size in topology.block_sizes)]
        lines.append(f"    {items}:")
        for zone in ZoneDeclarations.from_topology(topology).zones:
            lines.append(f"      - {key}: {_yaml_scalar(checked_hostlist([zone.name]))}")
            lines += [f"        {field}: {_yaml_scalar(checked_hostlist(names))}"
                      for field, names in (("children", zone.children), ("nodes", zone.nodes)) if names]
    return "".join(f"{line}\n" for line in lines)


def format_topology_graphml(topology: Topology) -> str:
    """Return GraphML with the nodes "zone:NAME" and "node:NAME"; UnavailableError without networkx."""
    graph = topology.to_networkx()
    import networkx

    named = networkx.relabel_nodes(graph, {(kind, name): f"{kind}:{name}" for kind, name in graph})
    return "\n".join(networkx.generate_graphml(named)) + "\n"


def conversion_losses(topologies: TopologySet, name: str | None, format_name: str) -> list[str]:
    """List information that the format cannot hold or the source did not give; parameters as of `format_topology`."""
    if format_name == "json":
        return []
    is_single = format_name in _SINGLE_FORMATS
    chosen = [topologies.get(name)] if name or is_single else list(topologies.topologies)
    losses = [f"topology {topology.name} is omitted: a {_SINGLE_FORMATS[format_name]} holds one; select it with "
              "--name" for topology in topologies.topologies if is_single and topology not in chosen]
    if format_name == "conf" and chosen[0].name != "default":
        losses.append(f"the name {chosen[0].name}: topology.conf has no topology names")
    for topology in chosen:
        speed_count = int(np.isfinite(topology.uplink_bandwidth).sum())
        if format_name == "yaml" and speed_count:
            losses.append(f"LinkSpeed of {pluralize(speed_count, 'zone')} of {topology.name}: topology.yaml has no "
                          "such field")
        implausible = sum(speed == speed and to_link_speed(speed) is None
                          for speed in topology.uplink_bandwidth.tolist())
        if format_name == "conf" and implausible:
            losses.append(f"speeds of {pluralize(implausible, 'zone')} of {topology.name}: not plausible as "
                          "LinkSpeed")
        if format_name == "graphml":
            losses += [f"BlockSizes of {topology.name}: GraphML has no such field"] if topology.block_sizes else []
            continue
        zoneless = [topology.nodes[i] for i in np.flatnonzero(topology.leaf < 0)]
        if zoneless:
            losses.append(f"nodes without a zone: {fold_hostlist(zoneless)}")
        losses += [note for note in topology.notes if "is ignored" in note]
    return losses


def _yaml_scalar(text: str) -> str:
    """Return a YAML scalar that every loader reads as this string."""
    is_plain = _PLAIN_SCALAR.fullmatch(text) and text.lower() not in _YAML_KEYWORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def zone_features(topology: Topology, all_levels: bool = False) -> dict[str, tuple[str, ...]]:
    """Return each node's zone names, its leaf first; with `all_levels` also the zones above.

    Aggregated blocks whose names are not valid features are omitted; a leaf zone with such a name is an InputError.
    """
    features: dict[int, tuple[str, ...]] = {}
    for leaf in sorted({leaf for leaf in topology.leaf.tolist() if leaf >= 0}):
        name, path = topology.zones[leaf], topology.zone_path(leaf)
        if not _FEATURE.fullmatch(name):
            raise InputError(f"{topology.source}: zone {name!r}: not a valid feature; expected no blanks and no "
                             "characters of constraints")
        features[leaf] = tuple(filter(_FEATURE.fullmatch, reversed(path))) if all_levels else (name,)
    return {node: features[leaf] for node, leaf in zip(topology.nodes, topology.leaf.tolist(), strict=True)
            if leaf >= 0}


def rewrite_node_lines(path: str, features_by_node: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the NodeName lines of a slurm.conf and of its includes, with the zone features added.

    Lines of NodeName=DEFAULT and of nodes without a zone stay unchanged. Raises InputError if the file cannot be
    read, or a line has lists of different lengths.
    """
    default: tuple[str, ...] = ()
    for line in logical_lines(path):
        pairs = {key.lower(): value.strip('"') for key, value in _SLURM_CONF_PAIR.findall(line.text)}
        if "nodename" not in pairs:
            continue
        feature_text = pairs.get("features") or pairs.get("feature")
        present = tuple(filter(None, feature_text.split(","))) if feature_text else default
        if pairs["nodename"] == "DEFAULT":
            default = present
            yield line.text.strip()
            continue
        nodes = line.expand(pairs["nodename"])
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, node in enumerate(nodes):
            groups.setdefault(tuple(dict.fromkeys((*present, *features_by_node.get(node, ())))), []).append(i)
        for features, members in groups.items():
            yield _format_node_line(line, nodes, members, features, features != present)


def _format_node_line(line: LogicalLine, nodes: Sequence[str], indices: list[int], features: tuple[str, ...],
                      changed: bool) -> str:
    """Return the line restricted to some of its nodes."""
    pairs = []
    for key, value in _SLURM_CONF_PAIR.findall(line.text):
        if key.lower() in ("feature", "features") and changed:
            continue
        if key.lower() == "nodename":
            value = checked_hostlist([nodes[i] for i in indices])
        elif key.lower() in _PER_NODE and len(indices) < len(nodes):
            values = line.expand(value.strip('"'))
            if len(values) not in (1, len(nodes)):
                raise line.error(f"{key} has {len(values)} values for {pluralize(len(nodes), 'node')}")
            value = checked_hostlist([values[i] for i in indices]) if len(values) > 1 else value
        pairs.append(f"{key}={value}")
    return " ".join(pairs + [f"Features={','.join(features)}"] * changed)


def group_by_features(features_by_node: Mapping[str, tuple[str, ...]],
                      present_features: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield (hostlist, comma-separated features) of the nodes with equal features, including their present ones."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for node, names in features_by_node.items():
        groups.setdefault(tuple(dict.fromkeys((*present_features.get(node, ()), *names))), []).append(node)
    for features, nodes in groups.items():
        yield checked_hostlist(nodes), ",".join(features)
