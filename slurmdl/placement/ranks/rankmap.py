"""The order of the tasks over nodes that are given: which node gets which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
             traffic: Traffic, rank0: str = "first") -> RankMap:
    """The best of the orders that are known for this traffic.

    Compared are the alphabetical order (Slurm up to 25.11), leaf order (Slurm 26.05), depth-first order over
    all levels of the topology, one that goes round slow ways between zones, and with parameter servers the orders
    that `roles` finds. For traffic that no rule fits there are also depth-first order with the largest zones first,
    recursive bisection for the user's own matrices, and swaps in the best of these, both where the work is bounded
    (see `mapper`). Tasks per node stay as given.

    Where rank 0 stays on the first node, each order begins with the zones of that node and with the node itself. If
    that costs something, the best order without the condition is tried with its ranks renumbered, too.

    Parameters
    ----------
    slots : (node, tasks on it), distinct nodes in Slurm's order.
    rank0 : "first" keeps rank 0 on the first node with a task, "any" lets it be on every node.

    Raises
    ------
    PlacementError : no task at all, or what `Traffic.phases` refuses.
    """
    return Orders(slots, topology, scores, traffic, rank0).best()


class Orders:
    """The orders of the ranks of one job over given slots; see `rank_map` for the parameters.

    Attributes
    ----------
    first : index of the node that holds rank 0, None where every node may.
    """

    def __init__(self, slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores,
                 traffic: Traffic, rank0: str = "first") -> None:
        self.tasks = np.array([count for _, count in slots], np.int64)
        if not self.tasks.sum() or self.tasks.min() < 0:
            raise PlacementError("a rank map needs at least one task, and no node with less than none")
        self.traffic, self.ranks = traffic, int(self.tasks.sum())
        self.first = int(np.flatnonzero(self.tasks)[0]) if rank0 == "first" else None
        self.phases = traffic.phases(self.ranks)
        self.network = links([node for node, _ in slots], topology, scores)

    def _ruled(self, first: int | None) -> dict[str, IntArray]:
        """The order that a rule makes for this traffic, else several: name -> node of each rank."""
        depth, tasks = depth_first(self.network, first), self.tasks
        if not self.traffic.searched and self.traffic.ps:
            servers = roles.servers_per_node(self.network, tasks, self.phases, self.traffic.ps, first)
            workers = tasks - servers
            return {"roles": np.concatenate([np.repeat(depth, servers[depth]), np.repeat(depth, workers[depth])])}
        if not self.traffic.searched:
            found = {"depth-first": np.repeat(depth, tasks[depth])}
            if self.network.trunks.names:
                way = around(self.network, depth)
                found["around"] = np.repeat(way, tasks[way])
            return found
        largest = largest_first(self.network, tasks, first)
        found = {**self._plain(first), "largest-first": np.repeat(largest, tasks[largest])}
        if first is None and self.traffic.matrices and mapper.fits(self.phases, self.network, self.ranks):
            found["bisection"] = mapper.bisected(self.phases, self.network, found["depth-first"])
        return found

    def _plain(self, first: int | None) -> dict[str, IntArray]:
        """The orders that fit any traffic: name -> node of each rank, the preferred first."""
        nodes = {"depth-first": depth_first(self.network, first), "leaf": leaf_order(self.network, first),
                 "alphabetical": np.arange(len(self.tasks))}
        return {name: np.repeat(order, self.tasks[order]) for name, order in nodes.items()}

    @cached_property
    def _ruled_costs(self) -> dict[str, Cost]:
        return {name: self._cost(order) for name, order in self._ruled(self.first).items()}

    @cached_property
    def cost(self) -> Cost:
        """Of the best order that a rule makes: quick enough to compare many choices of nodes."""
        return min(self._ruled_costs.values(), key=lambda cost: cost.key)

    def best(self) -> RankMap:
        """The best of all orders, the preferred one where several are."""
        found = self._found(None)
        anywhere = found.cost
        if self.first is not None and found.place[0] != self.first:
            found = self._held(found)
        servers = self.traffic.ps
        return RankMap(tuple(self.network.nodes[i] for i in found.place.tolist()),
                       ("ps",) * servers + ("worker",) * (self.ranks - servers), found.cost, found.name, found.costs,
                       anywhere)

    def _found(self, first: int | None) -> _Found:
        """The best order that rules or, with rank 0 on any node, swaps make."""
        found = self._compared({**self._ruled(first), **self._plain(first)})
        return self._swapped(found, held=False) if first is None else found

    def _held(self, free: _Found) -> _Found:
        """The best order with rank 0 on its node.

        Parameters
        ----------
        free : the best order with rank 0 on another node.
        """
        assert self.first is not None
        found = self._found(self.first)
        if found.cost.key > free.cost.key:
            orders = renumbered(free.place, self.first)
            orders["zones exchanged"] = zones_exchanged(self.network, self.tasks, free.place, self.first)
            found = self._compared(orders, found)
        return self._swapped(found, held=True) if found.cost.key > free.cost.key else found

    def _compared(self, orders: dict[str, IntArray], before: _Found | None = None) -> _Found:
        """The best of these orders and of one that was found before."""
        costs: dict[str, Cost] = {}
        for name, order in orders.items():
            # in many trees leaf order is depth-first, and the alphabet follows the leaves
            same = next((known for known in costs if np.array_equal(orders[known], order)), name)
            costs[name] = costs.get(same) or self._cost(order)
        name = min(costs, key=lambda name: costs[name].key)
        if before is None:
            return _Found(name, orders[name], costs)
        best = before.costs[before.name].key <= costs[name].key
        return _Found(before.name if best else name, before.place if best else orders[name],
                      {**before.costs, **costs})

    def _swapped(self, found: _Found, held: bool) -> _Found:
        """The order after swaps of ranks, where no rule fits the traffic, the work is bounded, and they help."""
        if not (self.traffic.searched and mapper.fits(self.phases, self.network, self.ranks)):
            return found
        return self._compared({"swaps": mapper.swapped(self.phases, self.network, found.place, held)}, found)

    def _cost(self, order: IntArray) -> Cost:
        phases = self.traffic.phases(self.ranks, self.network.leaf[order]) if self.traffic.follows_zones else \
            self.phases
        return cost(phases, self.network, order)


@dataclass(frozen=True, eq=False)
class _Found:
    """The best order so far: its name, the node of each rank, and the cost of every order that was compared."""

    name: str
    place: IntArray
    costs: dict[str, Cost]

    @property
    def cost(self) -> Cost:
        return self.costs[self.name]


def renumbered(place: IntArray, first: int) -> dict[str, IntArray]:
    """An order with its ranks renumbered so that rank 0 is on a node, in ways that leave the messages of symmetric
    patterns on the same links: around a ring, and between the blocks of the base graph.

    Parameters
    ----------
    place : shape (ranks,), the node of each rank; `first` is among them.
    """
    ranks = np.arange(len(place))
    # 2^k blocks, each of an odd number of ranks
    size = len(place) // (len(place) & -len(place))
    there = np.flatnonzero(place == first)
    rank = int(there[(there % size).argmin()])
    across = place[(ranks // size ^ rank // size) * size + ranks % size]
    across[[0, rank % size]] = across[[rank % size, 0]]
    return {"rotated": np.roll(place, -int(there[0])), "renumbered": across}


def zones_exchanged(network: Links, tasks: IntArray, place: IntArray, first: int) -> IntArray:
    """An order with rank 0 on a node: the zones above that node and those above rank 0 change places.

    Between zones that are alike this changes nothing for the links.

    Parameters
    ----------
    place : shape (ranks,), the node of each rank.
    """
    before, after = (depth_first(network, node) for node in (int(place[0]), first))
    turn = np.empty_like(before)
    turn[before] = np.arange(len(before))
    moved = np.empty_like(place)
    moved[np.argsort(turn[place], kind="stable")] = np.repeat(after, tasks[after])
    return moved


def leaf_order(network: Links, first: int | None = None) -> IntArray:
    """Nodes by leaf zone in the order of the topology; nodes without a zone last.

    Parameters
    ----------
    first : a node that comes first, with the others of its leaf; None for none.
    """
    leaf = np.where(network.leaf >= 0, network.leaf, len(network.zones))
    return _sorted(leaf[:, None], first)


def depth_first(network: Links, first: int | None = None) -> IntArray:
    """Nodes so that those below any zone stand together: by root, then the zone below it, down to the leaf.

    Parameters
    ----------
    first : a node that comes first, its zones before all others beside them; None for none.
    """
    return _sorted(_paths(network), first)


def _sorted(paths: IntArray, first: int | None, *figures: IntArray) -> IntArray:
    """Nodes by their paths of zones.

    Parameters
    ----------
    paths : shape (nodes, depth).
    first : a node whose zones come before all others; None for none.
    figures : of the same shape; decide before the zones' numbers.
    """
    elsewhere = np.zeros_like(paths) if first is None else (paths != paths[first]).astype(np.int64)
    keys = np.stack([elsewhere, *figures, paths], axis=2).reshape(len(paths), -1)
    return np.lexsort([np.arange(len(paths)) != first, *keys.T[::-1]])


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


def largest_first(network: Links, tasks: IntArray, first: int | None = None) -> IntArray:
    """Depth-first order in which of the zones below one the zone with most tasks comes first.

    Halves, quarters and so on of the ranks then tend to lie in one zone: neighbours in the base graph.

    Parameters
    ----------
    first : as in `depth_first`; its zones come before larger ones.
    """
    paths = _paths(network)
    held = np.zeros(len(network.zones) + 2, np.int64)
    for column in network.above.T:
        held += np.bincount(column + 1, tasks, len(held)).astype(np.int64)
    # what stands for nodes without a zone comes last
    held[0], held[-1] = 0, -1
    return _sorted(paths, first, -held[paths + 1])


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
