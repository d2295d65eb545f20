"""Rank orders on given nodes, one class for each kind of traffic, and the best rank map among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import IntArray, new_indices, run_starts, sorted_unique
from slurmdl.placement.iteration_cost import NetworkLinks, network_links, predict_cost
from slurmdl.placement.result import Cost, RankMap, best_cost
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

if TYPE_CHECKING:
    from slurmdl.groups import GroupTraffic
    from slurmdl.mesh import MeshTraffic

#: ranks of all orders of a mesh that are evaluated for each choice of nodes, and for the chosen one
MAX_MESH_RANKS, MAX_FINAL_MESH_RANKS = 2**11, 2**14
MAX_REFINED_RANKS = 64  # ranks of the largest mesh that is refined
MAX_MESH_STARTS = 3  # orders of a mesh that are refined, the best first


def best_rank_map(slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores, traffic: Traffic,
                  rank0: str = "first", *, node_by_node: bool = False) -> RankMap:
    """Best of the known orders for this traffic; the tasks per node stay as given.

    All traffic: alphabetical order (Slurm with one task per node), leaf order (block distribution of Slurm 26.05),
    and depth-first order of the zone tree; for the others see the subclasses of RankOrders.

    With rank 0 fixed, each order starts with the first node and its zones. If that costs time, the best free order
    is also tried with renumbered ranks.

    `slots` are (node, tasks on it), distinct nodes in Slurm's order. `rank0`: "first" keeps rank 0 on the first node
    with a task, "any" allows every node. With `node_by_node` the ranks of a node are consecutive, as torchrun and
    other launchers number them.

    Raises PlacementError if there is no task, for invalid traffic (`Traffic.phases`), and for parameter servers with
    `node_by_node`: their ranks come first.
    """
    return rank_orders(slots, topology, scores, traffic, rank0, node_by_node=node_by_node).best_map


def rank_orders(slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores, traffic: Traffic,
                rank0: str = "first", *, node_by_node: bool = False) -> RankOrders:
    """The rank orders for this kind of traffic; parameters and errors as for `best_rank_map`."""
    kinds = {"mesh": MeshOrders, "groups": GroupOrders, "graph": SearchedOrders, "matrices": SearchedOrders,
             "servers": ServerOrders, "ring": RankOrders}
    return kinds[traffic.kind](slots, topology, scores, traffic, rank0, node_by_node=node_by_node)


@dataclass(frozen=True, eq=False)
class _BestOrder:
    """Name of the best order so far, the node of each rank, and the costs of all evaluated orders."""

    name: str
    node_of_rank: IntArray
    costs: dict[str, Cost]

    @property
    def cost(self) -> Cost:
        return self.costs[self.name]


class RankOrders:
    """Rank orders of one job on given slots, for rings and for messages from each rank to each other.

    They follow the zone tree depth-first, also with a detour around slow inter-leaf paths. `rank0_node` is the index
    of the node that holds rank 0; None for any node.
    """

    def __init__(self, slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores, traffic: Traffic,
                 rank0: str = "first", *, node_by_node: bool = False) -> None:
        self.tasks = np.array([count for _, count in slots], np.int64)
        if not self.tasks.sum() or self.tasks.min() < 0:
            raise PlacementError("a rank map needs at least one task, and no node with a negative number of tasks")
        if node_by_node and traffic.ps and self.tasks.max() > 1:
            raise PlacementError("parameter servers: their ranks come first, but the launcher numbers the ranks node "
                                 "by node; expected one task per rank")
        if mismatch := traffic.size_mismatch(len(slots), int(self.tasks.sum())):
            raise PlacementError(mismatch)
        if traffic.kind == "groups" and self.tasks.min() != self.tasks.max():
            raise PlacementError("--dl-groups: the nodes have different numbers of tasks; expected --ntasks-per-node")
        self.traffic, self.rank_count, self.node_by_node = traffic, int(self.tasks.sum()), node_by_node
        self.slots, self.topology, self.scores = slots, topology, scores
        self.rank0_node = int(np.flatnonzero(self.tasks)[0]) if rank0 == "first" else None
        self.phases = traffic.phases(self.rank_count)
        self.network = network_links([node for node, _ in slots], topology, scores)

    def rule_based(self, rank0_node: int | None) -> dict[str, IntArray]:
        """Orders for this traffic that are quick to find: name -> node of each rank, the preferred first."""
        depth = depth_first(self.network, rank0_node)
        orders = {"depth-first": np.repeat(depth, self.tasks[depth])}
        if self.network.slow_paths.names:
            detour = detour_order(self.network, depth)
            orders["detour"] = np.repeat(detour, self.tasks[detour])
        return orders

    def all_orders(self, rank0_node: int | None) -> dict[str, IntArray]:
        """Orders of the chosen nodes, before any swaps."""
        return {**self.rule_based(rank0_node), **self.generic(rank0_node)}

    def swapped(self, node_of_rank: IntArray, keep_rank0: bool) -> IntArray | None:
        """The order with ranks swapped; None if there is no search for this traffic, or it would take too long."""
        return None

    def renumbered(self, node_of_rank: IntArray, rank0_node: int) -> dict[str, IntArray]:
        """Orders with the same messages over each link, if the traffic is symmetric, and rank 0 on `rank0_node`."""
        return {**renumber_orders(node_of_rank, rank0_node),
                "zones-swapped": swap_zones(self.network, self.tasks, node_of_rank, rank0_node)}

    def generic(self, rank0_node: int | None) -> dict[str, IntArray]:
        """Orders for any traffic, the preferred first: name -> node of each rank."""
        nodes = {"depth-first": depth_first(self.network, rank0_node), "leaf": leaf_order(self.network, rank0_node),
                 "alphabetical": np.arange(len(self.tasks))}
        return {name: np.repeat(order, self.tasks[order]) for name, order in nodes.items()}

    def bisection(self, slots: IntArray) -> IntArray:
        """Order by recursive bisection of the node of each slot in depth-first order."""
        from slurmdl.placement.rank_search import bisection_map, traffic_matrices

        flow = traffic_matrices(self.phases, self.rank_count).sum(axis=0)
        return bisection_map(flow + flow.T, self.network, slots)

    def cost(self, order: IntArray) -> Cost:
        phases = self.phases
        if self.traffic.is_zone_dependent:
            phases = self.traffic.phases(self.rank_count, self.network.leaf[order])
        return predict_cost(phases, self.network, order)

    @cached_property
    def rule_based_cost(self) -> Cost:
        """Cost of the best order that needs no search; quick enough to compare many choices of nodes."""
        return self.cost(self.best_rule_based(self.rank0_node))

    def best_rule_based(self, rank0_node: int | None) -> IntArray:
        """The best order that needs no search: the node of each rank."""
        return min(self.rule_based(rank0_node).values(), key=lambda order: self.cost(order).sort_key)

    @cached_property
    def best_map(self) -> RankMap:
        """Best of all orders; of equal ones the first."""
        free = best = self._improve(self._best_of(self.all_orders(None)), keep_rank0=False)
        if self.rank0_node is not None and free.node_of_rank[0] != self.rank0_node:
            best = self._best_of(self.all_orders(self.rank0_node))
            if best.cost.sort_key > free.cost.sort_key:
                best = self._best_of(self.renumbered(free.node_of_rank, self.rank0_node), best)
            if best.cost.sort_key > free.cost.sort_key:
                best = self._improve(best, keep_rank0=True)
        return RankMap(tuple(self.network.nodes[i] for i in best.node_of_rank.tolist()),
                       self.traffic.roles(self.rank_count), best.cost, best.name, best.costs, free.cost)

    def _improve(self, best: _BestOrder, keep_rank0: bool) -> _BestOrder:
        swapped = self.swapped(best.node_of_rank, keep_rank0)
        return best if swapped is None else self._best_of({"swaps": swapped}, best)

    def _best_of(self, orders: dict[str, IntArray], incumbent: _BestOrder | None = None) -> _BestOrder:
        """Best of these orders and the incumbent."""
        if self.node_by_node:
            orders = {name: order for name, order in orders.items() if is_node_by_node(order)}
        if not orders and incumbent:
            return incumbent
        costs: dict[str, Cost] = {}
        for name, order in orders.items():
            # in many trees the leaf order and the alphabetical order equal the depth-first order
            same = next((known for known in costs if np.array_equal(orders[known], order)), name)
            costs[name] = costs.get(same) or self.cost(order)
        name = [*costs][best_cost([*costs.values()], self.traffic.tie)]
        if incumbent is None:
            return _BestOrder(name, orders[name], costs)
        costs = {**incumbent.costs, **costs}
        if best_cost([incumbent.cost, costs[name]], self.traffic.tie) == 0:
            return replace(incumbent, costs=costs)
        return _BestOrder(name, orders[name], costs)

    def _is_tractable(self) -> bool:
        from slurmdl.placement.rank_search import is_tractable

        return is_tractable(self.phases, self.network, self.rank_count)


class ServerOrders(RankOrders):
    """Orders of parameter servers and workers: the servers of `assign_servers`, both depth-first."""

    def rule_based(self, rank0_node: int | None) -> dict[str, IntArray]:
        from slurmdl.placement.server_assignment import assign_servers

        depth = depth_first(self.network, rank0_node)
        servers = assign_servers(self.network, self.tasks, self.phases, self.traffic.ps, rank0_node)
        workers = self.tasks - servers
        return {"roles": np.concatenate([np.repeat(depth, servers[depth]), np.repeat(depth, workers[depth])])}


class SearchedOrders(RankOrders):
    """Orders for graphs and the user's matrices: largest zones first, recursive bisection for matrices, and swaps."""

    def rule_based(self, rank0_node: int | None) -> dict[str, IntArray]:
        largest = largest_first(self.network, self.tasks, rank0_node)
        orders = {**self.generic(rank0_node), "largest-first": np.repeat(largest, self.tasks[largest])}
        if rank0_node is None and self.traffic.matrices and self._is_swappable():
            orders["bisection"] = self.bisection(orders["depth-first"])
        return orders

    def swapped(self, node_of_rank: IntArray, keep_rank0: bool) -> IntArray | None:
        from slurmdl.placement.rank_search import swap_search

        return swap_search(self.phases, self.network, node_of_rank, keep_rank0) if self._is_swappable() else None

    def _is_swappable(self) -> bool:
        return not self.node_by_node and self._is_tractable()


