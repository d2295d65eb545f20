"""Which nodes hold the parameter servers.

The cost of synchronous parameter-server traffic depends only on how many servers and workers stand below each
link, and on given nodes the number of servers settles that of the workers. The time of a link then falls and rises
again with its servers, so a time T leaves each zone an interval of servers, and intervals add up: the least T is
found by bisection. Among the splits that keep it, bytes between zones are a separable convex function, which one
server after the other where it costs least minimises (Federgruen and Groenevelt, The greedy procedure for resource
allocation problems, 1986). Inside a zone the servers go to the best links, one to a node as long as there are nodes.
Where there are few ways they are all tried.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from slurmdl.placement.arrays import round_mantissa, sorted_unique
from slurmdl.placement.iteration_cost import FloatArray, IntArray, NetworkLinks, ps_split_costs
from slurmdl.placement.traffic import Phase

#: most ways over the nodes that are all tried
MAX_ASSIGNMENTS = 2000
#: most moves of a server between two nodes that are tried in a round, and most rounds
MAX_MOVES, MAX_ROUNDS = 256, 16


def assign_servers(network: NetworkLinks, tasks: IntArray, phases: Sequence[Phase], ps: int,
                     required_node: int | None = None) -> IntArray:
    """How many of each node's tasks are parameter servers.

    Parameters
    ----------
    tasks : shape (nodes,), tasks per node.
    traffic : phases whose ranks below `ps` are the servers.
    first : a node with a task that holds a server, None where every node may do without.

    Returns
    -------
    shape (nodes,), sum `ps`, at most `tasks`.
    """
    ways = _ServerAssignments(network, tasks, phases, ps, required_node)
    if math.comb(len(tasks) + ps - 1, ps) <= MAX_ASSIGNMENTS:
        return ways.best_of(ways.all_assignments())
    servers = _LeafServerSplit(network, tasks, ps, required_node).node_servers()
    for _ in range(MAX_ROUNDS if ps * len(tasks) <= MAX_MOVES else 0):
        better = ways.best_of(ways.neighbor_assignments(servers))
        if (better == servers).all():
            break
        servers = better
    return servers


class _ServerAssignments:
    """Ways to deal out the servers of one job over the nodes, compared by their whole cost."""

    def __init__(self, network: NetworkLinks, tasks: IntArray,
                 phases: Sequence[Phase], ps: int, required_node: int | None) -> None:
        self.network, self.tasks, self.phases, self.ps, self.required_node = network, tasks, phases, ps, required_node

    def best_of(self, servers: IntArray) -> IntArray:
        """The best of these ways, the first one where several are: (ways, nodes) -> (nodes,).

        The cost decides, then how many servers share a node with another.
        """
        costs = ps_split_costs(self.phases, self.network, servers, self.tasks - servers)
        crowded = (servers - 1).clip(min=0).sum(axis=1)
        keys = round_mantissa(np.column_stack([costs, crowded]))
        return np.asarray(servers[np.lexsort(keys.T[::-1])[0]])

    def all_assignments(self) -> IntArray:
        """All ways; shape (ways, nodes)."""
        # those on the best links come first, so that they win a tie
        order = np.argsort(-self.network.node_capacity, kind="stable")
        hosts = order[np.array(list(itertools.combinations_with_replacement(range(len(order)), self.ps)), np.int64)]
        ways = np.zeros((len(hosts), len(order)), np.int64)
        np.add.at(ways, (np.arange(len(hosts))[:, None], hosts), 1)
        return self.with_required_server(ways[(ways <= self.tasks).all(axis=1)])

    def neighbor_assignments(self, servers: IntArray) -> IntArray:
        """The servers as they are, and after each move of one between two nodes; shape (ways, nodes)."""
        givers, takers = np.flatnonzero(servers), np.flatnonzero(servers < self.tasks)
        giver, taker = (ends.ravel() for ends in np.meshgrid(givers, takers, indexing="ij"))
        giver, taker = giver[giver != taker], taker[giver != taker]
        ways = np.repeat(servers[None], len(giver) + 1, axis=0)
        row = 1 + np.arange(len(giver))
        ways[row, giver] -= 1
        ways[row, taker] += 1
        return self.with_required_server(ways)

    def with_required_server(self, assignments: IntArray) -> IntArray:
        """Those with a server on the node that must hold one."""
        return assignments if self.required_node is None else assignments[assignments[:, self.required_node] > 0]


class _LeafServerSplit:
    """Servers per leaf zone, on nodes that are given; nodes without a zone are each a leaf of their own."""

    def __init__(self, network: NetworkLinks, tasks: IntArray, ps: int, required_node: int | None) -> None:
        self.network, self.tasks, self.ps = network, tasks, ps
        self.workers = int(tasks.sum()) - ps
        leaf = np.where(network.leaf >= 0, network.leaf, len(network.zones) + np.arange(len(tasks)))
        leaf = np.searchsorted(sorted_unique(leaf), leaf)
        self.leaf_tasks = np.bincount(leaf, tasks).astype(np.int64)
        #: nodes leaf by leaf, how many each leaf has, and which of them each node is
        self.nodes_by_leaf, self.leaf_sizes = np.argsort(leaf, kind="stable"), np.bincount(leaf)
        self.position_in_leaf = np.empty_like(leaf)
        self.position_in_leaf[self.nodes_by_leaf] = _concatenated_ranges(self.leaf_sizes)
        #: the leaf that must hold a server, None for none
        self.required_leaf = None if required_node is None else int(leaf[required_node])
        # one host for each task, leaf by leaf, in the order in which they take servers
        node = np.repeat(np.arange(len(tasks)), tasks)
        later = (node != required_node) | (_concatenated_ranges(tasks) > 0)
        self.host_order = node[np.lexsort((node, -network.node_capacity[node],
                                          _concatenated_ranges(tasks), later, leaf[node]))]
        # the leaves below each zone: those of lone nodes have no uplink of their own
        above = network.ancestors[self.nodes_by_leaf[np.cumsum(self.leaf_sizes) - self.leaf_sizes]]
        self.pair_leaf, column = np.nonzero(above >= 0)
        self.pair_zone = above[self.pair_leaf, column]

    def link_load(self, servers: IntArray, tasks: IntArray | int) -> FloatArray:
        """Shares of the model over a link with so many servers among so many tasks on one side."""
        workers = tasks - servers
        busier = np.maximum(servers * (self.workers - workers), workers * (self.ps - servers))
        return np.asarray(busier, float)

    def node_times(self, leaves: IntArray, max_servers: int) -> FloatArray:
        """Time of the busiest node with 0, 1, ..., `most` servers in each leaf, all with as many nodes and as much
        room; shape (leaves, servers + 1).
        """
        node = (np.cumsum(self.leaf_sizes) - self.leaf_sizes)[leaves, None] + np.arange(self.leaf_sizes[leaves[0]])
        host = (np.cumsum(self.leaf_tasks) - self.leaf_tasks)[leaves, None] + np.arange(max_servers)
        nodes, hosts = self.nodes_by_leaf[node][:, None], self.position_in_leaf[self.host_order[host]]
        held = np.zeros((len(leaves), max_servers + 1, nodes.shape[-1]), np.int64)
        held[np.arange(len(leaves))[:, None], np.arange(1, max_servers + 1), hosts] = 1
        times = self.link_load(held.cumsum(axis=1), self.tasks[nodes]) / self.network.node_capacity[nodes]
        return np.asarray(times.max(axis=2), float)

    def leaf_times(self) -> FloatArray:
        """Time of each leaf's links by its servers, infinite where it has no room; shape (leaves, servers + 1)."""
        found = np.full((len(self.leaf_tasks), self.ps + 1), np.inf)
        alike = self.leaf_sizes * (self.leaf_tasks.max() + 1) + self.leaf_tasks
        for kind in sorted_unique(alike):
            leaves = np.flatnonzero(alike == kind)
            most = min(self.ps, int(self.leaf_tasks[leaves[0]]))
            found[leaves, :most + 1] = self.node_times(leaves, most)
        alone = np.bincount(self.pair_zone)[self.pair_zone] == 1
        leaf, zone = self.pair_leaf[alone], self.pair_zone[alone]
        own = self.link_load(np.arange(self.ps + 1),
                             self.leaf_tasks[leaf, None]) / self.network.zone_capacity[zone, None]
        np.maximum.at(found, leaf, own)
        if self.required_leaf is not None:
            found[self.required_leaf, 0] = np.inf
        return found

    def node_servers(self) -> IntArray:
        """Servers per node: the least time, then the fewest bytes between zones."""
        times = round_mantissa(self.leaf_times())
        count = np.arange(self.ps + 1)
        upper = []
        for zone in np.flatnonzero(np.bincount(self.pair_zone) > 1):
            members = self.pair_leaf[self.pair_zone == zone]
            time = self.link_load(count, int(self.leaf_tasks[members].sum())) / self.network.zone_capacity[zone]
            upper.append((members, round_mantissa(time)))
        upper.sort(key=lambda entry: len(entry[0]))
        # the least time is that of a link
        tried = sorted_unique(np.concatenate([times[np.isfinite(times)], *(time for _, time in upper)]))
        least = bisect_left(tried, True, key=lambda time: self.server_bounds(times, upper, time) is not None)
        best = self.server_bounds(times, upper, tried[least])
        assert best is not None
        split = self.min_inter_leaf_split(*best)
        return np.bincount(self.host_order[_concatenated_ranges(self.leaf_tasks) <
                           np.repeat(split, self.leaf_tasks)], minlength=len(self.tasks))

    def server_bounds(self, times: FloatArray, upper: list[tuple[IntArray, FloatArray]],
               max_time: float) -> tuple[IntArray, IntArray, list[tuple[IntArray, int, int]]] | None:
        """Fewest and most servers of each leaf, and of each zone above, within a time; None where none fit."""
        fits = times <= max_time
        if not fits.any(axis=1).all():
            return None
        low, high = fits.argmax(axis=1), self.ps - fits[:, ::-1].argmax(axis=1)
        zones: list[tuple[IntArray, int, int]] = []
        fewest, largest = low.copy(), high.copy()
        for members, time in upper:
            allowed = np.flatnonzero(time <= max_time)
            # sums over the members stand at the first of each zone that is counted already
            least, top = int(fewest[members].sum()), int(largest[members].sum())
            if not len(allowed) or max(least, allowed[0]) > min(top, allowed[-1]):
                return None
            zones.append((members, max(least, int(allowed[0])), min(top, int(allowed[-1]))))
            fewest[members], largest[members] = 0, 0
            fewest[members[0]], largest[members[0]] = zones[-1][1:]
        if not fewest.sum() <= self.ps <= largest.sum():
            return None
        return low, high, zones

    def min_inter_leaf_split(self, low: IntArray, high: IntArray, zones: list[tuple[IntArray, int, int]]) -> IntArray:
        """One server after the other where it adds the fewest bytes between leaves, within all bounds."""
        split = low.copy()
        full = [(members, top) for members, _, top in zones if top < high[members].sum()]

        def add(members: IntArray, wanted: int) -> None:
            open_ = np.zeros(len(split), bool)
            open_[members] = True
            for _ in range(wanted):
                free = open_ & (split < high)
                for inside, top in full:
                    if split[inside].sum() >= top:
                        free[inside] = False
                # bytes of a leaf are s (W - w) + w (P - s) with w = room - s
                split[np.where(free, 4 * split - 2 * self.leaf_tasks, np.iinfo(np.int64).max).argmin()] += 1

        for members, least, _ in zones:
            add(members, least - int(split[members].sum()))
        add(np.arange(len(split)), self.ps - int(split.sum()))
        return split


def _concatenated_ranges(count: IntArray) -> IntArray:
    """0, 1, ... up to each count, one after the other: (3, 1) -> (0, 1, 2, 0)."""
    return np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
