"""A topology as a text tree."""

from __future__ import annotations

from collections.abc import Iterator

from slurmdl.topology.hostlist import fold
from slurmdl.topology.model import Topology


def walk(topology: Topology) -> Iterator[tuple[int, int]]:
    """(index of the zone, its depth), each zone before those below it, in the order of the source."""
    below: dict[int, list[int]] = {}
    for zone, parent in enumerate(topology.parent.tolist()):
        below.setdefault(parent, []).append(zone)
    stack = [(zone, 0) for zone in reversed(below.get(-1, []))]
    while stack:
        zone, depth = stack.pop()
        yield zone, depth
        stack += [(child, depth + 1) for child in reversed(below.get(zone, []))]


def members(topology: Topology) -> dict[int, list[str]]:
    """Index of a leaf zone -> its nodes; -1 -> those without a zone."""
    nodes: dict[int, list[str]] = {}
    for name, leaf in zip(topology.nodes, topology.leaf.tolist(), strict=True):
        nodes.setdefault(leaf, []).append(name)
    return nodes


def text(topology: Topology) -> str:
    """The zones, indented by depth, each leaf with its nodes."""
    nodes = members(topology)
    lines = [f"{topology.kind}, {len(topology.zones)} zones, {len(topology.nodes)} nodes ({topology.source})"]
    for zone, depth in walk(topology):
        here = nodes.get(zone, [])
        listed = f"  {len(here)} nodes: {fold(here)}" if here else ""
        lines.append(f"{'  ' * depth}{topology.zones[zone]} (level {topology.level[zone]}){listed}")
    if -1 in nodes:
        lines.append(f"without a zone: {fold(nodes[-1])}")
    return "\n".join(lines)
