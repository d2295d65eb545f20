"""Differences between two topologies: zones, parents, the zones of nodes, link speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import truncate
from slurmdl.topology.topology import Topology, TopologySet

_MAX_NAMES_WIDTH = 60
Value = TypeVar("Value")


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
        yield (f"{_format_names(names, noun)}: {format_value(left)} in {labels[0]}, "
               f"{format_value(right)} in {labels[1]}")


def _only_on_one_side(left: Sequence[str], right: Sequence[str], noun: str, labels: tuple[str, str]) -> Iterator[str]:
    for names, other_names, side in ((left, set(right), labels[0]), (right, set(left), labels[1])):
        unmatched = [name for name in names if name not in other_names]
        if unmatched:
            yield f"{_format_names(unmatched, noun)}: only in {side}"


def _zone_name(topology: Topology, zone: int) -> str:
    return topology.zones[zone] if zone >= 0 else "no zone"


def _format_names(names: Sequence[str], noun: str) -> str:
    plural = noun if len(names) == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{plural} {truncate(fold_hostlist(names), _MAX_NAMES_WIDTH)}" + \
        (f" ({len(names):,})" if len(names) > 1 else "")