class MeshOrders(RankOrders):
    """Orders of a mesh: the best of `mesh_orders` on the nodes in depth-first order.

    The best orders and the recursive bisection are improved by swaps of nodes and of ranks.
    """

    traffic: MeshTraffic

    @cached_property
    def _costs(self) -> dict[bytes, Cost]:
        """Costs of small meshes' orders: they are compared among the rules, for the final map, and as starts."""
        return {}

    def cost(self, order: IntArray) -> Cost:
        if self.rank_count > MAX_REFINED_RANKS:
            return super().cost(order)
        key = order.tobytes()
        if key not in self._costs:
            self._costs[key] = super().cost(order)
        return self._costs[key]

    def rule_based(self, rank0_node: int | None) -> dict[str, IntArray]:
        return self._mesh_order(rank0_node, MAX_MESH_RANKS)

    def all_orders(self, rank0_node: int | None) -> dict[str, IntArray]:
        return {**self.generic(rank0_node), **self._mesh_order(rank0_node, MAX_FINAL_MESH_RANKS)}

    def swapped(self, node_of_rank: IntArray, keep_rank0: bool) -> IntArray | None:
        if self.rank_count > MAX_REFINED_RANKS or not self._is_tractable():
            return None
        from slurmdl.placement.rank_search import refine_map

        # swaps alone may end in a local optimum
        maps = self._mesh_maps(int(node_of_rank[0]), MAX_MESH_RANKS)
        starts = [node_of_rank, *sorted(maps, key=lambda order: self.cost(order).sort_key)[:MAX_MESH_STARTS]]
        if not self.node_by_node:
            depth = depth_first(self.network, int(node_of_rank[0]))
            starts.append(self.bisection(np.repeat(depth, self.tasks[depth])))
        distinct = {start.tobytes(): start for start in starts if start[0] == node_of_rank[0]}
        refined = [refine_map(self.phases, self.network, start, node_by_node=self.node_by_node, keep_rank0=keep_rank0)
                   for start in distinct.values()]
        return min(refined, key=lambda order: self.cost(order).sort_key)

    def _mesh_order(self, rank0_node: int | None, max_ranks: int) -> dict[str, IntArray]:
        """The best order of the mesh, of up to `max_ranks` ranks in all; the generic orders if it has none."""
        maps = self._mesh_maps(rank0_node, max_ranks)
        if not maps:
            return self.generic(rank0_node)
        return {"mesh": maps[best_cost([*map(self.cost, maps)], self.traffic.tie)]}

    def _mesh_maps(self, rank0_node: int | None, max_ranks: int) -> list[IntArray]:
        """The node of each rank in the orders of the mesh, of up to `max_ranks` ranks in all."""
        from slurmdl.placement.mesh_orders import mesh_orders

        depth = depth_first(self.network, rank0_node)
        slots = np.repeat(depth, self.tasks[depth])
        nodes_per_zone = [gcd(*np.bincount(group + 1).tolist()) for group in self.network.level_group.T]
        ranks_per_node = int(self.tasks[0]) if (self.tasks == self.tasks[0]).all() else 0
        orders = mesh_orders(self.traffic, ranks_per_node, nodes_per_zone, node_by_node=self.node_by_node)
        maps = []
        for order in islice(orders, max(2, max_ranks // self.rank_count)):
            node_of_rank = np.empty_like(slots)
            node_of_rank[order] = slots
            maps.append(node_of_rank)
        return maps


class GroupOrders(RankOrders):
    """Orders of named groups: each on nodes of its own, with the ranks inside it as in a job of its own."""

    traffic: GroupTraffic

    @cached_property
    def _orders_inside(self) -> dict[tuple[str, bytes], IntArray]:
        """Orders that were found: group and its nodes -> the node of each rank."""
        return {}

    def rule_based(self, rank0_node: int | None) -> dict[str, IntArray]:
        """The best order of the groups."""
        from slurmdl.placement.mesh_orders import group_nodes

        found = {}
        depth = depth_first(self.network, rank0_node)
        for nodes_of_groups in group_nodes(self.network, depth, self.traffic.group_sizes(), rank0_node):
            parts = []
            for group, nodes in zip(self.traffic.groups, nodes_of_groups, strict=True):
                key = group.name, nodes.tobytes()
                if key not in self._orders_inside:
                    self._orders_inside[key] = self._order_inside(group.name, nodes, rank0_node)
                parts.append(self._orders_inside[key])
            order = np.concatenate(parts)
            found[order.tobytes()] = order
        orders = [*found.values()]
        return {"groups": orders[best_cost([*map(self.cost, orders)], self.traffic.tie)]}

    def swapped(self, node_of_rank: IntArray, keep_rank0: bool) -> IntArray | None:
        if self.rank_count > MAX_REFINED_RANKS or not self._is_tractable():
            return None
        from slurmdl.placement.rank_search import refine_map

        return refine_map(self.phases, self.network, node_of_rank, node_by_node=True, keep_rank0=keep_rank0)

    def renumbered(self, node_of_rank: IntArray, rank0_node: int) -> dict[str, IntArray]:
        return {}  # it would divide the nodes of groups

    def _order_inside(self, name: str, nodes: IntArray, rank0_node: int | None) -> IntArray:
        """The node of each rank of a group; a ring follows the depth-first order of its nodes."""
        mesh = self.traffic.meshes.get(name)
        is_fixed = rank0_node is not None and rank0_node in nodes
        if mesh is None:
            ordered = np.concatenate([[rank0_node], nodes[nodes != rank0_node]]) if is_fixed else nodes
            return np.repeat(ordered, self.tasks[ordered])
        members = np.sort(nodes)
        inside = MeshOrders([self.slots[i] for i in members.tolist()], self.topology, self.scores, mesh,
                            node_by_node=self.node_by_node)
        fixed = int(np.flatnonzero(members == rank0_node)[0]) if is_fixed else None
        return members[inside.best_rule_based(fixed)]


def is_node_by_node(node_of_rank: IntArray) -> bool:
    """Whether the ranks of each node are consecutive; `node_of_rank` has shape (ranks,)."""
    return len(run_starts(node_of_rank)) == len(sorted_unique(node_of_rank))


def renumber_orders(node_of_rank: IntArray, rank0_node: int) -> dict[str, IntArray]:
    """Renumber the ranks so that rank 0 is on `rank0_node`; `node_of_rank` has shape (ranks,).

    Messages of symmetric patterns stay on the same links: "rotated" keeps a ring, "renumbered" the base graph.
    """
    ranks = np.arange(len(node_of_rank))
    # 2^k blocks with an odd number of ranks each
    size = len(node_of_rank) // (len(node_of_rank) & -len(node_of_rank))
    on_node = np.flatnonzero(node_of_rank == rank0_node)
    rank = int(on_node[(on_node % size).argmin()])
    renumbered = node_of_rank[(ranks // size ^ rank // size) * size + ranks % size]
    renumbered[[0, rank % size]] = renumbered[[rank % size, 0]]
    return {"rotated": np.roll(node_of_rank, -int(on_node[0])), "renumbered": renumbered}


def swap_zones(network: NetworkLinks, tasks: IntArray, node_of_rank: IntArray, rank0_node: int) -> IntArray:
    """Swap the zones above `rank0_node` with the zones above rank 0; between equal zones no link load changes.

    `node_of_rank` and the result have shape (ranks,).
    """
    before, after = (depth_first(network, node) for node in (int(node_of_rank[0]), rank0_node))
    position = new_indices(before, len(before))
    swapped = np.empty_like(node_of_rank)
    swapped[np.argsort(position[node_of_rank], kind="stable")] = np.repeat(after, tasks[after])
    return swapped


def leaf_order(network: NetworkLinks, first: int | None = None) -> IntArray:
    """Nodes by leaf zone in topology order, after the leaf of node `first`; nodes without a zone come last."""
    leaf = np.where(network.leaf >= 0, network.leaf, len(network.zones))
    return _sort_by_path(leaf[:, None], first)


def depth_first(network: NetworkLinks, first: int | None = None) -> IntArray:
    """Nodes in depth-first order of the zone tree, so that the nodes of each zone are contiguous.

    Node `first` comes first, its zones before their siblings.
    """
    return _sort_by_path(_zone_path_matrix(network), first)


def detour_order(network: NetworkLinks, depth: IntArray) -> IntArray:
    """Reorder the leaf zones of the depth-first order `depth`, so that few neighbors have a slow path between them.

    The next zone is the first one with no slow path from the previous zone, or else with the fastest path.
    """
    leaf = network.leaf[depth]
    remaining = list(dict.fromkeys(leaf.tolist()))
    bandwidth = {(source, target): value
                 for pair, value in zip(network.slow_paths.leaf_pairs.tolist(), network.slow_paths.capacity.tolist(),
                                        strict=True) for source, target in (pair, pair[::-1])}
    zones = [remaining.pop(0)]
    while remaining:
        # max takes the first of equal zones
        zones.append(max(remaining, key=lambda zone: bandwidth.get((zones[-1], zone), np.inf)))
        remaining.remove(zones[-1])
    return np.concatenate([depth[leaf == zone] for zone in zones])


def largest_first(network: NetworkLinks, tasks: IntArray, first: int | None = None) -> IntArray:
    """Depth-first order in which siblings with most tasks come first, after the zones of node `first`.

    Halves and quarters of the ranks, which are neighbors in the base graph, then tend to be in one zone.
    """
    paths = _zone_path_matrix(network)
    zone_tasks = np.zeros(len(network.zones) + 2, np.int64)
    for column in network.ancestors.T:
        zone_tasks += np.bincount(column + 1, tasks, len(zone_tasks)).astype(np.int64)
    # the virtual zones of nodes without a zone come last
    zone_tasks[0], zone_tasks[-1] = 0, -1
    return _sort_by_path(paths, first, -zone_tasks[paths + 1])


def _sort_by_path(paths: IntArray, first: int | None, *sort_values: IntArray) -> IntArray:
    """Nodes sorted by zone path, shape (nodes, depth); node `first` and its zones come before all others.

    `sort_values`, of the same shape, take precedence over the zone indices.
    """
    is_elsewhere = np.zeros_like(paths) if first is None else (paths != paths[first]).astype(np.int64)
    keys = np.stack([is_elsewhere, *sort_values, paths], axis=2).reshape(len(paths), -1)
    return np.lexsort([np.arange(len(paths)) != first, *keys.T[::-1]])


def _zone_path_matrix(network: NetworkLinks) -> IntArray:
    """Zones above each node from the root down, padded with -1; shape (nodes, depth).

    Nodes without a zone get a virtual zone after all others.
    """
    depth = (network.ancestors >= 0).sum(axis=1)
    column = depth[:, None] - 1 - np.arange(network.ancestors.shape[1])
    path = np.where(column >= 0, np.take_along_axis(network.ancestors, np.maximum(column, 0), axis=1), -1)
    path[depth == 0, 0] = len(network.zones)
    return path
