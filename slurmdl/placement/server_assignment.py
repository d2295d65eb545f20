"""Assignment of the parameter servers to given nodes.

The cost of synchronous parameter-server traffic depends only on the numbers of servers and workers below each link,
and on given nodes the servers determine the workers. The time of a link falls and rises again with its servers, so a
time T gives each zone an interval of servers, and intervals add up: the least T is found by bisection. Among the
splits within T, bytes between zones are a separable convex function; adding servers one by one at the least cost
minimizes it (Federgruen and Groenevelt, The greedy procedure for resource allocation problems, 1986). Inside a zone
the servers get the best links, one per node while there are nodes. In small jobs single servers are then moved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slurmdl.placement.arrays import FloatArray, IntArray, round_mantissa, sorted_unique
from slurmdl.placement.iteration_cost import NetworkLinks, ps_split_costs
from slurmdl.traffic import Phase, count_shards

MAX_MOVES = 256  # moves of a server between two nodes in a round
MAX_ROUNDS = 16  # rounds of moves


def assign_servers(network: NetworkLinks, tasks: IntArray, phases: Sequence[Phase], ps: int,
                   required_node: int | None = None) -> IntArray:
    """Number of parameter servers among the tasks of each node; shape (nodes,), sum `ps`, at most `tasks`.

    The phases are between servers (ranks below `ps`) and workers. `tasks` has shape (nodes,).
    `required_node`, if any, has a task and must hold a server.
    """

    def best_of(servers: IntArray) -> IntArray:
        """First assignment with the least cost, then the fewest servers on shared nodes: (n, nodes) -> (nodes,)."""
        if required_node is not None:
            servers = servers[servers[:, required_node] > 0]
        costs = ps_split_costs(phases, network, servers, tasks - servers)
        crowded = (servers - 1).clip(min=0).sum(axis=1)
        keys = round_mantissa(np.column_stack([costs, crowded]))
        return np.asarray(servers[np.lexsort(keys.T[::-1])[0]])

    servers = _LeafServerSplit(network, tasks, ps, required_node).node_servers()
    for _ in range(MAX_ROUNDS if ps * len(tasks) <= MAX_MOVES else 0):
        better = best_of(_neighbor_assignments(tasks, servers))
        if (better == servers).all():
            break
        servers = better
    return servers


def _neighbor_assignments(tasks: IntArray, servers: IntArray) -> IntArray:
    """The assignment itself, and each move of one server to another node; shape (assignments, nodes)."""
    sources, targets = np.flatnonzero(servers), np.flatnonzero(servers < tasks)
    source, target = (ends.ravel() for ends in np.meshgrid(sources, targets, indexing="ij"))
    source, target = source[source != target], target[source != target]
    assignments = np.repeat(servers[None], len(source) + 1, axis=0)
    row = 1 + np.arange(len(source))
    assignments[row, source] -= 1
    assignments[row, target] += 1
    return assignments


class _Bounds(NamedTuple):
    """Bounds on the number of servers: per leaf, and of zones as (leaves, fewest, most)."""

    fewest: IntArray
    most: IntArray
    zones: list[tuple[IntArray, int, int]]


class _LeafServerSplit:
    """Split of the servers over the leaf zones of given nodes; each node without a zone is a leaf of its own.

    Attributes:
        leaf_tasks, leaf_sizes: tasks and nodes of each leaf.
        nodes_by_leaf, position_in_leaf: shape (nodes,); nodes sorted by leaf, and the position of each node.
        required_leaf: leaf that must hold a server, if any.
        host_order: node of each task, sorted by leaf, in the order in which they become servers.
        pair_leaf, pair_zone: pairs of a leaf and a zone above it; nodes without a zone have no uplink.
    """

    def __init__(self, network: NetworkLinks, tasks: IntArray, ps: int, required_node: int | None) -> None:
        self.network, self.tasks, self.ps = network, tasks, ps
        self.workers = int(tasks.sum()) - ps
        leaf = np.where(network.leaf >= 0, network.leaf, len(network.zones) + np.arange(len(tasks)))
        leaf = np.searchsorted(sorted_unique(leaf), leaf)
        self.leaf_tasks = np.bincount(leaf, tasks).astype(np.int64)
        self.nodes_by_leaf, self.leaf_sizes = np.argsort(leaf, kind="stable"), np.bincount(leaf)
        self.position_in_leaf = np.empty_like(leaf)
        self.position_in_leaf[self.nodes_by_leaf] = _concatenated_ranges(self.leaf_sizes)
        self.required_leaf = None if required_node is None else int(leaf[required_node])
        node, position = np.repeat(np.arange(len(tasks)), tasks), _concatenated_ranges(tasks)
        is_optional = (node != required_node) | (position > 0)
        self.host_order = node[np.lexsort((node, -network.node_capacity[node], position, is_optional, leaf[node]))]
        ancestors = network.ancestors[self.nodes_by_leaf[np.cumsum(self.leaf_sizes) - self.leaf_sizes]]
        self.pair_leaf, column = np.nonzero(ancestors >= 0)
        self.pair_zone = ancestors[self.pair_leaf, column]

    def node_servers(self) -> IntArray:
        """Servers per node: least time, then fewest bytes between zones."""
        times = round_mantissa(self.leaf_times())
        zone_times = []
        for zone in np.flatnonzero(np.bincount(self.pair_zone) > 1):
            leaves = self.pair_leaf[self.pair_zone == zone]
            load = self.link_load(np.arange(self.ps + 1), int(self.leaf_tasks[leaves].sum()))
            zone_times.append((leaves, round_mantissa(load / self.network.zone_capacity[zone])))
        zone_times.sort(key=lambda entry: len(entry[0]))
        # the least time is the time of a link
        possible = sorted_unique(np.concatenate([times[np.isfinite(times)], *(time for _, time in zone_times)]))
        least = bisect_left(possible, True, key=lambda time: self.server_bounds(times, zone_times, time) is not None)
        bounds = self.server_bounds(times, zone_times, possible[least])
        assert bounds is not None
        split = self.min_inter_leaf_split(bounds)
        is_server = _concatenated_ranges(self.leaf_tasks) < np.repeat(split, self.leaf_tasks)
        return np.bincount(self.host_order[is_server], minlength=len(self.tasks))

    def link_load(self, servers: IntArray, tasks: IntArray | int) -> FloatArray:
        """Shards over a link with these servers among these tasks on one side."""
        return np.asarray(count_shards(servers, tasks - servers, self.ps, self.workers), float)

    def leaf_times(self) -> FloatArray:
        """Time of each leaf's links by its servers, infinite if they do not fit; shape (leaves, servers + 1)."""
        times = np.full((len(self.leaf_tasks), self.ps + 1), np.inf)
        size_class = self.leaf_sizes * (self.leaf_tasks.max() + 1) + self.leaf_tasks
        for value in sorted_unique(size_class):
            leaves = np.flatnonzero(size_class == value)
            max_servers = min(self.ps, int(self.leaf_tasks[leaves[0]]))
            times[leaves, :max_servers + 1] = self.node_times(leaves, max_servers)
        has_one_leaf = np.bincount(self.pair_zone)[self.pair_zone] == 1
        leaf, zone = self.pair_leaf[has_one_leaf], self.pair_zone[has_one_leaf]
        load = self.link_load(np.arange(self.ps + 1), self.leaf_tasks[leaf, None])
        np.maximum.at(times, leaf, load / self.network.zone_capacity[zone, None])
        if self.required_leaf is not None:
            times[self.required_leaf, 0] = np.inf
        return times

    def node_times(self, leaves: IntArray, max_servers: int) -> FloatArray:
        """Time of the busiest node by servers of the leaf, for leaves of one size; shape (leaves, servers + 1)."""
        node = (np.cumsum(self.leaf_sizes) - self.leaf_sizes)[leaves, None] + np.arange(self.leaf_sizes[leaves[0]])
        host = (np.cumsum(self.leaf_tasks) - self.leaf_tasks)[leaves, None] + np.arange(max_servers)
        nodes, hosts = self.nodes_by_leaf[node][:, None], self.position_in_leaf[self.host_order[host]]
        added = np.zeros((len(leaves), max_servers + 1, nodes.shape[-1]), np.int64)
        added[np.arange(len(leaves))[:, None], np.arange(1, max_servers + 1), hosts] = 1
        times = self.link_load(added.cumsum(axis=1), self.tasks[nodes]) / self.network.node_capacity[nodes]
        return np.asarray(times.max(axis=2), float)

    def server_bounds(self, times: FloatArray, zone_times: list[tuple[IntArray, FloatArray]],
                      max_time: float) -> _Bounds | None:
        """Bounds within a time; None if the servers do not fit.

        `zone_times` lists (leaves, time by servers) of the zones above several leaves, the smallest zones first.
        """
        fits = times <= max_time
        if not fits.any(axis=1).all():
            return None
        fewest, most = fits.argmax(axis=1), self.ps - fits[:, ::-1].argmax(axis=1)
        zones: list[tuple[IntArray, int, int]] = []
        # the bounds of a finished zone are stored at its first leaf, with 0 at the others
        low, high = fewest.copy(), most.copy()
        for leaves, time in zone_times:
            allowed = np.flatnonzero(time <= max_time)
            if not len(allowed):
                return None
            zone_low = max(int(low[leaves].sum()), int(allowed[0]))
            zone_high = min(int(high[leaves].sum()), int(allowed[-1]))
            if zone_low > zone_high:
                return None
            zones.append((leaves, zone_low, zone_high))
            low[leaves], high[leaves] = 0, 0
            low[leaves[0]], high[leaves[0]] = zone_low, zone_high
        return _Bounds(fewest, most, zones) if low.sum() <= self.ps <= high.sum() else None

    def min_inter_leaf_split(self, bounds: _Bounds) -> IntArray:
        """Servers per leaf within the bounds, added one by one where they add the fewest bytes between leaves."""
        split = bounds.fewest.copy()
        limits = [(leaves, most) for leaves, _, most in bounds.zones if most < bounds.most[leaves].sum()]

        def add_servers(leaves: IntArray, count: int) -> None:
            is_open = np.zeros(len(split), bool)
            is_open[leaves] = True
            for _ in range(count):
                is_free = is_open & (split < bounds.most)
                for zone_leaves, most in limits:
                    if split[zone_leaves].sum() >= most:
                        is_free[zone_leaves] = False
                # bytes of a leaf: s (W - w) + w (P - s) with w = tasks - s
                added_bytes = np.where(is_free, 4 * split - 2 * self.leaf_tasks, np.iinfo(np.int64).max)
                split[added_bytes.argmin()] += 1

        for leaves, fewest, _ in bounds.zones:
            add_servers(leaves, fewest - int(split[leaves].sum()))
        add_servers(np.arange(len(split)), self.ps - int(split.sum()))
        return split


def _concatenated_ranges(counts: IntArray) -> IntArray:
    """0, 1, ... below each count: (3, 1) -> (0, 1, 2, 0)."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
