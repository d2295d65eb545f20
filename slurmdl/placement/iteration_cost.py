"""The cost of a rank map: per phase the busiest link, summed over the phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import sorted_unique
from slurmdl.placement.result import Cost
from slurmdl.placement.traffic import Phase
from slurmdl.topology.topology import MAX_LEVELS, Topology

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SlowInterLeafPaths:
    """Ways between pairs of leaf zones that were found slower or later than the links on them. All others are as good
    as these.

    Attributes
    ----------
    names : as in LinkScores.trunks.
    ends : shape (trunks, 2), indices in `Links.zones`.
    capacity : shape (trunks,), bytes/s.
    delay : shape (trunks,), seconds, one way.
    """

    names: tuple[str, ...]
    leaf_pairs: IntArray
    capacity: FloatArray
    latency: FloatArray


@dataclass(frozen=True, eq=False)
class NetworkLinks:
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
    group : shape (nodes, levels), for each level the highest zone above the node that is not higher; the leaf at
        least, -1 for none. Nodes of one group have no uplink of that level or below between them.
    trunks : slow ways between pairs of these zones.
    """

    nodes: tuple[str, ...]
    zones: tuple[str, ...]
    leaf: IntArray
    ancestors: IntArray
    node_capacity: FloatArray
    zone_capacity: FloatArray
    node_latency: FloatArray
    zone_latency: FloatArray
    zone_level: IntArray
    level_group: IntArray
    slow_paths: SlowInterLeafPaths

    def link_name(self, link: int) -> str:
        """Name of a link, counted through nodes, zones and trunks."""
        for names in (self.nodes, self.zones, self.slow_paths.names):
            if link < len(names):
                return names[link]
            link -= len(names)
        raise IndexError(link)


def network_links(nodes: Sequence[str], topology: Topology, scores: LinkScores) -> NetworkLinks:
    """The links of these nodes, which must be distinct; a node that the topology does not know has no zone."""
    index = topology.node_index
    position = np.fromiter(map(index.get, nodes, repeat(-1)), np.int64, len(nodes))
    above = topology.ancestors(position)
    leaf = above[:, 0] if above.shape[1] else position * 0 - 1
    is_used = np.zeros(len(topology.zones) + 1, bool)
    is_used[above] = True
    used = np.flatnonzero(is_used[:-1])
    renumber = np.full(len(topology.zones) + 1, -1, np.int64)
    renumber[used] = np.arange(len(used))
    zones = tuple(topology.zones[i] for i in used.tolist())
    level = topology.level[used].astype(np.int64)
    node_capacity, node_delay = capacity.node_links(nodes, scores)
    zone_capacity, zone_delay = capacity.zone_uplinks(zones, level, topology.node_count[used], topology.uplink_bandwidth[used],
                                                      scores)
    above = renumber[above]
    return NetworkLinks(tuple(nodes), zones, renumber[leaf], above, node_capacity, zone_capacity, node_delay, zone_delay,
                 level, _level_groups(above, level), _find_slow_paths(zones, zone_capacity, zone_delay, scores))


def _find_slow_paths(zones: Sequence[str], capacities: FloatArray,
                     latencies: FloatArray, scores: LinkScores) -> SlowInterLeafPaths:
    """Those of the measured ways that are slower than the links on them, or later.

    Parameters
    ----------
    capacities, delays : of the uplinks of these zones.
    """
    place = {zone: i for i, zone in enumerate(zones)} if scores.inter_leaf else {}
    names = [name for name in scores.inter_leaf if all(zone in place for zone in name.split("|"))]
    ends = np.array([[place[zone] for zone in name.split("|")] for name in names], np.int64).reshape(-1, 2)
    # the nodes that measured a way bound what they can show of it
    usual = np.minimum(capacities[ends].min(axis=1, initial=np.inf), scores.default_node_bandwidth)
    speed, delay = capacity.inter_leaf_paths(names, usual, scores)
    apart = (speed < usual * (1 - capacity.SLOW_PATH_FRACTION)) | (delay > 2 * \
             latencies[ends].sum(axis=1) + 2 * capacity.TCP_LATENCY_RESOLUTION_S)
    kept = np.flatnonzero(apart)
    return SlowInterLeafPaths(tuple(names[i] for i in kept.tolist()), ends[kept], speed[kept], delay[kept])


