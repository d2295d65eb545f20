"""The order of the tasks over nodes that are given: which node gets which rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from slurmdl.errors import PlacementError
from slurmdl.network.model import LinkScores
from slurmdl.placement.cost import IntArray, Links, cost, links
from slurmdl.placement.model import Cost, RankMap
from slurmdl.placement.ranks import mapper, roles
from slurmdl.placement.traffic import Traffic
from slurmdl.topology.model import Topology


def rank_map(slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores,
             traffic: Traffic) -> RankMap:
    """The best of the orders that are known for this traffic, never worse in the model than leaf order.

    Compared are the alphabetical order (Slurm up to 25.11), leaf order (Slurm 26.05), depth-first order over
    all levels of the topology, one that goes round slow ways between zones, and with parameter servers the orders
    that `roles` finds. For traffic that no rule fits there are also depth-first order with the largest zones first,
    recursive bisection for the user's own matrices, and swaps in the best of these, both where the work is bounded
    (see `mapper`). Tasks per node stay as given.

    Parameters
    ----------
    slots : (node, tasks on it), distinct nodes in Slurm's order.

    Raises
    ------
    PlacementError : no task at all, or what `Traffic.phases` refuses.
    """
    return Orders(slots, topology, scores, traffic).best()


class Orders:
    """The orders of the ranks of one job over given slots; see `rank_map` for the parameters."""

    def __init__(self, slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores,
                 traffic: Traffic) -> None:
        self.tasks = np.array([count for _, count in slots], np.int64)
        if not self.tasks.sum() or self.tasks.min() < 0:
            raise PlacementError("a rank map needs at least one task, and no node with less than none")
        self.traffic, self.ranks = traffic, int(self.tasks.sum())
        self.phases = traffic.phases(self.ranks)
        self.network = links([node for node, _ in slots], topology, scores)

    @cached_property
    def ruled(self) -> dict[str, IntArray]:
        """The order that a rule makes for this traffic, else several: name -> node of each rank."""
        depth, tasks = depth_first(self.network), self.tasks
        if not self.traffic.searched and self.traffic.ps:
            servers = roles.servers_per_node(self.network, tasks, self.phases, self.traffic.ps)
            workers = tasks - servers
            return {"roles": np.concatenate([np.repeat(depth, servers[depth]), np.repeat(depth, workers[depth])])}
        if not self.traffic.searched:
            found = {"depth-first": np.repeat(depth, tasks[depth])}
            if self.network.trunks.names:
                way = around(self.network, depth)
                found["around"] = np.repeat(way, tasks[way])
            return found
        largest = largest_first(self.network, tasks)
        found = {**self.plain, "largest-first": np.repeat(largest, tasks[largest])}
        if self.traffic.matrices and mapper.fits(self.phases, self.network, self.ranks):
            found["bisection"] = mapper.bisected(self.phases, self.network, found["depth-first"])
        return found

    @property
    def plain(self) -> dict[str, IntArray]:
        """The orders that fit any traffic: name -> node of each rank, the preferred first."""
        nodes = {"depth-first": depth_first(self.network), "leaf": leaf_order(self.network),
                 "alphabetical": np.arange(len(self.tasks))}
        return {name: np.repeat(order, self.tasks[order]) for name, order in nodes.items()}

    @cached_property
    def _ruled_costs(self) -> dict[str, Cost]:
        return {name: self._cost(order) for name, order in self.ruled.items()}

    @cached_property
    def cost(self) -> Cost:
        """Of the best order that a rule makes: quick enough to compare many choices of nodes."""
        return min(self._ruled_costs.values(), key=lambda cost: cost.key)

    def best(self) -> RankMap:
        """The best of all orders, the preferred one where several are."""
        orders = {**self.ruled, **self.plain}
        costs: dict[str, Cost] = {}
        for name, order in orders.items():
            # in many trees leaf order is depth-first, and the alphabet follows the leaves
            same = next((known for known in costs if np.array_equal(orders[known], order)), name)
            costs[name] = costs.get(same) or self._ruled_costs.get(name) or self._cost(order)
        best = min(costs, key=lambda name: costs[name].key)
        if self.traffic.searched and mapper.fits(self.phases, self.network, self.ranks):
            place = mapper.swapped(self.phases, self.network, orders[best])
            after = self._cost(place)
            if after.key < costs[best].key:
                best, orders["swaps"], costs["swaps"] = "swaps", place, after
        servers = self.traffic.ps
        return RankMap(tuple(self.network.nodes[i] for i in orders[best].tolist()),
                       ("ps",) * servers + ("worker",) * (self.ranks - servers), costs[best], best, costs)

    def _cost(self, order: IntArray) -> Cost:
        phases = self.traffic.phases(self.ranks, self.network.leaf[order]) if self.traffic.follows_zones else \
            self.phases
        return cost(phases, self.network, order)


def leaf_order(network: Links) -> IntArray:
    """Nodes by leaf zone in the order of the topology; nodes without a zone last."""
    leaf = np.where(network.leaf >= 0, network.leaf, len(network.zones))
    return np.argsort(leaf, kind="stable")


def depth_first(network: Links) -> IntArray:
    """Nodes so that those below any zone stand together: by root, then the zone below it, down to the leaf."""
    return np.lexsort(_paths(network).T[::-1])


def around(network: Links, depth: IntArray) -> IntArray:
    """Depth-first order with the leaf zones in such a turn that few neighbours have a slow way between them.

    From each zone it goes on to the next one without a slow way, where there is one, else to that of the fastest.

    Parameters
    ----------
    depth : the nodes in depth-first order.
    """
    leaf = network.leaf[depth]
    left = list(dict.fromkeys(leaf.tolist()))
    speed = {(one, other): carried for ends, carried in zip(network.trunks.ends.tolist(),
                                                            network.trunks.capacity.tolist(), strict=True)
             for one, other in (ends, ends[::-1])}
    turn = [left.pop(0)]
    while left:
        # max takes the first of equal ones
        turn.append(max(left, key=lambda zone: speed.get((turn[-1], zone), np.inf)))
        left.remove(turn[-1])
    return np.concatenate([depth[leaf == zone] for zone in turn])


def largest_first(network: Links, tasks: IntArray) -> IntArray:
    """Depth-first order in which of the zones below one the zone with most tasks comes first.

    Halves, quarters and so on of the ranks then tend to lie in one zone: the neighbours of a hypercube.
    """
    path = _paths(network)
    held = np.zeros(len(network.zones) + 2, np.int64)
    for column in network.above.T:
        held += np.bincount(column + 1, tasks, len(held)).astype(np.int64)
    # what stands for nodes without a zone comes last
    held[0], held[-1] = 0, -1
    return np.lexsort(np.stack([-held[path + 1], path], axis=2).reshape(len(path), -1).T[::-1])


def _paths(network: Links) -> IntArray:
    """The zones above each node from the root down, then -1; shape (nodes, depth), one column at least.

    A node without a zone has a zone of its own that comes after all others.
    """
    depth = (network.above >= 0).sum(axis=1)
    columns = np.arange(max(network.above.shape[1], 1))
    if not network.above.shape[1]:
        return np.full((len(depth), 1), len(network.zones), np.int64)
    turned = depth[:, None] - 1 - columns
    path = np.where(turned >= 0, np.take_along_axis(network.above, np.maximum(turned, 0), axis=1), -1)
    path[depth == 0, 0] = len(network.zones)
    return path
