"""Zones as node features for slurm.conf(5): a job can request a zone, and slurmdl can prefer one.

A node may be on one NodeName line only (slurmctld ends with "Duplicated NodeName"), so the existing lines are
rewritten and split by zone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from slurmdl.errors import InputError
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology
from slurmdl.topology.topology_conf import LogicalLine, logical_lines
from slurmdl.topology.write import checked_hostlist

_FEATURE = re.compile(r"[^\s,&|*()\[\]{}\"'#=\\]+")  # other characters have a meaning in constraints (sbatch(1))
_PAIR = re.compile(r"""(\w+)\s*=\s*("[^"]*"|\S+)""")
_PER_NODE = ("nodeaddr", "nodehostname", "bcastaddr", "port")  # keys with one value for all nodes, or one per node


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
        pairs = {key.lower(): value.strip('"') for key, value in _PAIR.findall(line.text)}
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
    for key, value in _PAIR.findall(line.text):
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
