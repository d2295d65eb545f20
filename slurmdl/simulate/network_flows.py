"""The network of a job as a SimGrid platform, and the messages of a step as concurrent flows.

A ring is one flow per pair of neighbors with the bytes of all turns, plus the latency of all turns. All ranks start a
phase together. Workers on identical nodes of one leaf zone without a server can be merged into one flow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.placement.iteration_cost import NetworkLinks
from slurmdl.plan import group_ranks
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.traffic import Phase, gather_phases, shard_phase

MERGE_ABOVE = 20_000  # flows of a phase above which identical nodes are merged


class SimulatedNetwork:
    """Routes between nodes: up from the leaf zone to the lowest common zone, and down again.

    Links are full duplex, with the capacities and latencies of the cost model. A slow inter-leaf path is an
    additional link. Nodes without a zone are connected by their own links alone.
    """

    def __init__(self, links: NetworkLinks) -> None:
        self.links = links
        zones, first, leaf = np.unique(links.leaf, return_index=True, return_inverse=True)
        self.leaf: IntArray = leaf.astype(np.int64)  # shape (nodes,), index among the leaf zones that have a node
        self._ancestors = [[zone for zone in row if zone >= 0] for row in links.ancestors[first].tolist()]
        leaf_index = {zone: i for i, zone in enumerate(zones.tolist())}
        #: pair of leaves -> index of the slow path, and the leaf at its lower end
        self._inter_leaf = {frozenset(leaf_index[zone] for zone in pair): (i, leaf_index[pair[0]])
                            for i, pair in enumerate(links.slow_paths.leaf_pairs.tolist())}

    def latency(self, source: IntArray, target: IntArray) -> FloatArray:
        """One-way latency in s between nodes, 0 inside a node; source and target are broadcast."""
        source, target = np.broadcast_arrays(source, target)
        count = len(self._ancestors)
        pairs, inverse = np.unique(self.leaf[source] * count + self.leaf[target], return_inverse=True)
        between = np.array([self._leaf_latency(*divmod(int(pair), count)) for pair in pairs])
        node = self.links.node_latency
        return np.asarray(np.where(source == target, 0.0,
                                   node[source] + node[target] + between[inverse].reshape(source.shape)))

    def _leaf_latency(self, left: int, right: int) -> float:
        up, down = self._uplinks_on_path(left, right)
        uplinks_s = float(self.links.zone_latency[up + down].sum())
        path = self._inter_leaf.get(frozenset((left, right)))
        return max(uplinks_s, float(self.links.slow_paths.latency[path[0]]) if path and left != right else 0.0)

    def _uplinks_on_path(self, left: int, right: int) -> tuple[list[int], list[int]]:
        """Zones whose uplinks are crossed upward, then downward, in order."""
        left_zones, right_zones = self._ancestors[left], self._ancestors[right]
        return ([zone for zone in left_zones if zone not in right_zones],
                [zone for zone in reversed(right_zones) if zone not in left_zones])

    def _route(self, left: int, right: int) -> list[int]:
        """Links from leaf zone to leaf zone, numbered as in simgrid_engine."""
        nodes, zones = len(self.links.nodes), len(self.links.zones)
        up, down = self._uplinks_on_path(left, right)
        route = [2 * (nodes + zone) for zone in up]
        if path := self._inter_leaf.get(frozenset((left, right))):
            route.append(2 * (nodes + zones + path[0]) + (path[1] != left))
        return route + [2 * (nodes + zone) + 1 for zone in down]

    def platform_spec(self, pairs: Iterable[tuple[int, int]], multiplicity: npt.ArrayLike = 1) -> dict[str, Any]:
        """Platform in the format of simgrid_engine, with the routes between these pairs of nodes.

        `multiplicity` has shape (nodes,): the number of identical nodes that each node represents.
        """
        links = self.links
        capacity = np.concatenate([links.node_capacity * np.asarray(multiplicity), links.zone_capacity,
                                   links.slow_paths.capacity])
        leaf_pairs = {tuple(sorted((int(self.leaf[left]), int(self.leaf[right])))) for left, right in pairs}
        return {"links": capacity.tolist(), "zones": len(self._ancestors),
                "hosts": [[leaf, node] for node, leaf in enumerate(self.leaf.tolist())],
                "routes": [[left, right, self._route(left, right)] for left, right in sorted(leaf_pairs)
                           if left != right]}


@dataclass(frozen=True, eq=False)
class FlowPhase:
    """Flows between different nodes that start together.

    Attributes:
        source, target, size: shape (flows,); nodes and bytes.
        latency_s: of the sequential messages of a flow.
        inter_zone_bytes: bytes between leaf zones.
        multiplicity: shape (nodes,), number of identical nodes that each node represents.
    """

    source: IntArray
    target: IntArray
    size: FloatArray
    latency_s: float
    inter_zone_bytes: float
    multiplicity: IntArray


def flow_phases(workload: TrainingWorkload, network: SimulatedNetwork, node_of_rank: IntArray, zones: Sequence[str],
                exchange_count: int) -> tuple[list[FlowPhase], list[FlowPhase]]:
    """Phases of the allreduce of the gradients of one step (for the whole model), and of the exchanges of models.

    Args:
        node_of_rank: shape (ranks,).
        zones: leaf zones of the ranks.
        exchange_count: exchanges of gossip or between islands.
    """
    def of_traffic(phases: Iterable[Phase]) -> list[FlowPhase]:
        return [_inter_node_phase(network, node_of_rank[phase.source], node_of_rank[phase.target],
                                  np.broadcast_to(phase.bytes_per_pair, phase.source.shape), phase.rounds)
                for phase in phases]

    if workload.strategy == "ps":
        return [], _ps_phases(workload, network, node_of_rank)
    if workload.islands:
        gather = [*gather_phases(group_ranks(range(len(zones)), zones), 4.0 * workload.parameters)]
        return of_traffic(gather) * 2, of_traffic(_island_exchanges(workload, zones, exchange_count, gather))
    if workload.is_gossip:
        graph = workload.make_graph(zones)
        size = np.full(len(node_of_rank), workload.wire_bytes(workload.parameters))
        return [], [_inter_node_phase(network, node_of_rank, node_of_rank[graph.round(i).target], size, 1)
                    for i in range(exchange_count)]
    traffic = replace(workload.placement_traffic, pattern=workload.effective_pattern)
    return of_traffic(traffic.phases(len(node_of_rank), network.leaf[node_of_rank])), []


def _island_exchanges(workload: TrainingWorkload, zones: Sequence[str], count: int,
                      gather: Sequence[Phase]) -> list[Phase]:
    """Exchanges of shards between the islands; each is gathered in each island."""
    islands = group_ranks(range(len(zones)), zones)
    others, size = len(islands) - 1, float(workload.wire_bytes(workload.parameters))
    phases: list[Phase] = []
    for index in range(count if others else 0):
        if workload.strategy == "local-sgd":
            phases.append(shard_phase(islands, [*range(1, len(islands)), 0], 2 * size * others / len(islands),
                                      rounds=2 * others))
        else:
            target = workload.make_graph([zones[island[0]] for island in islands]).round(index).target
            phases.append(shard_phase(islands, target.tolist(), size, rounds=1))
        phases += gather
    return phases


def _inter_node_phase(network: SimulatedNetwork, source: IntArray, target: IntArray,
                      size: FloatArray, rounds: float) -> FlowPhase:
    is_remote = source != target
    source, target, size = source[is_remote], target[is_remote], np.asarray(size, float)[is_remote]
    latency_s = rounds * float(network.latency(source, target).max(initial=0.0))
    inter_zone_bytes = float(size.sum(where=network.leaf[source] != network.leaf[target]))
    return FlowPhase(source, target, size, latency_s, inter_zone_bytes, np.ones(len(network.leaf), np.int64))


def _ps_phases(workload: TrainingWorkload, network: SimulatedNetwork, node_of_rank: IntArray) -> list[FlowPhase]:
    """All workers push their gradients, then all pull the parameters."""
    servers = node_of_rank[:workload.ps]
    workers, tasks = np.unique(node_of_rank[workload.ps:], return_counts=True)
    latency_s = float(network.latency(servers[:, None], workers[None]).max(initial=0.0))
    shard_bytes = np.array(workload.shard_bytes(), float)[:, None]
    is_inter_zone = network.leaf[servers][:, None] != network.leaf[workers][None]
    inter_zone_bytes = float((shard_bytes * tasks * is_inter_zone).sum())
    multiplicity = np.ones(len(network.leaf), np.int64)
    if len(servers) * len(workers) > MERGE_ABOVE:
        workers, tasks, counts = _merge_identical(network.links, servers, workers, tasks)
        multiplicity[workers] = counts
    server, worker = (axis.ravel() for axis in np.broadcast_arrays(servers[:, None], workers[None]))
    sizes, is_remote = (shard_bytes * tasks).ravel(), server != worker
    server, worker, sizes = server[is_remote], worker[is_remote], sizes[is_remote]
    return [FlowPhase(source, target, sizes, latency_s, inter_zone_bytes, multiplicity)
            for source, target in ((worker, server), (server, worker))]


def _merge_identical(links: NetworkLinks, servers: IntArray, workers: IntArray,
                     tasks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """For each group of identical nodes: its first node, the tasks on all of them, and their number."""
    server_node = np.where(np.isin(workers, servers), workers, -1)  # nodes with a server are not merged
    key = np.stack([links.leaf[workers], links.node_capacity[workers], tasks, server_node], axis=1)
    _, first, inverse, counts = np.unique(key, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return workers[first], np.bincount(inverse.ravel(), tasks).astype(np.int64), counts
