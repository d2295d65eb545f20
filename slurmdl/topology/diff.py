"""How two topologies differ: zones, their places, the zones of nodes, the speeds of links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmdl.topology.hostlist import fold
from slurmdl.topology.model import Topology
from slurmdl.topology.topologies import Topologies
from slurmdl.topology.tree import cut

#: widest list of names in a line
_MAX_NAMES = 60


def between(one: Topologies, other: Topologies, sides: tuple[str, str], name: str | None = None) -> list[str]:
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
    if len(one.each) == len(other.each) == 1:
        return differences(one.of(name), other.each[0], sides)
    lines: list[str] = []
    if name is None:
        lines += _missing(one.names, other.names, "topology", sides)
    if name is None and one.default != other.default:
        lines.append(f"default topology: {one.default} in {sides[0]}, {other.default} in {sides[1]}")
    for common in [name] if name else [name for name in one.names if name in other.names]:
        lines += [f"{common}: {line}" for line in differences(one.of(common), other.of(common), sides)]
    return lines


def differences(one: Topology, other: Topology, sides: tuple[str, str]) -> list[str]:
    """One line for each difference, none where the two agree.

    Names are compared, not the order in which they stand; only that of blocks counts, since Slurm aggregates
    neighbours. What differs in the same way shares a line. LinkSpeed is compared where both give it.
    """
    return [*_kinds(one, other, sides), *_zones(one, other, sides), *_nodes(one, other, sides)]


def _kinds(one: Topology, other: Topology, sides: tuple[str, str]) -> Iterator[str]:
    if one.kind != other.kind:
        yield f"kind: {one.kind} in {sides[0]}, {other.kind} in {sides[1]}"
    elif one.kind == "block":
        a, b = ([zone for zone, level in zip(t.zones, t.level.tolist(), strict=True) if not level]
                for t in (one, other))
        if a != b and sorted(a) == sorted(b):
            first = next(i for i, (left, right) in enumerate(zip(a, b, strict=True)) if left != right)
            yield f"order of the blocks: number {first + 1} is {a[first]} in {sides[0]}, {b[first]} in {sides[1]}"


def _zones(one: Topology, other: Topology, sides: tuple[str, str]) -> Iterator[str]:
    yield from _missing(one.zones, other.zones, "zone", sides)
    both = [(i, other.zone_index[zone]) for i, zone in enumerate(one.zones) if zone in other.zone_index]
    moved: dict[tuple[str, str], list[str]] = {}
    for i, j in both:
        above = _place(one, one.parent[i]), _place(other, other.parent[j])
        if above[0] != above[1]:
            moved.setdefault(above, []).append(one.zones[i])
    for (left, right), zones in moved.items():
        yield f"{_some(zones, 'zone')}: below {left} in {sides[0]}, below {right} in {sides[1]}"
    speeds: dict[tuple[float, float], list[str]] = {}
    for i, j in both:
        if abs(one.speed[i] - other.speed[j]) > 0:  # never where one of them is NaN
            speeds.setdefault((one.speed[i], other.speed[j]), []).append(one.zones[i])
    for (a, b), zones in speeds.items():
        yield f"{_some(zones, 'zone')}: {a * 8e-9:g} Gbit/s in {sides[0]}, {b * 8e-9:g} Gbit/s in {sides[1]}"


def _nodes(one: Topology, other: Topology, sides: tuple[str, str]) -> Iterator[str]:
    yield from _missing(one.nodes, other.nodes, "node", sides)
    moved: dict[tuple[str, str], list[str]] = {}
    for node, leaf in zip(one.nodes, one.leaf.tolist(), strict=True):
        j = other.node_index.get(node)
        if j is not None and (place := (_place(one, leaf), _place(other, other.leaf[j])))[0] != place[1]:
            moved.setdefault(place, []).append(node)
    for (left, right), nodes in moved.items():
        yield f"{_some(nodes, 'node')}: in {left} in {sides[0]}, in {right} in {sides[1]}"


def _missing(one: Sequence[str], other: Sequence[str], noun: str, sides: tuple[str, str]) -> Iterator[str]:
    for names, known, side in ((one, set(other), sides[0]), (other, set(one), sides[1])):
        alone = [name for name in names if name not in known]
        if alone:
            yield f"{_some(alone, noun)}: only in {side}"


def _place(topology: Topology, zone: int) -> str:
    return topology.zones[zone] if zone >= 0 else "no zone"


def _some(names: Sequence[str], noun: str) -> str:
    plural = noun if len(names) == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{plural} {cut(fold(names), _MAX_NAMES)}" + \
        (f" ({len(names):,})" if len(names) > 1 else "")
