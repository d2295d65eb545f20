"""The order of the tasks over nodes that are given: which node gets which rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.errors import PlacementError
from slurmdl.network.model import LinkScores
from slurmdl.placement.cost import IntArray, Links, cost, links
from slurmdl.placement.model import RankMap
from slurmdl.placement.ranks import mapper, roles
from slurmdl.placement.traffic import Phase, Traffic
from slurmdl.topology.model import Topology


def rank_map(slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores,
             traffic: Traffic, search: bool = True) -> RankMap:
    """The best of the orders that are known for this traffic, never worse in the model than leaf order.

    Compared are the alphabetical order (Slurm up to 25.11), leaf order (Slurm 26.05), depth-first order over
    all levels of the topology, and with parameter servers the orders that `roles` finds. For traffic that no rule
    fits there are also depth-first order with the largest zones first, recursive bisection for the user's own
    matrices, and swaps in the best of these, both where the work is bounded (see `mapper`). Tasks per node stay as
    given.

    Parameters
    ----------
    slots : (node, tasks on it), distinct nodes in Slurm's order.
    search : False where many choices of nodes are compared: no swaps are tried, which take most of the time.

    Raises
    ------
    PlacementError : no task at all, or what `Traffic.phases` refuses.
    """
    tasks = np.array([count for _, count in slots], np.int64)
    if not tasks.sum() or tasks.min() < 0:
        raise PlacementError("a rank map needs at least one task, and no node with less than none")
    ranks = int(tasks.sum())
    phases = traffic.phases(ranks)
    network = links([node for node, _ in slots], topology, scores)
    orders = _orders(network, tasks, phases, traffic)
    costs = {name: cost(traffic.phases(ranks, network.leaf[order]) if traffic.follows_zones else phases,
                        network, order) for name, order in orders.items()}
    best = min(costs, key=lambda name: costs[name].key)
    if search and traffic.searched and mapper.fits(phases, network, ranks):
        place = mapper.swapped(phases, network, orders[best])
        after = cost(phases, network, place)
        if after.key < costs[best].key:
            best, orders["swaps"], costs["swaps"] = "swaps", place, after
    return RankMap(tuple(network.nodes[i] for i in orders[best].tolist()),
                   ("ps",) * traffic.ps + ("worker",) * (ranks - traffic.ps), costs[best], best, costs)


def _orders(network: Links, tasks: IntArray, phases: Sequence[Phase], traffic: Traffic) -> dict[str, IntArray]:
    """Name -> place of each rank, the preferred first where costs tie."""
    leaf, depth = leaf_order(network), depth_first(network)
    orders = {"depth-first": np.repeat(depth, tasks[depth]), "leaf": np.repeat(leaf, tasks[leaf]),
              "alphabetical": np.repeat(np.arange(len(tasks)), tasks)}
    if traffic.searched:
        largest = largest_first(network, tasks)
        orders["largest-first"] = np.repeat(largest, tasks[largest])
        if traffic.matrices and mapper.fits(phases, network, int(tasks.sum())):
            orders["bisection"] = mapper.bisected(phases, network, orders["depth-first"])
    elif traffic.ps:
        servers = roles.servers_per_node(network, tasks, phases, traffic.ps)
        workers = tasks - servers
        orders = {"roles": np.concatenate([np.repeat(depth, servers[depth]), np.repeat(depth, workers[depth])]),
                  **orders}
    return orders


def leaf_order(network: Links) -> IntArray:
    """Nodes by leaf zone in the order of the topology; nodes without a zone last."""
    leaf = np.where(network.leaf >= 0, network.leaf, len(network.zones))
    return np.argsort(leaf, kind="stable")


def depth_first(network: Links) -> IntArray:
    """Nodes so that those below any zone stand together: by root, then the zone below it, down to the leaf."""
    return np.lexsort(_paths(network).T[::-1])


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
