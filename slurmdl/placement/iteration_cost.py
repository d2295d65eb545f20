"""Predicted cost of a rank map: the time of the bottleneck link of each phase of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat

import numpy as np

from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import FloatArray, IntArray, new_indices, sorted_unique
from slurmdl.placement.result import Cost
from slurmdl.topology.topology import MAX_LEVELS, Topology
from slurmdl.traffic import Phase


@dataclass(frozen=True, eq=False)
class SlowInterLeafPaths:
    """Measured paths between leaf zones that are slower than their links; all other paths are as fast as their links.

    `names` are as in LinkScores.inter_leaf; `leaf_pairs`, of shape (paths, 2), holds indices in `NetworkLinks.zones`.
    `capacity` is in bytes/s, `latency` in seconds, one-way; both have shape (paths,).
    """

    names: tuple[str, ...]
    leaf_pairs: IntArray
    capacity: FloatArray
    latency: FloatArray


@dataclass(frozen=True, eq=False)
class NetworkLinks:
    """Links that a set of nodes can load: the link of each node, and the uplinks of the zones above them.

    Attributes:
        nodes: names, shape (nodes,).
        zones: names of the zones above these nodes, in topology order; shape (zones,).
        ancestors: shape (nodes, depth), zones above each node from the leaf upwards, padded with -1; depth > 0.
        node_capacity, zone_capacity: bytes/s in each direction.
        leaf_capacity: bytes/s of each node over a network of its leaf zone's own, shape (nodes,); shape (0,) without
            one: all messages use the node's link.
        rails: adapters that share the node's link equally.
        node_latency, zone_latency: seconds, one-way.
        zone_level: shape (zones,).
        level_group: shape (nodes, levels), for each level the highest ancestor up to that level, at least the leaf,
            or -1. No path within a group uses an uplink of that level or below.
        slow_paths: slow paths between these zones.
    """

    nodes: tuple[str, ...]
    zones: tuple[str, ...]
    ancestors: IntArray
    node_capacity: FloatArray
    zone_capacity: FloatArray
    node_latency: FloatArray
    zone_latency: FloatArray
    zone_level: IntArray
    level_group: IntArray
    slow_paths: SlowInterLeafPaths
    leaf_capacity: FloatArray = field(default_factory=lambda: np.zeros(0))
    rails: int = 1

    @cached_property
    def capacities(self) -> FloatArray:
        """Bytes/s of the links in the order of `_LinkLoad`: rails of the nodes, zones, networks inside leaf zones."""
        rails = np.repeat(self.node_capacity / self.rails, self.rails)
        return np.concatenate([rails, self.zone_capacity, self.leaf_capacity])

    @cached_property
    def link_names(self) -> tuple[str, ...]:
        """Names of `capacities`, then of the slow paths."""
        rails = tuple(name for name in self.nodes for _ in range(self.rails))
        return (*rails, *self.zones, *self.nodes[:len(self.leaf_capacity)], *self.slow_paths.names)

    @property
    def first_zone(self) -> int:
        """Index of the first zone in `capacities`."""
        return len(self.nodes) * self.rails

    @cached_property
    def as_tree(self) -> NetworkLinks:
        """The links as a tree, for searches: the links of the nodes of a leaf zone limit its uplink together."""
        if not len(self.leaf_capacity):
            return self
        leaf_total = np.bincount(self.leaf + 1, self.node_capacity, len(self.zones) + 1)[1:]
        is_leaf = np.isin(np.arange(len(self.zones)), self.leaf)
        zone_capacity = np.where(is_leaf, np.minimum(self.zone_capacity, leaf_total), self.zone_capacity)
        return replace(self, node_capacity=self.leaf_capacity, zone_capacity=zone_capacity,
                       leaf_capacity=np.zeros(0), rails=1)

    @property
    def leaf(self) -> IntArray:
        """Leaf zone of each node, or -1; shape (nodes,)."""
        return self.ancestors[:, 0]


def network_links(nodes: Sequence[str], topology: Topology, scores: LinkScores) -> NetworkLinks:
    """Links of these distinct nodes; a node that is not in the topology has no zone."""
    index = np.fromiter(map(topology.node_index.get, nodes, repeat(-1)), np.int64, len(nodes))
    ancestors = topology.ancestors(index)
    if not ancestors.shape[1]:
        ancestors = np.full((len(index), 1), -1)
    used, new_index, zone_capacity, zone_latency = zone_links(ancestors, topology, scores)
    ancestors = new_index[ancestors]
    zones = tuple(topology.zones[i] for i in used.tolist())
    level = topology.level[used].astype(np.int64)
    node_capacity, node_latency = capacity.node_links(nodes, scores)
    slow_paths = _find_slow_paths(zones, zone_capacity, zone_latency, scores)
    leaf_capacity = np.full(len(nodes) if scores.default_leaf_bandwidth else 0, scores.default_leaf_bandwidth)
    return NetworkLinks(tuple(nodes), zones, ancestors, node_capacity, zone_capacity, node_latency,
                        zone_latency, level, _level_groups(ancestors, level), slow_paths, leaf_capacity,
                        scores.default_rails)


def zone_links(ancestors: IntArray, topology: Topology,
               scores: LinkScores) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """Zones in `ancestors` (-1 is none): topology index, new index by topology index, uplink capacity and latency."""
    is_used = np.zeros(len(topology.zones) + 1, bool)
    is_used[ancestors] = True
    used = np.flatnonzero(is_used[:-1])
    uplinks = capacity.zone_uplinks([topology.zones[i] for i in used.tolist()], topology.level[used],
                                    topology.node_count[used], topology.uplink_bandwidth[used], scores)
    return used, new_indices(used, len(topology.zones)), *uplinks


def _find_slow_paths(zones: Sequence[str], capacities: FloatArray, latencies: FloatArray,
                     scores: LinkScores) -> SlowInterLeafPaths:
    """Measured paths with less bandwidth or more latency than the uplinks of these zones."""
    index = {zone: i for i, zone in enumerate(zones)} if scores.inter_leaf else {}
    names = [name for name in scores.inter_leaf if all(zone in index for zone in name.split("|"))]
    pairs = np.array([[index[zone] for zone in name.split("|")] for name in names], np.int64).reshape(-1, 2)
    # the nodes that measured a path bound its measured bandwidth
    expected = np.minimum(capacities[pairs].min(axis=1, initial=np.inf), scores.default_node_bandwidth)
    bandwidth, latency = capacity.inter_leaf_paths(names, expected, scores)
    max_latency = 2 * latencies[pairs].sum(axis=1) + 2 * capacity.TCP_LATENCY_RESOLUTION_S
    slow = np.flatnonzero((bandwidth < expected * (1 - capacity.SLOW_PATH_FRACTION)) | (latency > max_latency))
    return SlowInterLeafPaths(tuple(names[i] for i in slow.tolist()), pairs[slow], bandwidth[slow], latency[slow])


def _level_groups(ancestors: IntArray, level: IntArray) -> IntArray:
    """Compute `NetworkLinks.level_group`."""
    if not len(level):
        return np.zeros((len(ancestors), 0), np.int64)
    height = np.append(level, MAX_LEVELS)[ancestors]
    # heights ascend within a row
    column = np.stack([(height <= k).sum(axis=1) - 1 for k in range(int(level.max()) + 1)], axis=1)
    return np.asarray(np.take_along_axis(ancestors, column.clip(min=0), axis=1))


def predict_cost(phases: Sequence[Phase], links: NetworkLinks, node_of_rank: IntArray) -> Cost:
    """Predicted cost of one iteration; `node_of_rank`, shape (ranks,), holds indices in `links.nodes`.

    A phase takes the time of its busiest link or slow path in its busier direction, plus the latency of its rounds.
    Messages inside a node are free.
    """
    seconds = inter_node = total = 0.0
    by_level = np.zeros(links.level_group.shape[1])
    max_time, bottleneck = 0.0, -1
    for phase in phases:
        load = _phase_load(phase, links, node_of_rank)
        times = _link_times(links, load)
        slowest = int(times.argmax())
        if times[slowest] > max_time:
            max_time, bottleneck = float(times[slowest]), slowest
        seconds += float(_phase_seconds(phase, links, times))
        inter_node += float(load.node_bytes(links))
        by_level += load.inter_group
        total += _total_bytes(phase)
    inter_zone = float(by_level[0]) if len(by_level) else 0.0
    leaf_zones = np.bincount(links.leaf[node_of_rank] + 1, minlength=1)[1:] > 0
    intra_node, intra_zone = (min(max((total - part) / total, 0.0), 1.0) if total else 1.0
                              for part in (inter_node, inter_zone))
    return Cost(seconds, inter_node, inter_zone, links.link_names[bottleneck] if bottleneck >= 0 else "",
                tuple(by_level.tolist()), intra_node, intra_zone, int(leaf_zones.sum()))


def ps_split_costs(phases: Sequence[Phase], links: NetworkLinks, servers: IntArray, workers: IntArray) -> FloatArray:
    """Costs of many assignments of servers and workers at once.

    The phases are between all servers, which have the lower ranks, and all workers. `servers` and `workers`, of shape
    (assignments, nodes), count the tasks of each role on each node. The result has shape (assignments, 3): seconds,
    bytes between zones, bytes between nodes.
    """
    total = np.zeros((len(servers), 3))
    for phase in phases:
        counts = (servers, workers) if phase.source[0] < phase.target[0] else (workers, servers)
        load = _all_pairs_load(phase, links, links.level_group[:, :1], *counts)
        inter_zone = load.inter_group[..., 0] if load.inter_group.shape[-1] else np.zeros(len(servers))
        seconds = _phase_seconds(phase, links, _link_times(links, load))
        total += np.stack([seconds, inter_zone, load.node_bytes(links)], axis=-1)
    return total


def _total_bytes(phase: Phase) -> float:
    """Bytes of all messages of a phase, including messages inside a node."""
    if not phase.all_pairs:
        return float(np.broadcast_to(phase.bytes_per_pair, phase.source.shape).sum(
            where=phase.source != phase.target))
    to_self = 0 if phase.has_two_roles else len(phase.source)
    return float(phase.bytes_per_pair) * (len(phase.source) * len(phase.target) - to_self)


@dataclass(frozen=True, eq=False)
class _LinkLoad:
    """Bytes over links; the arrays may have leading axes for several assignments of the ranks.

    Attributes:
        outbound, inbound: bytes over each of `NetworkLinks.capacities`; shape (..., links).
        inter_leaf: bytes over each slow path in its busier direction.
        inter_group: bytes between the groups of each level (`NetworkLinks.level_group`).
    """

    outbound: FloatArray
    inbound: FloatArray
    inter_leaf: FloatArray
    inter_group: FloatArray

    def node_bytes(self, links: NetworkLinks) -> FloatArray:
        """Bytes between nodes; shape (...)."""
        in_leaves = self.outbound[..., links.first_zone + len(links.zones):]
        return np.asarray(self.outbound[..., :links.first_zone].sum(axis=-1) + in_leaves.sum(axis=-1))


def _link_times(links: NetworkLinks, load: _LinkLoad) -> FloatArray:
    """Busy seconds of each link; shape (..., links + slow paths)."""
    return np.concatenate([np.maximum(load.outbound, load.inbound) / links.capacities,
                           load.inter_leaf / links.slow_paths.capacity], axis=-1)


def _phase_seconds(phase: Phase, links: NetworkLinks, times: FloatArray) -> FloatArray:
    """Time of the busiest link, and for each round the highest latency of a loaded link of each level, up and down.

    `times` are the result of `_link_times`.
    """
    first, last, paths = links.first_zone, links.first_zone + len(links.zones), len(links.capacities)
    node_time, zone_time, path_time = times[..., :first], times[..., first:last], times[..., paths:]
    rail_latency = np.repeat(links.node_latency, links.rails) if links.rails > 1 else links.node_latency
    node_latency = np.where(node_time > 0, rail_latency, 0.0).max(axis=-1, initial=0.0)
    if paths > last:
        leaf_latency = np.where(times[..., last:paths] > 0, links.node_latency, 0.0)
        node_latency = np.maximum(node_latency, leaf_latency.max(axis=-1, initial=0.0))
    latency = node_latency
    for level in sorted_unique(links.zone_level):
        is_loaded = (zone_time > 0) & (links.zone_level == level)
        latency = latency + np.where(is_loaded, links.zone_latency, 0.0).max(axis=-1, initial=0.0)
    path_latency = np.where(path_time > 0, links.slow_paths.latency, 0.0).max(axis=-1, initial=0.0)
    latency = np.maximum(latency, node_latency + path_latency / 2)
    return np.asarray(times.max(axis=-1, initial=0.0) + phase.rounds * 2 * latency, float)


def _phase_load(phase: Phase, links: NetworkLinks, node_of_rank: IntArray) -> _LinkLoad:
    source, target = node_of_rank[phase.source], node_of_rank[phase.target]
    if phase.all_pairs:
        counts = (np.bincount(node, minlength=len(links.nodes)) for node in (source, target))
        return _all_pairs_load(phase, links, links.level_group, *counts)
    is_remote = source != target
    size = np.broadcast_to(phase.bytes_per_pair, is_remote.shape)[is_remote].astype(float)
    source, target = source[is_remote], target[is_remote]
    inter_group = [size.sum(where=group[source] != group[target]) for group in links.level_group.T]
    rail = _rail_of_rank(links, node_of_rank)
    source_rail, target_rail = rail[phase.source[is_remote]], rail[phase.target[is_remote]]
    return _LinkLoad(_outbound_bytes(links, source, target, size, source_rail),
                     _outbound_bytes(links, target, source, size, target_rail),
                     _inter_leaf_load(links, source, target, size), np.array(inter_group))


def _rail_of_rank(links: NetworkLinks, node_of_rank: IntArray) -> IntArray:
    """Index in `NetworkLinks.capacities` of the rail over which each rank sends beyond its leaf zone."""
    if links.rails == 1:
        return node_of_rank
    order = np.argsort(node_of_rank, kind="stable")
    begin = np.searchsorted(node_of_rank[order], np.arange(len(links.nodes)))
    local_rank = np.empty_like(node_of_rank)
    local_rank[order] = np.arange(len(order)) - begin[node_of_rank[order]]
    return np.asarray(node_of_rank * links.rails + local_rank % links.rails)


def _all_pairs_load(phase: Phase, links: NetworkLinks, groups: IntArray, source_counts: IntArray,
                    target_counts: IntArray) -> _LinkLoad:
    """Load of a phase from every source to every target; it depends only on their numbers below each link.

    `groups` are columns of `links.level_group`; the counts have shape (..., nodes).
    """
    all_sources, all_targets = (counts.sum(axis=-1, keepdims=True) for counts in (source_counts, target_counts))

    def both_directions(sources: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Bytes out of and into parts with these numbers of sources and targets."""
        return (phase.bytes_per_pair * sources * (all_targets - targets),
                phase.bytes_per_pair * targets * (all_sources - sources))

    def both_sums(groups: IntArray, length: int) -> tuple[FloatArray, FloatArray]:
        return _sum_by_group(groups, source_counts, length), _sum_by_group(groups, target_counts, length)

    zones = len(links.zones)
    sources, targets = both_sums(links.ancestors, zones)
    by_node = both_directions(source_counts.astype(float), target_counts.astype(float))
    by_zone = both_directions(sources, targets)
    in_leaf = [np.zeros((*source_counts.shape[:-1], 0))] * 2
    if len(links.leaf_capacity):
        # a node's traffic with the rest of its leaf zone
        in_leaf = [phase.bytes_per_pair * here * (np.where(links.leaf >= 0, in_zone[..., links.leaf], there) - there)
                   for here, there, in_zone in ((source_counts, target_counts, targets),
                                                (target_counts, source_counts, sources))]
        by_node = (by_node[0] - in_leaf[0], by_node[1] - in_leaf[1])
    # the ranks of a node load its rails alike
    outbound, inbound = (np.concatenate([np.repeat(node / links.rails, links.rails, axis=-1), zone, leaf], axis=-1)
                         for node, zone, leaf in zip(by_node, by_zone, in_leaf, strict=True))
    left, right = links.slow_paths.leaf_pairs.T
    inter_leaf = phase.bytes_per_pair * np.maximum(sources[..., left] * targets[..., right],
                                                   sources[..., right] * targets[..., left])
    inter_group = np.zeros((*source_counts.shape[:-1], groups.shape[1]))
    for k, group in enumerate(groups.T):
        inter_group[..., k] = both_directions(*both_sums(group[:, None] + 1, zones + 1))[0].sum(axis=-1)
    return _LinkLoad(outbound, inbound, inter_leaf, inter_group)


