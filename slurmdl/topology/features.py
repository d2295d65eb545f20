"""Zones as node features, for slurm.conf(5): so a job can ask for a zone, and slurmdl can prefer one.

A node may stand on one NodeName line only (slurmctld ends with "Duplicated NodeName"), so the lines that a
slurm.conf has are written anew, split where their nodes lie in several zones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from slurmdl.errors import InputError
from slurmdl.slurm import hostlist
from slurmdl.topology.topology import Topology
from slurmdl.topology.topology_conf import LogicalLine, logical_lines
from slurmdl.topology.write import checked_hostlist as fold

#: constraints (sbatch(1)) give the other signs a meaning
_FEATURE = re.compile(r"[^\s,&|*()\[\]{}\"'#=\\]+")
_WORD = re.compile(r"""(\w+)\s*=\s*("[^"]*"|\S+)""")
#: keys of slurm.conf that hold one value for all nodes of the line, or one for each
_PER_NODE = ("nodeaddr", "nodehostname", "bcastaddr", "port")


def zone_features(topology: Topology, all_levels: bool = False) -> dict[str, tuple[str, ...]]:
    """Node -> the names of its zones, its leaf first; with `every_level` those above, too.

    Names of aggregated blocks are left out where they cannot be a feature.

    Raises
    ------
    InputError : the name of a leaf zone cannot be a feature.
    """
    features: dict[int, tuple[str, ...]] = {}
    for leaf in sorted({leaf for leaf in topology.leaf.tolist() if leaf >= 0}):
        path, zone = [topology.zones[leaf]], int(topology.parent[leaf])
        if not _FEATURE.fullmatch(path[0]):
            raise InputError(f"{topology.source}: zone {path[0]!r} cannot be the name of a feature: blanks and "
                             "signs of constraints are not valid there")
        while all_levels and zone >= 0:
            path += [topology.zones[zone]] if _FEATURE.fullmatch(topology.zones[zone]) else []
            zone = int(topology.parent[zone])
        features[leaf] = tuple(path)
    return {node: features[leaf] for node, leaf in zip(topology.nodes, topology.leaf.tolist(), strict=True)
            if leaf >= 0}


def rewrite_node_lines(path: str, features_by_node: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The NodeName lines of a slurm.conf and of what it includes, with the features of `zones` added to theirs.

    Lines of NodeName=DEFAULT and of nodes without a zone stay as they are.

    Raises
    ------
    InputError : the file cannot be read, or a line has lists of different lengths.
    """
    default: tuple[str, ...] = ()
    for line in logical_lines(path):
        words = {key.lower(): value.strip('"') for key, value in _WORD.findall(line.text)}
        if "nodename" not in words:
            continue
        given = words.get("features") or words.get("feature")
        present = tuple(filter(None, given.split(","))) if given else default
        if words["nodename"] == "DEFAULT":
            default = present
            yield line.text.strip()
            continue
        nodes = _expand_on_line(words["nodename"], line)
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, node in enumerate(nodes):
            groups.setdefault(_merge_features(present, features_by_node.get(node, ())), []).append(i)
        for features, members in groups.items():
            yield _format_node_line(line, nodes, members, features, features != present)


def _format_node_line(line: LogicalLine, nodes: list[str],
                      indices: list[int], features: tuple[str, ...], changed: bool) -> str:
    """The line for some of its nodes."""
    said = []
    for key, value in _WORD.findall(line.text):
        if key.lower() in ("feature", "features") and changed:
            continue
        if key.lower() == "nodename":
            value = fold([nodes[i] for i in indices])
        elif key.lower() in _PER_NODE and len(indices) < len(nodes):
            each = _expand_on_line(value.strip('"'), line)
            if len(each) not in (1, len(nodes)):
                raise line.error(f"{key} has {len(each)} values for {len(nodes)} nodes")
            value = fold([each[i] for i in indices]) if len(each) > 1 else value
        said.append(f"{key}={value}")
    return " ".join(said + [f"Features={','.join(features)}"] * changed)


def group_by_features(features_by_node: Mapping[str, tuple[str, ...]], present_features: Mapping[str, tuple[str, ...]]) \
        -> Iterator[tuple[str, str]]:
    """(hostlist, features joined by commas) of the nodes that get the same features, those `present` kept."""
    found: dict[tuple[str, ...], list[str]] = {}
    for node, names in features_by_node.items():
        found.setdefault(_merge_features(present_features.get(node, ()), names), []).append(node)
    for features, nodes in found.items():
        yield fold(nodes), ",".join(features)


def _expand_on_line(text: str, line: LogicalLine) -> list[str]:
    try:
        return hostlist.expand_hostlist(text)
    except InputError as error:
        raise line.error(str(error)) from error


def _merge_features(present: Iterable[str], added: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*present, *added)))
