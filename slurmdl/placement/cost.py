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
    above = topology.above(position)
    leaf = above[:, 0] if above.shape[1] else position * 0 - 1
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
        times = np.concatenate(_times(links, load))
        worst = int(times.argmax())
        if times[worst] > slowest:
            slowest = float(times[worst])
            busiest = (links.nodes + links.zones)[worst]
        seconds += float(_seconds(phase, links, load))
        across_nodes += float(load.node_out.sum())
        across_zones += float(load.across_leaves)
    return Cost(seconds, across_nodes, across_zones, busiest)


def role_costs(phases: Sequence[Phase], links: Links, servers: IntArray, workers: IntArray) -> FloatArray:
    """Costs of many ways to deal out two roles at once, where each phase goes from one role to all of the other.

    Parameters
    ----------
    phases : crossed phases; the ranks of the servers come before those of the workers.
    servers, workers : shape (ways, nodes), tasks of each role on each node.

    Returns
    -------
    shape (ways, 3): seconds, bytes across zones, bytes across nodes, as `cost` gives them.
    """
    total = np.zeros((len(servers), 3))
    for phase in phases:
        down = phase.source[0] < phase.target[0]
        load = _crossed(phase, links, *((servers, workers) if down else (workers, servers)))
        total += np.stack([_seconds(phase, links, load), load.across_leaves, load.node_out.sum(axis=-1)], axis=-1)
    return total


@dataclass(frozen=True, eq=False)
class _Load:
    """Bytes over each link, by direction, and bytes that leave the leaf zone they come from.

    The arrays may have leading axes, one entry for each of several ways to place the ranks.
    """

    node_out: FloatArray
    node_in: FloatArray
    zone_out: FloatArray
    zone_in: FloatArray
    across_leaves: FloatArray


def _times(links: Links, load: _Load) -> tuple[FloatArray, FloatArray]:
    """Seconds that the link of each node and the uplink of each zone are busy."""
    return (np.maximum(load.node_out, load.node_in) / links.node_capacity,
            np.maximum(load.zone_out, load.zone_in) / links.zone_capacity)


def _seconds(phase: Phase, links: Links, load: _Load) -> FloatArray:
    """The busiest link, and for each round the delay of the slowest loaded link of each level, up and down."""
    node_time, zone_time = _times(links, load)
    delay = np.where(node_time > 0, links.node_delay, 0.0).max(axis=-1, initial=0.0)
    for level in np.unique(links.zone_level):
        loaded = (zone_time > 0) & (links.zone_level == level)
        delay = delay + np.where(loaded, links.zone_delay, 0.0).max(axis=-1, initial=0.0)
    busiest = np.maximum(node_time.max(axis=-1, initial=0.0), zone_time.max(axis=-1, initial=0.0))
    return np.asarray(busiest + phase.rounds * 2 * delay, float)


def _load(phase: Phase, links: Links, place: IntArray) -> _Load:
    source, target = place[phase.source], place[phase.target]
    if not phase.crossed:
        return _paired(phase, links, source, target)
    return _crossed(phase, links, *(_count(ranks, len(links.nodes)).astype(np.int64) for ranks in (source, target)))


def _crossed(phase: Phase, links: Links, sources: IntArray, targets: IntArray) -> _Load:
    """Every source to every target: the load of a link depends only on how many of each are below it.

    Parameters
    ----------
    sources, targets : shape (..., nodes), how many are on each node.
    """
    all_sources, all_targets = (count.sum(axis=-1, keepdims=True) for count in (sources, targets))

    def both_ways(sources_below: FloatArray, targets_below: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Bytes out of and into parts that hold so many of each."""
        return (phase.size * sources_below * (all_targets - targets_below),
                phase.size * targets_below * (all_sources - sources_below))

    node_out, node_in = both_ways(sources.astype(float), targets.astype(float))
    zones = len(links.zones)
    zone_out, zone_in = both_ways(*(_sums(links.above, count, zones) for count in (sources, targets)))
    leaf = np.where(links.leaf >= 0, links.leaf, zones)[:, None]
    out_of_leaves, _ = both_ways(*(_sums(leaf, count, zones + 1) for count in (sources, targets)))
    return _Load(node_out, node_in, zone_out, zone_in, out_of_leaves.sum(axis=-1))


def _sums(groups: IntArray, count: IntArray, length: int) -> FloatArray:
    """Sum of the nodes' counts in each group.

    Parameters
    ----------
    groups : shape (nodes, groups of a node), -1 for none.
    count : shape (..., nodes).
    length : number of groups.
    """
    rows = count.reshape(-1, count.shape[-1])
    first = length * np.arange(len(rows))[:, None]
    total = np.zeros(length * len(rows))
    for column in groups.T:
        inside = column >= 0
        total += np.bincount((first + column[inside]).ravel(), rows[:, inside].ravel(), len(total))
    return total.reshape(*count.shape[:-1], length)


def _paired(phase: Phase, links: Links, source: IntArray, target: IntArray) -> _Load:
    apart = source != target
    source, target = source[apart], target[apart]
    zones, nodes = len(links.zones), len(links.nodes)
    size = float(phase.size)
    return _Load(size * _count(source, nodes), size * _count(target, nodes),
                 size * _leaving(links.above[source], links.above[target], zones),
                 size * _leaving(links.above[target], links.above[source], zones),
                 np.asarray(size * (links.leaf[source] != links.leaf[target]).sum()))


def _count(index: IntArray, length: int) -> FloatArray:
    return np.bincount(index, minlength=length).astype(float)


def _leaving(here: IntArray, there: IntArray, zones: int) -> FloatArray:
    """How many of the pairs leave each zone: those with the zone above `here` and not above `there`."""
    total = np.zeros(zones)
    for column in here.T:
        left = (column >= 0) & ~(there == column[:, None]).any(axis=1)
        total += _count(column[left], zones)
    return total