def _sum_by_group(groups: IntArray, counts: IntArray, length: int) -> FloatArray:
    """Sum over the groups of each node, shape (nodes, groups), -1 for none: (..., nodes) -> (..., length)."""
    rows = counts.reshape(-1, counts.shape[-1])
    offset = length * np.arange(len(rows))[:, None]
    total = np.zeros(length * len(rows))
    for group in groups.T:
        inside = group >= 0
        total += np.bincount((offset + group[inside]).ravel(), rows[:, inside].ravel(), len(total))
    return total.reshape(*counts.shape[:-1], length)


def _inter_leaf_load(links: NetworkLinks, source: IntArray, target: IntArray, size: FloatArray) -> FloatArray:
    """Bytes over each slow path in its busier direction."""
    left, right = links.slow_paths.leaf_pairs.T
    if not len(left):
        return np.zeros(0)
    source_leaf, target_leaf, zones = links.leaf[source], links.leaf[target], len(links.zones)
    known = (source_leaf >= 0) & (target_leaf >= 0)
    pair = source_leaf[known] * zones + target_leaf[known]
    total = np.bincount(pair, size[known], zones * zones).reshape(zones, zones)
    return np.asarray(np.maximum(total[left, right], total[right, left]))


def _outbound_bytes(links: NetworkLinks, source: IntArray, target: IntArray, size: FloatArray,
                    rail: IntArray) -> FloatArray:
    """Bytes over each link, from nodes and zones that are above the source but not above the target of a message.

    `rail` is the rail of each message.
    """
    zones, target_zones = np.zeros(len(links.zones)), links.ancestors[target]
    for column in links.ancestors[source].T:
        leaves = (column >= 0) & ~(target_zones == column[:, None]).any(axis=1)
        zones += np.bincount(column[leaves], size[leaves], len(zones))
    if not len(links.leaf_capacity):
        return np.concatenate([np.bincount(rail, size, links.first_zone), zones])
    inside = (links.leaf[source] == links.leaf[target]) & (links.leaf[source] >= 0)
    return np.concatenate([np.bincount(rail[~inside], size[~inside], links.first_zone), zones,
                           np.bincount(source[inside], size[inside], len(links.nodes))])
