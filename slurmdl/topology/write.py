"""Writers of topology.conf and topology.yaml, and what each of the two cannot say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

from slurmdl.errors import InputError
from slurmdl.slurm.hostlist import fold_hostlist, ranged_string
from slurmdl.topology.source import TopologySource, to_link_speed
from slurmdl.topology.topology import Topology, TopologySet

#: names that both formats and Slurm's hostlists can hold
_NAME = re.compile(r"[^\s,\[\]{}\"'#\\=]+")
#: what needs no quotes in YAML
_PLAIN_SCALAR = re.compile(r"[A-Za-z][A-Za-z0-9_.,\-\[\]]*")
_YAML_KEYWORDS = ("y", "yes", "t", "true", "on", "n", "no", "f", "false", "off", "null")
_CONF_KEYS = {"tree": "SwitchName", "block": "BlockName", "ring": "RingName"}
_YAML_KEYS = {"tree": ("switches", "switch"), "block": ("blocks", "block"), "ring": ("rings", "ring")}


def checked_hostlist(names: Sequence[str]) -> str:
    """A hostlist that expands to these names in this order, repeats included: n3,n1,n2,login -> n[3,1-2],login.

    Only the digits at the end of a name are folded: Slurm 22.05 refuses a suffix after the last bracket.

    Raises
    ------
    InputError : a name that no hostlist can hold.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} cannot stand in a hostlist; valid is all but blanks , [ ] {{ }} \" ' # = \\")
    return ranged_string(names)


def format_topology(topologies: TopologySet, name: str | None, format_name: str) -> str:
    """The text of a file.

    Parameters
    ----------
    name : the only topology that is written; None for all where the form can hold several, else the default.
    form : "conf", "yaml" or "json".

    Raises
    ------
    InputError : the form cannot hold the topology, or there is none of that name.
    """
    if name or format_name == "conf":
        topologies = TopologySet.single(topologies.get(name))
    if format_name == "conf":
        return format_topology_conf(topologies.topologies[0])
    return format_topology_yaml(topologies) if format_name == "yaml" else json.dumps(
        topologies.to_json(), indent=1) + "\n"


def format_topology_conf(topology: Topology) -> str:
    """The text of a topology.conf that reads as this topology.

    Raises
    ------
    InputError : a kind that topology.conf does not know, or a name that it cannot hold.
    """
    if topology.kind not in _CONF_KEYS:
        raise InputError(f"{topology.source}: {topology.kind} cannot stand in a topology.conf; valid: "
                         f"{', '.join(_CONF_KEYS)}")
    lines = []
    for zone in TopologySource.from_topology(topology).zones:
        line = f"{_CONF_KEYS[topology.kind]}={checked_hostlist([zone.name])}"
        if zone.children:
            line += f" Switches={checked_hostlist(zone.children)}"
        if zone.nodes:
            line += f" Nodes={checked_hostlist(zone.nodes)}"
        if zone.link_speed is not None:
            line += f" LinkSpeed={zone.link_speed}"
        lines.append(line)
    if topology.block_sizes:
        lines.append(f"BlockSizes={','.join(map(str, topology.block_sizes))}")
    return "".join(f"{line}\n" for line in lines)


def format_topology_yaml(topologies: TopologySet) -> str:
    """The text of a topology.yaml that reads as these topologies.

    Raises
    ------
    InputError : a torus3d, whose layout is not known, or a name that the file cannot hold.
    """
    lines = ["---"]
    for topology in topologies.topologies:
        lines += [f"- topology: {_yaml_scalar(topology.name)}",
                  f"  cluster_default: {'true' if topology.name == topologies.default else 'false'}"]
        if topology.kind == "flat":
            lines.append("  flat: true")
            continue
        if topology.kind not in _YAML_KEYS:
            raise InputError(f"{topology.source}: topology {topology.name!r}: the layout of a {topology.kind} is not "
                             f"read, so it cannot be written; valid: {', '.join(_YAML_KEYS)}, flat")
        items, key = _YAML_KEYS[topology.kind]
        lines.append(f"  {topology.kind}:")
        if topology.block_sizes:
            lines += ["    block_sizes:", *(f"      - {size}" for size in topology.block_sizes)]
        lines.append(f"    {items}:")
        for zone in TopologySource.from_topology(topology).zones:
            lines.append(f"      - {key}: {_yaml_scalar(checked_hostlist([zone.name]))}")
            if zone.children:
                lines.append(f"        children: {_yaml_scalar(checked_hostlist(zone.children))}")
            if zone.nodes:
                lines.append(f"        nodes: {_yaml_scalar(checked_hostlist(zone.nodes))}")
    return "".join(f"{line}\n" for line in lines)


def conversion_losses(topologies: TopologySet, name: str | None, format_name: str) -> list[str]:
    """What the form cannot say of these topologies, and what their source did not give, one sentence each.

    Parameters
    ----------
    name, form : as in `text`.
    """
    if format_name == "json":
        return []
    chosen = [topologies.get(name)] if name or format_name == "conf" else list(topologies.topologies)
    said = [f"topology {topology.name} is left out: a topology.conf holds one; --name chooses it"
            for topology in topologies.topologies if format_name == "conf" and topology not in chosen]
    if format_name == "conf" and chosen[0].name != "default":
        said.append(f"the name {chosen[0].name}: topology.conf has no names of topologies")
    for topology in chosen:
        count = int(np.isfinite(topology.uplink_bandwidth).sum())
        if format_name == "yaml" and count:
            said.append(f"LinkSpeed of {count} zones of {topology.name}: topology.yaml has no such field")
        odd = sum(speed == speed and to_link_speed(speed) is None for speed in topology.uplink_bandwidth.tolist())
        if format_name == "conf" and odd:
            said.append(f"speeds of {odd} zones of {topology.name}: slurmdl would not take them from a LinkSpeed")
        alone = [topology.nodes[i] for i in np.flatnonzero(topology.leaf < 0)]
        if alone:
            said.append(f"nodes without a zone: {fold_hostlist(alone)}")
        said += [note for note in topology.notes if "passed over" in note]
    return said


def _yaml_scalar(text: str) -> str:
    """A YAML scalar that every loader takes for this string."""
    return text if _PLAIN_SCALAR.fullmatch(text) and text.lower(
    ) not in _YAML_KEYWORDS else json.dumps(text, ensure_ascii=False)
