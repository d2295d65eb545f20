"""The cost of a rank map: per phase the busiest link, summed over the phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.network import capacity
from slurmdl.network.model import LinkScores
from slurmdl.placement.model import Cost
from slurmdl.placement.traffic import Phase
from slurmdl.topology.model import Topology

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Links:
    """The links that a set of nodes can load: the link of each node, and the uplinks of the zones above them.

    Attributes
    ----------
    nodes : shape (nodes,), names.
    zones : shape (zones,), names of the zones above these nodes only, in the order of the topology.
    leaf : shape (nodes,), index of each node's leaf in `zones`, -1 for none.
    above : shape (nodes, depth), the zones above each node from the leaf upwards, -1 where there are no more.
    node_capacity, zone_capacity : bytes/s, the same in both directions.
    node_delay, zone_delay : seconds, one way.
    zone_level : shape (zones,), height of each zone.
    """

    nodes: tuple[str, ...]
    zones: tuple[str, ...]
    leaf: IntArray
    above: IntArray
    node_capacity: FloatArray
    zone_capacity: FloatArray
    node_delay: FloatArray
    zone_delay: FloatArray
    zone_level: IntArray


def links(nodes: Sequence[str], topology: Topology, scores: LinkScores) -> Links:
    """The links of these nodes, which must be distinct; a node that the topology does not know has no zone."""
    position = np.array([topology.node_index.get(node, -1) for node in nodes], np.int64)
    leaf = np.full(len(nodes), -1, np.int64)
    if len(topology.nodes):
        leaf[position >= 0] = topology.leaf[position[position >= 0]]
    columns, current = [], leaf
    while (current >= 0).any():
        columns.append(current)
        current = np.where(current >= 0, topology.parent[current], -1) if len(topology.zones) else current
    above = np.stack(columns, axis=1) if columns else np.full((len(nodes), 0), -1, np.int64)
    used = np.unique(above[above >= 0])
    renumber = np.full(len(topology.zones) + 1, -1, np.int64)
    renumber[used] = np.arange(len(used))
    node_capacity, node_delay = capacity.node_links(nodes, scores)
    zone_capacity, zone_delay = capacity.zone_uplinks(topology.zones, topology.level, topology.speed, scores)
    return Links(tuple(nodes), tuple(topology.zones[i] for i in used), renumber[leaf], renumber[above],
                 node_capacity, zone_capacity[used], node_delay, zone_delay[used],
                 topology.level[used].astype(np.int64))


def cost(phases: Sequence[Phase], links: Links, place: IntArray) -> Cost:
    """Predicted cost of one iteration.

    A phase takes as long as its busiest link, each direction by itself, and the delay of its rounds. Messages
    inside a node cost nothing.

    Parameters
    ----------
    place : shape (ranks,), entry i is the index in `links.nodes` of the node of rank i.
    """
    seconds = across_nodes = across_zones = 0.0
    slowest, busiest = 0.0, ""
    for phase in phases:
        load = _load(phase, links, place)
        node_time = np.maximum(load.node_out, load.node_in) / links.node_capacity
        zone_time = np.maximum(load.zone_out, load.zone_in) / links.zone_capacity
        times = np.concatenate([node_time, zone_time])
        worst = int(times.argmax()) if len(times) else 0
        if times[worst] > slowest:
            slowest = float(times[worst])
            busiest = (links.nodes + links.zones)[worst]
        seconds += float(times[worst]) + phase.rounds * _delay(links, node_time, zone_time)
        across_nodes += float(load.node_out.sum())
        across_zones += load.across_leaves
    return Cost(seconds, across_nodes, across_zones, busiest)


@dataclass(frozen=True, eq=False)
class _Load:
    """Bytes over each link, by direction, and bytes that leave the leaf zone they come from."""

    node_out: FloatArray
    node_in: FloatArray
    zone_out: FloatArray
    zone_in: FloatArray
    across_leaves: float


def _load(phase: Phase, links: Links, place: IntArray) -> _Load:
    return (_crossed if phase.crossed else _paired)(phase, links, place[phase.source], place[phase.target])


def _crossed(phase: Phase, links: Links, source: IntArray, target: IntArray) -> _Load:
    """Every source to every target: the load of a link depends only on how many of each are below it."""
    sources, targets = (_count(ranks, len(links.nodes)) for ranks in (source, target))

    def both_ways(sources_below: FloatArray, targets_below: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Bytes out of and into parts that hold so many of each."""
        return (phase.size * sources_below * (len(target) - targets_below),
                phase.size * targets_below * (len(source) - sources_below))

    node_out, node_in = both_ways(sources, targets)
    zone_out, zone_in = both_ways(_below(links, sources), _below(links, targets))
    out_of_leaves, _ = both_ways(_in_leaf(links, sources), _in_leaf(links, targets))
    return _Load(node_out, node_in, zone_out, zone_in, float(out_of_leaves.sum()))


def _in_leaf(links: Links, count: FloatArray) -> FloatArray:
    """Sum over the nodes of each leaf; the first entry is that of the nodes without one."""
    return np.bincount(links.leaf + 1, count, len(links.zones) + 1).astype(float)


def _below(links: Links, count: FloatArray) -> FloatArray:
    """Sum over the nodes below each zone."""
    total = np.zeros(len(links.zones))
    for column in links.above.T:
        inside = column >= 0
        total += np.bincount(column[inside], count[inside], len(links.zones))
    return total


def _paired(phase: Phase, links: Links, source: IntArray, target: IntArray) -> _Load:
    apart = source != target
    source, target = source[apart], target[apart]
    zones, nodes = len(links.zones), len(links.nodes)
    size = float(phase.size)
    return _Load(size * _count(source, nodes), size * _count(target, nodes),
                 size * _leaving(links.above[source], links.above[target], zones),
                 size * _leaving(links.above[target], links.above[source], zones),
                 size * float((links.leaf[source] != links.leaf[target]).sum()))


def _count(index: IntArray, length: int) -> FloatArray:
    return np.bincount(index, minlength=length).astype(float)


def _leaving(here: IntArray, there: IntArray, zones: int) -> FloatArray:
    """How many of the pairs leave each zone: those with the zone above `here` and not above `there`."""
    total = np.zeros(zones)
    for column in here.T:
        left = (column >= 0) & ~(there == column[:, None]).any(axis=1)
        total += _count(column[left], zones)
    return total


def _delay(links: Links, node_time: FloatArray, zone_time: FloatArray) -> float:
    """Delay of one message on the longest way: the slowest loaded link of each level, up and down."""
    total = 2 * float(links.node_delay[node_time > 0].max(initial=0.0))
    loaded = zone_time > 0
    for level in np.unique(links.zone_level[loaded]):
        total += 2 * float(links.zone_delay[loaded & (links.zone_level == level)].max())
    return total
