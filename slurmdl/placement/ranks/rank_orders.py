"""The order of the tasks over nodes that are given: which node gets which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import IntArray, NetworkLinks, network_links, predict_cost
from slurmdl.placement.ranks import ps_assignment, rank_swaps
from slurmdl.placement.result import Cost, RankMap
from slurmdl.placement.traffic import Traffic
from slurmdl.topology.topology import Topology


def best_rank_map(slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores,
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
    return RankOrders(slots, topology, scores, traffic, rank0).best_map()


class RankOrders:
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
        self.traffic, self.rank_count = traffic, int(self.tasks.sum())
        self.rank0_node = int(np.flatnonzero(self.tasks)[0]) if rank0 == "first" else None
        self.phases = traffic.phases(self.rank_count)
        self.network = network_links([node for node, _ in slots], topology, scores)

    def _rule_based(self, rank0_node: int | None) -> dict[str, IntArray]:
        """The order that a rule makes for this traffic, else several: name -> node of each rank."""
        depth, tasks = depth_first(self.network, rank0_node), self.tasks
        if not self.traffic.needs_search and self.traffic.ps:
            servers = ps_assignment.assign_servers(self.network, tasks, self.phases, self.traffic.ps, rank0_node)
            workers = tasks - servers
            return {"roles": np.concatenate([np.repeat(depth, servers[depth]), np.repeat(depth, workers[depth])])}
        if not self.traffic.needs_search:
            found = {"depth-first": np.repeat(depth, tasks[depth])}
            if self.network.slow_paths.names:
                way = detour_order(self.network, depth)
                found["around"] = np.repeat(way, tasks[way])
            return found
        largest = largest_first(self.network, tasks, rank0_node)
        found = {**self._generic(rank0_node), "largest-first": np.repeat(largest, tasks[largest])}
        if rank0_node is None and self.traffic.matrices and rank_swaps.is_tractable(
            self.phases, self.network, self.rank_count):
            found["bisection"] = rank_swaps.bisection_map(self.phases, self.network, found["depth-first"])
        return found

    def _generic(self, rank0_node: int | None) -> dict[str, IntArray]:
        """The orders that fit any traffic: name -> node of each rank, the preferred first."""
        nodes = {"depth-first": depth_first(self.network, rank0_node), "leaf": leaf_order(self.network, rank0_node),
                 "alphabetical": np.arange(len(self.tasks))}
        return {name: np.repeat(order, self.tasks[order]) for name, order in nodes.items()}

    @cached_property
    def _rule_based_costs(self) -> dict[str, Cost]:
        return {name: self._order_cost(order) for name, order in self._rule_based(self.rank0_node).items()}

    @cached_property
    def rule_based_cost(self) -> Cost:
        """Of the best order that a rule makes: quick enough to compare many choices of nodes."""
        return min(self._rule_based_costs.values(), key=lambda cost: cost.sort_key)

    def best_map(self) -> RankMap:
        """The best of all orders, the preferred one where several are."""
        found = self._search(None)
        anywhere = found.cost
        if self.rank0_node is not None and found.node_of_rank[0] != self.rank0_node:
            found = self._with_fixed_rank0(found)
        servers = self.traffic.ps
        return RankMap(tuple(self.network.nodes[i] for i in found.node_of_rank.tolist()),
                       ("ps",) * servers + ("worker",) * (self.rank_count - servers), found.cost, found.name, found.costs,
                       anywhere)

    def _search(self, rank0_node: int | None) -> _BestOrder:
        """The best order that rules or, with rank 0 on any node, swaps make."""
        found = self._best_of({**self._rule_based(rank0_node), **self._generic(rank0_node)})
        return self._improve_by_swaps(found, keep_rank0=False) if rank0_node is None else found

    def _with_fixed_rank0(self, free: _BestOrder) -> _BestOrder:
        """The best order with rank 0 on its node.

        Parameters
        ----------
        free : the best order with rank 0 on another node.
        """
        assert self.rank0_node is not None
        found = self._search(self.rank0_node)
        if found.cost.sort_key > free.cost.sort_key:
            orders = renumber_orders(free.node_of_rank, self.rank0_node)
            orders["zones exchanged"] = swap_zones(self.network, self.tasks, free.node_of_rank, self.rank0_node)
            found = self._best_of(orders, found)
        return self._improve_by_swaps(found, keep_rank0=True) if found.cost.sort_key > free.cost.sort_key else found

    def _best_of(self, orders: dict[str, IntArray], incumbent: _BestOrder | None = None) -> _BestOrder:
        """The best of these orders and of one that was found before."""
        costs: dict[str, Cost] = {}
        for name, order in orders.items():
            # in many trees leaf order is depth-first, and the alphabet follows the leaves
            same = next((known for known in costs if np.array_equal(orders[known], order)), name)
            costs[name] = costs.get(same) or self._order_cost(order)
        name = min(costs, key=lambda name: costs[name].sort_key)
        if incumbent is None:
            return _BestOrder(name, orders[name], costs)
        best = incumbent.costs[incumbent.name].sort_key <= costs[name].sort_key
        return _BestOrder(incumbent.name if best else name, incumbent.node_of_rank if best else orders[name],
                      {**incumbent.costs, **costs})

    def _improve_by_swaps(self, current: _BestOrder, keep_rank0: bool) -> _BestOrder:
        """The order after swaps of ranks, where no rule fits the traffic, the work is bounded, and they help."""
        if not (self.traffic.needs_search and rank_swaps.is_tractable(self.phases, self.network, self.rank_count)):
            return current
        return self._best_of({"swaps": rank_swaps.swap_search(
            self.phases, self.network, current.node_of_rank, keep_rank0)}, current)

    def _order_cost(self, order: IntArray) -> Cost:
        phases = self.traffic.phases(self.rank_count, self.network.leaf[order]) if self.traffic.is_zone_dependent else \
            self.phases
        return predict_cost(phases, self.network, order)


@dataclass(frozen=True, eq=False)
class _BestOrder:
    """The best order so far: its name, the node of each rank, and the cost of every order that was compared."""

    name: str
    node_of_rank: IntArray
    costs: dict[str, Cost]

    @property
    def cost(self) -> Cost:
        return self.costs[self.name]


def renumber_orders(node_of_rank: IntArray, rank0_node: int) -> dict[str, IntArray]:
    """An order with its ranks renumbered so that rank 0 is on a node, in ways that leave the messages of symmetric
    patterns on the same links: around a ring, and between the blocks of the base graph.

    Parameters
    ----------
    place : shape (ranks,), the node of each rank; `first` is among them.
    """
    ranks = np.arange(len(node_of_rank))
    # 2^k blocks, each of an odd number of ranks
    size = len(node_of_rank) // (len(node_of_rank) & -len(node_of_rank))
    there = np.flatnonzero(node_of_rank == rank0_node)
    rank = int(there[(there % size).argmin()])
    across = node_of_rank[(ranks // size ^ rank // size) * size + ranks % size]
    across[[0, rank % size]] = across[[rank % size, 0]]
    return {"rotated": np.roll(node_of_rank, -int(there[0])), "renumbered": across}


def swap_zones(network: NetworkLinks, tasks: IntArray, node_of_rank: IntArray, rank0_node: int) -> IntArray:
    """An order with rank 0 on a node: the zones above that node and those above rank 0 change places.

    Between zones that are alike this changes nothing for the links.

    Parameters
    ----------
    place : shape (ranks,), the node of each rank.
    """
    before, after = (depth_first(network, node) for node in (int(node_of_rank[0]), rank0_node))
    turn = np.empty_like(before)
    turn[before] = np.arange(len(before))
    moved = np.empty_like(node_of_rank)
    moved[np.argsort(turn[node_of_rank], kind="stable")] = np.repeat(after, tasks[after])
    return moved


def leaf_order(network: NetworkLinks, first: int | None = None) -> IntArray:
    """Nodes by leaf zone in the order of the topology; nodes without a zone last.

    Parameters
    ----------
    first : a node that comes first, with the others of its leaf; None for none.
    """
    leaf = np.where(network.leaf >= 0, network.leaf, len(network.zones))
    return _sort_by_path(leaf[:, None], first)


def depth_first(network: NetworkLinks, first: int | None = None) -> IntArray:
    """Nodes so that those below any zone stand together: by root, then the zone below it, down to the leaf.

    Parameters
    ----------
    first : a node that comes first, its zones before all others beside them; None for none.
    """
    return _sort_by_path(_zone_path_matrix(network), first)


def _sort_by_path(paths: IntArray, first: int | None, *sort_values: IntArray) -> IntArray:
    """Nodes by their paths of zones.

    Parameters
    ----------
    paths : shape (nodes, depth).
    first : a node whose zones come before all others; None for none.
    figures : of the same shape; decide before the zones' numbers.
    """
    elsewhere = np.zeros_like(paths) if first is None else (paths != paths[first]).astype(np.int64)
    keys = np.stack([elsewhere, *sort_values, paths], axis=2).reshape(len(paths), -1)
    return np.lexsort([np.arange(len(paths)) != first, *keys.T[::-1]])


def detour_order(network: NetworkLinks, depth: IntArray) -> IntArray:
    """Depth-first order with the leaf zones in such a turn that few neighbours have a slow way between them.

    From each zone it goes on to the next one without a slow way, where there is one, else to that of the fastest.

    Parameters
    ----------
    depth : the nodes in depth-first order.
    """
    leaf = network.leaf[depth]
    left = list(dict.fromkeys(leaf.tolist()))
    speed = {(one, other): carried for ends, carried in zip(network.slow_paths.leaf_pairs.tolist(),
                                                            network.slow_paths.capacity.tolist(), strict=True)
             for one, other in (ends, ends[::-1])}
    turn = [left.pop(0)]
    while left:
        # max takes the first of equal ones
        turn.append(max(left, key=lambda zone: speed.get((turn[-1], zone), np.inf)))
        left.remove(turn[-1])
    return np.concatenate([depth[leaf == zone] for zone in turn])


def largest_first(network: NetworkLinks, tasks: IntArray, first: int | None = None) -> IntArray:
    """Depth-first order in which of the zones below one the zone with most tasks comes first.

    Halves, quarters and so on of the ranks then tend to lie in one zone: neighbours in the base graph.

    Parameters
    ----------
    first : as in `depth_first`; its zones come before larger ones.
    """
    paths = _zone_path_matrix(network)
    held = np.zeros(len(network.zones) + 2, np.int64)
    for column in network.ancestors.T:
        held += np.bincount(column + 1, tasks, len(held)).astype(np.int64)
    # what stands for nodes without a zone comes last
    held[0], held[-1] = 0, -1
    return _sort_by_path(paths, first, -held[paths + 1])


def _zone_path_matrix(network: NetworkLinks) -> IntArray:
    """The zones above each node from the root down, then -1; shape (nodes, depth), one column at least.

    A node without a zone has a zone of its own that comes after all others.
    """
    depth = (network.ancestors >= 0).sum(axis=1)
    columns = np.arange(max(network.ancestors.shape[1], 1))
    if not network.ancestors.shape[1]:
        return np.full((len(depth), 1), len(network.zones), np.int64)
    turned = depth[:, None] - 1 - columns
    path = np.where(turned >= 0, np.take_along_axis(network.ancestors, np.maximum(turned, 0), axis=1), -1)
    path[depth == 0, 0] = len(network.zones)
    return path