def _level_groups(ancestors: IntArray, level: IntArray) -> IntArray:
    """`Links.group`."""
    if not len(level):
        return np.zeros((len(ancestors), 0), np.int64)
    height = np.append(level, MAX_LEVELS)[ancestors]
    # the entries of a row get higher from left to right
    entry = np.stack([(height <= k).sum(axis=1) - 1 for k in range(int(level.max()) + 1)], axis=1)
    return np.asarray(np.take_along_axis(ancestors, entry.clip(min=0), axis=1))


def predict_cost(phases: Sequence[Phase], links: NetworkLinks, node_of_rank: IntArray) -> Cost:
    """Predicted cost of one iteration.

    A phase takes as long as its busiest link or trunk, each direction by itself, and the delay of its rounds.
    Messages inside a node cost nothing.

    Parameters
    ----------
    place : shape (ranks,), entry i is the index in `links.nodes` of the node of rank i.
    """
    seconds = across_nodes = sent = 0.0
    across = np.zeros(links.level_group.shape[1])
    slowest, busiest = 0.0, -1
    for phase in phases:
        load = _phase_load(phase, links, node_of_rank)
        times = _link_times(links, load)
        worst = int(times.argmax())
        if times[worst] > slowest:
            slowest, busiest = float(times[worst]), worst
        seconds += float(_phase_seconds(phase, links, times))
        across_nodes += float(load.node_out.sum())
        across += load.inter_group
        sent += _total_bytes(phase)
    across_zones = float(across[0]) if len(across) else 0.0
    return Cost(seconds, across_nodes, across_zones,
                links.link_name(busiest) if busiest >= 0 else "",
                tuple(across.tolist()), _fraction(sent - across_nodes, sent), _fraction(sent - across_zones, sent),
                int((np.bincount(links.leaf[node_of_rank] + 1, minlength=1)[1:] > 0).sum()))


def _total_bytes(phase: Phase) -> float:
    """Bytes of all messages of a phase, those inside a node included."""
    if not phase.all_pairs:
        return float(np.broadcast_to(phase.bytes_per_pair, phase.source.shape).sum(
            where=phase.source != phase.target))
    return float(phase.bytes_per_pair) * (len(phase.source) * len(phase.target)
                                - len(np.intersect1d(phase.source, phase.target, assume_unique=True)))


