"""The order of the tasks over nodes that are given: which node gets which rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.errors import PlacementError
from slurmdl.network.model import LinkScores
from slurmdl.placement import roles
from slurmdl.placement.cost import IntArray, Links, cost, links
from slurmdl.placement.model import RankMap
from slurmdl.placement.traffic import Phase, Traffic
from slurmdl.topology.model import Topology


def rank_map(slots: Sequence[tuple[str, int]], topology: Topology, scores: LinkScores,
             traffic: Traffic) -> RankMap:
    """The best of the orders that are known for this traffic, never worse in the model than leaf order.

    Compared are the alphabetical order (Slurm up to 25.11), leaf order (Slurm 26.05), depth-first order over
    all levels of the topology, and with parameter servers the orders that `roles` finds. Tasks per node stay
    as given.

    Parameters
    ----------
    slots : (node, tasks on it), distinct nodes in Slurm's order.

    Raises
    ------
    PlacementError : no task at all, or strategy `ps` without a server or without a worker.
    """
    tasks = np.array([count for _, count in slots], np.int64)
    if not tasks.sum() or tasks.min() < 0:
        raise PlacementError("a rank map needs at least one task, and no node with less than none")
    ranks = int(tasks.sum())
    phases = traffic.phases(ranks)
    network = links([node for node, _ in slots], topology, scores)
    orders = _orders(network, tasks, phases, 0 if traffic.matrices else traffic.ps)
    costs = {name: cost(traffic.phases(ranks, network.leaf[order]) if traffic.follows_zones else phases,
                        network, order) for name, order in orders.items()}
    best = min(costs, key=lambda name: costs[name].key)
    return RankMap(tuple(network.nodes[i] for i in orders[best]),
                   ("ps",) * traffic.ps + ("worker",) * (ranks - traffic.ps), costs[best], best, costs)


def _orders(network: Links, tasks: IntArray, phases: Sequence[Phase], ps: int) -> dict[str, IntArray]:
    """Name -> place of each rank, the preferred first where costs tie."""
    leaf, depth = leaf_order(network), depth_first(network)
    orders = {"depth-first": np.repeat(depth, tasks[depth]), "leaf": np.repeat(leaf, tasks[leaf]),
              "alphabetical": np.repeat(np.arange(len(tasks)), tasks)}
    if not ps:
        return orders
    servers = roles.servers_per_node(network, tasks, phases, ps)
    workers = tasks - servers
    return {"roles": np.concatenate([np.repeat(depth, servers[depth]), np.repeat(depth, workers[depth])]), **orders}


def leaf_order(network: Links) -> IntArray:
    """Nodes by leaf zone in the order of the topology; nodes without a zone last."""
    leaf = np.where(network.leaf >= 0, network.leaf, len(network.zones))
    return np.argsort(leaf, kind="stable")


def depth_first(network: Links) -> IntArray:
    """Nodes so that those below any zone stand together: by root, then the zone below it, down to the leaf."""
    if not network.above.shape[1]:
        return np.arange(len(network.nodes))
    # from the root down: turn each row so that its -1 stand behind the leaf
    depth = (network.above >= 0).sum(axis=1)
    columns = np.arange(network.above.shape[1])
    turned = depth[:, None] - 1 - columns
    path = np.where(turned >= 0, np.take_along_axis(network.above, np.maximum(turned, 0), axis=1), -1)
    path[depth == 0, 0] = len(network.zones)
    return np.lexsort(path.T[::-1])
