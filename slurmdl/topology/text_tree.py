"""A topology as a text tree that fits a terminal: zones that are alike and beside each other share a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slurmdl import units
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize, truncate
from slurmdl.topology.topology import Topology

#: levels that are folded one by one until the tree fits; what is higher is folded at once
_MAX_FOLD_LEVELS = 16
#: widest column of zone names
_MAX_NAME_WIDTH = 36


def walk_zones(topology: Topology) -> Iterator[tuple[int, int]]:
    """(index of the zone, its depth), each zone before those below it, in the order of the source."""
    below = children_by_zone(topology)
    stack = [(zone, 0) for zone in reversed(below.get(-1, []))]
    while stack:
        zone, depth = stack.pop()
        yield zone, depth
        stack += [(child, depth + 1) for child in reversed(below.get(zone, []))]


def children_by_zone(topology: Topology) -> dict[int, list[int]]:
    """Index of a zone -> the zones below it; -1 -> the roots."""
    below: dict[int, list[int]] = {}
    for zone, parent in enumerate(topology.parent.tolist()):
        below.setdefault(parent, []).append(zone)
    return below


def nodes_by_leaf(topology: Topology) -> dict[int, list[str]]:
    """Index of a leaf zone -> its nodes; -1 -> those without a zone."""
    nodes: dict[int, list[str]] = {}
    for name, leaf in zip(topology.nodes, topology.leaf.tolist(), strict=True):
        nodes.setdefault(leaf, []).append(name)
    return nodes


def summarize_topology(topology: Topology) -> str:
    """Kind, size and source, in one line."""
    named = f"{topology.name}: " if topology.name != "default" else ""
    return (f"{named}{topology.kind}, {pluralize(len(topology.zones), 'zone')}, {pluralize(len(topology.nodes), 'node')} "
            f"({topology.source})")


def format_tree(topology: Topology, *, width: int = 80, height: int | None = 24) -> str:
    """The zones, indented by depth, with their nodes.

    Parameters
    ----------
    width : characters of a line; longer lists of nodes are cut.
    height : lines that the tree may take. Where the zones are more, those below one zone that have the same
        shape share a line, from the leaves up; if that does not do, all that have the same level do.
        None: every zone has its own line.
    """
    lines = [summarize_topology(topology)]
    nodes = nodes_by_leaf(topology)
    rows = _fold_to_height(topology, None if height is None else height - 2)
    below = children_by_zone(topology)
    names = [
    "  " *
    depth +
    truncate(
        fold_hostlist(
            topology.zones[zone] for zone in zones),
            _MAX_NAME_WIDTH) for zones,
             depth in rows]
    column = max(map(len, names), default=0)
    for name, (zones, _) in zip(names, rows, strict=True):
        listed = fold_hostlist(node for zone in zones for node in nodes.get(zone, ()))
        what = _describe_zones(topology, zones, [len(below.get(zone, ())) for zone in zones])
        lines.append(truncate(f"{name:{column}}  {what}  {listed}".rstrip(), width))
    if -1 in nodes:
        lines.append(
    truncate(
        f"without a zone: {pluralize(len(nodes[-1]), 'node')}  {fold_hostlist(nodes[-1])}",
         width))
    return "\n".join(lines + [f"note: {note}" for note in topology.notes])


def _fold_to_height(topology: Topology, max_rows: int | None) -> list[tuple[tuple[int, ...], int]]:
    """(zones that share a line, depth), the first way of folding that has at most `limit` lines."""
    below, shapes, top = children_by_zone(topology), _shape_ids(topology), int(topology.level.max(initial=0)) + 1
    rows = _fold_siblings(below, range(len(topology.zones)))
    if max_rows is None or len(rows) <= max_rows:
        return rows
    for under in [*range(1, min(top, _MAX_FOLD_LEVELS)), top]:
        for like in (shapes, topology.level.tolist()):
            keys = [(1, like[zone]) if level < under else (0, zone)
                    for zone, level in enumerate(topology.level.tolist())]
            rows = _fold_siblings(below, keys)
            if len(rows) <= max_rows:
                return rows
    return rows


def _fold_siblings(below: dict[int, list[int]], keys: Sequence[object]) -> list[tuple[tuple[int, ...], int]]:
    """The tree with siblings of the same key as one; what is below them is below all of them."""
    rows: list[tuple[tuple[int, ...], int]] = []
    stack: list[tuple[tuple[int, ...], int]] = [((-1,), -1)]
    while stack:
        zones, depth = stack.pop()
        if depth >= 0:
            rows.append((zones, depth))
        groups: dict[object, list[int]] = {}
        for zone in zones:
            for child in below.get(zone, ()):
                groups.setdefault(keys[child], []).append(child)
        stack += [(tuple(group), depth + 1) for group in reversed(groups.values())]
    return rows


def _shape_ids(topology: Topology) -> list[int]:
    """A number for each zone; equal where the zones have as many nodes and zones of the same shapes below them."""
    own = np.bincount(topology.leaf[topology.leaf >= 0], minlength=len(topology.zones)).tolist()
    below, known, shape = children_by_zone(topology), dict[object, int](), [0] * len(topology.zones)
    for zone in np.argsort(topology.level, kind="stable").tolist():
        key = own[zone], *sorted(shape[child] for child in below.get(zone, ()))
        shape[zone] = known.setdefault(key, len(known))
    return shape


def _describe_zones(topology: Topology, zones: Sequence[int], below: Sequence[int]) -> str:
    nodes, speeds = topology.node_count[list(zones)].tolist(), topology.uplink_bandwidth[list(zones)]
    speed = f", {units.format_bit_rate(speeds[0])}" if speeds.min() == speeds.max() else ""  # NaN equals nothing
    if len(zones) == 1:
        return pluralize(nodes[0], "node") + speed
    parts = [_format_range(below, "zone")] * bool(max(below)) + [_format_range(nodes, "node")]
    return f"{pluralize(len(zones), 'zone')}, {' and '.join(parts)} each{speed}"


def _format_range(counts: Sequence[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    return pluralize(high, noun) if low == high else f"{low} to {pluralize(high, noun)}"

