"""A topology as a text tree that fits a terminal: similar siblings share a line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl import units
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize, truncate
from slurmdl.topology.topology import Topology, children_by_zone, nodes_by_leaf

_MAX_FOLD_LEVELS = 16  # levels that are folded one by one until the tree fits; higher levels are folded at once
_MAX_NAME_WIDTH = 36


def summarize_topology(topology: Topology) -> str:
    """Return kind, size and source in one line."""
    prefix = f"{topology.name}: " if topology.name != "default" else ""
    return (f"{prefix}{topology.kind}, {pluralize(len(topology.zones), 'zone')}, "
            f"{pluralize(len(topology.nodes), 'node')} ({topology.source})")


def format_tree(topology: Topology, *, width: int = 80, height: int | None = 24) -> str:
    """Return the zones, indented by depth, with their nodes.

    Args:
        width: characters per line; longer lines are truncated.
        height: maximum number of lines; None for one line per zone. If the tree is larger, siblings of equal shape
            share a line, from the leaves up; if it still does not fit, siblings of equal level do.
    """
    lines = [summarize_topology(topology)]
    nodes = nodes_by_leaf(topology)
    rows = _fold_to_height(topology, None if height is None else height - 2)
    children = children_by_zone(topology)
    names = ["  " * depth + truncate(fold_hostlist(topology.zones[zone] for zone in zones), _MAX_NAME_WIDTH)
             for zones, depth in rows]
    column = max(map(len, names), default=0)
    for name, (zones, _) in zip(names, rows, strict=True):
        hosts = fold_hostlist(node for zone in zones for node in nodes.get(zone, ()))
        size = _describe_zones(topology, zones, [len(children.get(zone, ())) for zone in zones])
        lines.append(truncate(f"{name:{column}}  {size}  {hosts}".rstrip(), width))
    if -1 in nodes:
        hosts = fold_hostlist(nodes[-1])
        lines.append(truncate(f"without a zone: {pluralize(len(nodes[-1]), 'node')}  {hosts}", width))
    return "\n".join(lines + [f"note: {note}" for note in topology.notes])


def _fold_to_height(topology: Topology, max_rows: int | None) -> list[tuple[tuple[int, ...], int]]:
    """Return (zones that share a line, depth) of the first folding with at most `max_rows` lines."""
    children, shapes, top = children_by_zone(topology), _shape_ids(topology), int(topology.level.max(initial=0)) + 1
    rows = _fold_siblings(children, range(len(topology.zones)))
    if max_rows is None or len(rows) <= max_rows:
        return rows
    for fold_below in [*range(1, min(top, _MAX_FOLD_LEVELS)), top]:
        for group_keys in (shapes, topology.level.tolist()):
            keys = [(1, group_keys[zone]) if level < fold_below else (0, zone)
                    for zone, level in enumerate(topology.level.tolist())]
            rows = _fold_siblings(children, keys)
            if len(rows) <= max_rows:
                return rows
    return rows


def _fold_siblings(children: dict[int, list[int]], keys: Sequence[object]) -> list[tuple[tuple[int, ...], int]]:
    """Merge siblings of equal key into one row, and likewise their children."""
    rows: list[tuple[tuple[int, ...], int]] = []
    stack: list[tuple[tuple[int, ...], int]] = [((-1,), -1)]
    while stack:
        zones, depth = stack.pop()
        if depth >= 0:
            rows.append((zones, depth))
        groups: dict[object, list[int]] = {}
        for zone in zones:
            for child in children.get(zone, ()):
                groups.setdefault(keys[child], []).append(child)
        stack += [(tuple(group), depth + 1) for group in reversed(groups.values())]
    return rows


def _shape_ids(topology: Topology) -> list[int]:
    """Return a number per zone; equal if node counts and shapes of the child zones are equal."""
    node_counts = np.bincount(topology.leaf[topology.leaf >= 0], minlength=len(topology.zones)).tolist()
    children, ids, shape = children_by_zone(topology), dict[object, int](), [0] * len(topology.zones)
    for zone in np.argsort(topology.level, kind="stable").tolist():
        key = node_counts[zone], *sorted(shape[child] for child in children.get(zone, ()))
        shape[zone] = ids.setdefault(key, len(ids))
    return shape


def _describe_zones(topology: Topology, zones: Sequence[int], child_counts: Sequence[int]) -> str:
    node_counts, speeds = topology.node_count[list(zones)].tolist(), topology.uplink_bandwidth[list(zones)]
    speed = f", {units.format_bit_rate(speeds[0])}" if speeds.min() == speeds.max() else ""  # False if NaN
    if len(zones) == 1:
        return pluralize(node_counts[0], "node") + speed
    parts = [_format_range(child_counts, "zone")] * bool(max(child_counts)) + [_format_range(node_counts, "node")]
    return f"{pluralize(len(zones), 'zone')}, {' and '.join(parts)} each{speed}"


def _format_range(counts: Sequence[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    return pluralize(high, noun) if low == high else f"{low} to {pluralize(high, noun)}"