def _fraction(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole else 1.0


def ps_split_costs(phases: Sequence[Phase], links: NetworkLinks, servers: IntArray, workers: IntArray) -> FloatArray:
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
        load = _all_pairs_load(phase, links, links.level_group[:, :1],
                               *((servers, workers) if down else (workers, servers)))
        across_zones = load.inter_group[..., 0] if load.inter_group.shape[-1] else np.zeros(len(servers))
        seconds = _phase_seconds(phase, links, _link_times(links, load))
        total += np.stack([seconds, across_zones, load.node_out.sum(axis=-1)], axis=-1)
    return total


@dataclass(frozen=True, eq=False)
class _LinkLoad:
    """Bytes over each link, by direction, and bytes between the groups of each level (`Links.group`).

    The arrays may have leading axes, one entry for each of several ways to place the ranks.
    """

    node_out: FloatArray
    node_in: FloatArray
    zone_out: FloatArray
    zone_in: FloatArray
    inter_leaf: FloatArray
    inter_group: FloatArray


def _link_times(links: NetworkLinks, load: _LinkLoad) -> FloatArray:
    """Seconds that each link is busy; shape (..., nodes + zones + trunks)."""
    return np.concatenate([np.maximum(load.node_out, load.node_in) / links.node_capacity,
                           np.maximum(load.zone_out, load.zone_in) / links.zone_capacity,
                           load.inter_leaf / links.slow_paths.capacity], axis=-1)


def _phase_seconds(phase: Phase, links: NetworkLinks, times: FloatArray) -> FloatArray:
    """The busiest link, and for each round the delay of the slowest loaded link of each level, up and down.

    Parameters
    ----------
    times : as `_times` gives them.
    """
    nodes, zones = len(links.nodes), len(links.nodes) + len(links.zones)
    node_time, zone_time, trunk_time = times[..., :nodes], times[..., nodes:zones], times[..., zones:]
    node = np.where(node_time > 0, links.node_latency, 0.0).max(axis=-1, initial=0.0)
    delay = node
    for level in sorted_unique(links.zone_level):
        loaded = (zone_time > 0) & (links.zone_level == level)
        delay = delay + np.where(loaded, links.zone_latency, 0.0).max(axis=-1, initial=0.0)
    way = np.where(trunk_time > 0, links.slow_paths.latency, 0.0).max(axis=-1, initial=0.0)
    delay = np.maximum(delay, node + way / 2)
    return np.asarray(times.max(axis=-1, initial=0.0) + phase.rounds * 2 * delay, float)


def _phase_load(phase: Phase, links: NetworkLinks, node_of_rank: IntArray) -> _LinkLoad:
    source, target = node_of_rank[phase.source], node_of_rank[phase.target]
    if not phase.all_pairs:
        return _pairwise_load(phase, links, source, target)
    nodes = len(links.nodes)
    return _all_pairs_load(phase, links, links.level_group, np.bincount(source, minlength=nodes),
                    np.bincount(target, minlength=nodes))


def _all_pairs_load(phase: Phase, links: NetworkLinks, groups: IntArray,
                    source_counts: IntArray, target_counts: IntArray) -> _LinkLoad:
    """Every source to every target: the load of a link depends only on how many of each are below it.

    Parameters
    ----------
    groups : columns of `links.group` between which bytes are counted.
    sources, targets : shape (..., nodes), how many are on each node.
    """
    all_sources, all_targets = (count.sum(axis=-1, keepdims=True) for count in (source_counts, target_counts))

    def both_ways(sources_below: FloatArray, targets_below: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Bytes out of and into parts that hold so many of each."""
        return (phase.bytes_per_pair * sources_below * (all_targets - targets_below),
                phase.bytes_per_pair * targets_below * (all_sources - sources_below))

    node_out, node_in = both_ways(source_counts.astype(float), target_counts.astype(float))
    zones = len(links.zones)
    zone_sources, zone_targets = (_sum_by_group(links.ancestors, count, zones)
                                  for count in (source_counts, target_counts))
    zone_out, zone_in = both_ways(zone_sources, zone_targets)
    one, other = links.slow_paths.leaf_pairs.T
    trunk = phase.bytes_per_pair * np.maximum(zone_sources[..., one] * zone_targets[..., other],
                                    zone_sources[..., other] * zone_targets[..., one])
    across = []
    for column in groups.T:
        leaving, _ = both_ways(*(_sum_by_group(column[:, None] + 1, count, zones + 1)
                               for count in (source_counts, target_counts)))
        across.append(leaving.sum(axis=-1))
    return _LinkLoad(node_out, node_in, zone_out, zone_in, trunk,
                 np.stack(across, axis=-1) if across else np.zeros((*source_counts.shape[:-1], 0)))


def _sum_by_group(groups: IntArray, count: IntArray, length: int) -> FloatArray:
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


def _pairwise_load(phase: Phase, links: NetworkLinks, source: IntArray, target: IntArray) -> _LinkLoad:
    apart = source != target
    size = np.broadcast_to(phase.bytes_per_pair, apart.shape)[apart].astype(float)
    source, target = source[apart], target[apart]
    nodes, zones = len(links.nodes), len(links.zones)
    here, there = links.ancestors[source], links.ancestors[target]
    across = [size.sum(where=group[source] != group[target]) for group in links.level_group.T]
    return _LinkLoad(_sum_by_index(source, size, nodes), _sum_by_index(target, size, nodes), _bytes_leaving_zones(here, there, size, zones),
                 _bytes_leaving_zones(there, here, size, zones), _inter_leaf_load(links, source, target, size), np.array(across))


def _inter_leaf_load(links: NetworkLinks, source: IntArray, target: IntArray, size: FloatArray) -> FloatArray:
    """Bytes over each trunk in its busier direction."""
    one, other = links.slow_paths.leaf_pairs.T
    if not len(one):
        return np.zeros(0)
    here, there, zones = links.leaf[source], links.leaf[target], len(links.zones)
    known = (here >= 0) & (there >= 0)
    total = _sum_by_index(here[known] * zones + there[known], size[known], zones * zones).reshape(zones, zones)
    return np.asarray(np.maximum(total[one, other], total[other, one]))


def _sum_by_index(index: IntArray, size: FloatArray, length: int) -> FloatArray:
    return np.bincount(index, size, length).astype(float)


def _bytes_leaving_zones(source_zones: IntArray, target_zones: IntArray, size: FloatArray, zones: int) -> FloatArray:
    """Bytes that leave each zone: those of pairs with the zone above `here` and not above `there`."""
    total = np.zeros(zones)
    for column in source_zones.T:
        left = (column >= 0) & ~(target_zones == column[:, None]).any(axis=1)
        total += _sum_by_index(column[left], size[left], zones)
    return total
