"""How two topologies differ: zones, their places, the zones of nodes, the speeds of links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.topology.text_tree import truncate
from slurmdl.topology.topology import Topology, TopologySet

#: widest list of names in a line
_MAX_NAMES_WIDTH = 60


def diff_sets(left: TopologySet, right: TopologySet, labels: tuple[str, str], name: str | None = None) -> list[str]:
    """One line for each difference, none where the two agree.

    Where each side has one topology, these are compared whatever their names: topology.conf has no names.

    Parameters
    ----------
    sides : what the lines call the two, e.g. the name of a file and "the controller".
    name : the only topology that is compared; None for all.

    Raises
    ------
    InputError : one of the two has no topology of that name.
    """
    if len(left.topologies) == len(right.topologies) == 1:
        return diff_topologies(left.get(name), right.topologies[0], labels)
    lines: list[str] = []
    if name is None:
        lines += _only_on_one_side(left.names, right.names, "topology", labels)
    if name is None and left.default != right.default:
        lines.append(f"default topology: {left.default} in {labels[0]}, {right.default} in {labels[1]}")
    for common in [name] if name else [name for name in left.names if name in right.names]:
        lines += [f"{common}: {line}" for line in diff_topologies(left.get(common), right.get(common), labels)]
    return lines


def diff_topologies(left: Topology, right: Topology, labels: tuple[str, str]) -> list[str]:
    """One line for each difference, none where the two agree.

    Names are compared, not the order in which they stand; only that of blocks counts, since Slurm aggregates
    neighbours. What differs in the same way shares a line. LinkSpeed is compared where both give it.
    """
    return [*_diff_kinds(left, right, labels), *_diff_zones(left, right, labels), *_diff_nodes(left, right, labels)]


def _diff_kinds(one: Topology, other: Topology, labels: tuple[str, str]) -> Iterator[str]:
    if one.kind != other.kind:
        yield f"kind: {one.kind} in {labels[0]}, {other.kind} in {labels[1]}"
    elif one.kind == "block":
        a, b = ([zone for zone, level in zip(t.zones, t.level.tolist(), strict=True) if not level]
                for t in (one, other))
        if a != b and sorted(a) == sorted(b):
            first = next(i for i, (left, right) in enumerate(zip(a, b, strict=True)) if left != right)
            yield f"order of the blocks: number {first + 1} is {a[first]} in {labels[0]}, {b[first]} in {labels[1]}"


def _diff_zones(one: Topology, other: Topology, labels: tuple[str, str]) -> Iterator[str]:
    yield from _only_on_one_side(one.zones, other.zones, "zone", labels)
    both = [(i, other.zone_index[zone]) for i, zone in enumerate(one.zones) if zone in other.zone_index]
    moved: dict[tuple[str, str], list[str]] = {}
    for i, j in both:
        above = _zone_name(one, one.parent[i]), _zone_name(other, other.parent[j])
        if above[0] != above[1]:
            moved.setdefault(above, []).append(one.zones[i])
    for (left, right), zones in moved.items():
        yield f"{_format_names(zones, 'zone')}: below {left} in {labels[0]}, below {right} in {labels[1]}"
    speeds: dict[tuple[float, float], list[str]] = {}
    for i, j in both:
        if abs(one.uplink_bandwidth[i] - other.uplink_bandwidth[j]) > 0:  # never where one of them is NaN
            speeds.setdefault((one.uplink_bandwidth[i], other.uplink_bandwidth[j]), []).append(one.zones[i])
    for (a, b), zones in speeds.items():
        yield f"{_format_names(zones, 'zone')}: {a * 8e-9:g} Gbit/s in {labels[0]}, {b * 8e-9:g} Gbit/s in {labels[1]}"


def _diff_nodes(one: Topology, other: Topology, labels: tuple[str, str]) -> Iterator[str]:
    yield from _only_on_one_side(one.nodes, other.nodes, "node", labels)
    moved: dict[tuple[str, str], list[str]] = {}
    for node, leaf in zip(one.nodes, one.leaf.tolist(), strict=True):
        j = other.node_index.get(node)
        if j is not None and (place := (_zone_name(one, leaf), _zone_name(other, other.leaf[j])))[0] != place[1]:
            moved.setdefault(place, []).append(node)
    for (left, right), nodes in moved.items():
        yield f"{_format_names(nodes, 'node')}: in {left} in {labels[0]}, in {right} in {labels[1]}"


def _only_on_one_side(left: Sequence[str], right: Sequence[str], noun: str, labels: tuple[str, str]) -> Iterator[str]:
    for names, known, side in ((left, set(right), labels[0]), (right, set(left), labels[1])):
        alone = [name for name in names if name not in known]
        if alone:
            yield f"{_format_names(alone, noun)}: only in {side}"


def _zone_name(topology: Topology, zone: int) -> str:
    return topology.zones[zone] if zone >= 0 else "no zone"


def _format_names(names: Sequence[str], noun: str) -> str:
    plural = noun if len(names) == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{plural} {truncate(fold_hostlist(names), _MAX_NAMES_WIDTH)}" + \
        (f" ({len(names):,})" if len(names) > 1 else "")
