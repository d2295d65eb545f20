"""Writers of topology.conf and topology.yaml, and what each of the two cannot say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

from slurmdl.errors import InputError
from slurmdl.topology.build import link_speed
from slurmdl.topology.contents import Contents
from slurmdl.topology.hostlist import fold, ranged
from slurmdl.topology.model import Topology
from slurmdl.topology.topologies import Topologies

#: names that both formats and Slurm's hostlists can hold
_NAME = re.compile(r"[^\s,\[\]{}\"'#\\=]+")
#: what needs no quotes in YAML
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.,\-\[\]]*")
_WORDS = ("y", "yes", "t", "true", "on", "n", "no", "f", "false", "off", "null")
_CONF_KEYS = {"tree": "SwitchName", "block": "BlockName", "ring": "RingName"}
_YAML_KEYS = {"tree": ("switches", "switch"), "block": ("blocks", "block"), "ring": ("rings", "ring")}


def hostlist(names: Sequence[str]) -> str:
    """A hostlist that expands to these names in this order, repeats included: n3,n1,n2,login -> n[3,1-2],login.

    Only the digits at the end of a name are folded: Slurm 22.05 refuses a suffix after the last bracket.

    Raises
    ------
    InputError : a name that no hostlist can hold.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} cannot stand in a hostlist; valid is all but blanks , [ ] {{ }} \" ' # = \\")
    return ranged(names)


def text(topologies: Topologies, name: str | None, form: str) -> str:
    """The text of a file.

    Parameters
    ----------
    name : the only topology that is written; None for all where the form can hold several, else the default.
    form : "conf", "yaml" or "json".

    Raises
    ------
    InputError : the form cannot hold the topology, or there is none of that name.
    """
    if name or form == "conf":
        topologies = Topologies.one(topologies.of(name))
    if form == "conf":
        return conf(topologies.each[0])
    return yaml(topologies) if form == "yaml" else json.dumps(topologies.to_json(), indent=1) + "\n"


def conf(topology: Topology) -> str:
    """The text of a topology.conf that reads as this topology.

    Raises
    ------
    InputError : a kind that topology.conf does not know, or a name that it cannot hold.
    """
    if topology.kind not in _CONF_KEYS:
        raise InputError(f"{topology.source}: {topology.kind} cannot stand in a topology.conf; valid: "
                         f"{', '.join(_CONF_KEYS)}")
    lines = []
    for zone in Contents.of(topology).zones:
        line = f"{_CONF_KEYS[topology.kind]}={hostlist([zone.name])}"
        if zone.children:
            line += f" Switches={hostlist(zone.children)}"
        if zone.nodes:
            line += f" Nodes={hostlist(zone.nodes)}"
        if zone.link_speed is not None:
            line += f" LinkSpeed={zone.link_speed}"
        lines.append(line)
    if topology.block_sizes:
        lines.append(f"BlockSizes={','.join(map(str, topology.block_sizes))}")
    return "".join(f"{line}\n" for line in lines)


def yaml(topologies: Topologies) -> str:
    """The text of a topology.yaml that reads as these topologies.

    Raises
    ------
    InputError : a torus3d, whose layout is not known, or a name that the file cannot hold.
    """
    lines = ["---"]
    for topology in topologies.each:
        lines += [f"- topology: {_scalar(topology.name)}",
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
        for zone in Contents.of(topology).zones:
            lines.append(f"      - {key}: {_scalar(hostlist([zone.name]))}")
            if zone.children:
                lines.append(f"        children: {_scalar(hostlist(zone.children))}")
            if zone.nodes:
                lines.append(f"        nodes: {_scalar(hostlist(zone.nodes))}")
    return "".join(f"{line}\n" for line in lines)


def lost(topologies: Topologies, name: str | None, form: str) -> list[str]:
    """What the form cannot say of these topologies, and what their source did not give, one sentence each.

    Parameters
    ----------
    name, form : as in `text`.
    """
    if form == "json":
        return []
    chosen = [topologies.of(name)] if name or form == "conf" else list(topologies.each)
    said = [f"topology {topology.name} is left out: a topology.conf holds one; --name chooses it"
            for topology in topologies.each if form == "conf" and topology not in chosen]
    if form == "conf" and chosen[0].name != "default":
        said.append(f"the name {chosen[0].name}: topology.conf has no names of topologies")
    for topology in chosen:
        count = int(np.isfinite(topology.speed).sum())
        if form == "yaml" and count:
            said.append(f"LinkSpeed of {count} zones of {topology.name}: topology.yaml has no such field")
        odd = sum(speed == speed and link_speed(speed) is None for speed in topology.speed.tolist())
        if form == "conf" and odd:
            said.append(f"speeds of {odd} zones of {topology.name}: slurmdl would not take them from a LinkSpeed")
        alone = [topology.nodes[i] for i in np.flatnonzero(topology.leaf < 0)]
        if alone:
            said.append(f"nodes without a zone: {fold(alone)}")
        said += [note for note in topology.notes if "passed over" in note]
    return said


def _scalar(text: str) -> str:
    """A YAML scalar that every loader takes for this string."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else json.dumps(text, ensure_ascii=False)
