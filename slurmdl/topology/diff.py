"""Differences between two topologies: zones, parents, the zones of nodes, link speeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import truncate
from slurmdl.topology.topology import Topology, TopologySet

_MAX_NAMES_WIDTH = 60


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
    moved: dict[tuple[str, str], list[str]] = {}
    for i, j in common:
        parents = _zone_name(left, left.parent[i]), _zone_name(right, right.parent[j])
        if parents[0] != parents[1]:
            moved.setdefault(parents, []).append(left.zones[i])
    for (above_left, above_right), zones in moved.items():
        yield f"{_format_names(zones, 'zone')}: below {above_left} in {labels[0]}, below {above_right} in {labels[1]}"
    speeds: dict[tuple[float, float], list[str]] = {}
    for i, j in common:
        if abs(left.uplink_bandwidth[i] - right.uplink_bandwidth[j]) > 0:  # False if either is NaN
            speeds.setdefault((left.uplink_bandwidth[i], right.uplink_bandwidth[j]), []).append(left.zones[i])
    for (left_speed, right_speed), zones in speeds.items():
        yield (f"{_format_names(zones, 'zone')}: {left_speed * 8e-9:g} Gbit/s in {labels[0]}, "
               f"{right_speed * 8e-9:g} Gbit/s in {labels[1]}")


def _diff_nodes(left: Topology, right: Topology, labels: tuple[str, str]) -> Iterator[str]:
    yield from _only_on_one_side(left.nodes, right.nodes, "node", labels)
    moved: dict[tuple[str, str], list[str]] = {}
    for node, leaf in zip(left.nodes, left.leaf.tolist(), strict=True):
        j = right.node_index.get(node)
        if j is not None and (zones := (_zone_name(left, leaf), _zone_name(right, right.leaf[j])))[0] != zones[1]:
            moved.setdefault(zones, []).append(node)
    for (left_zone, right_zone), nodes in moved.items():
        yield f"{_format_names(nodes, 'node')}: in {left_zone} in {labels[0]}, in {right_zone} in {labels[1]}"


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
