"""What is under way at the same time, as one flow for all messages of a phase between two ranks.

Where a ring turns, each rank passes parts of one size to the same neighbour, turn after turn: that is one flow of
all their bytes, and the delay of as many turns. Ranks begin a phase together. The workers of a leaf zone whose nodes
are alike, and hold no server, can stand for each other: one flow to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.placement.iteration_cost import NetworkLinks
from slurmdl.simulate.workload import FLOAT32_BYTES, TrainingWorkload

#: flows of a phase from which on nodes that are alike are taken together
MERGE_ABOVE = 20_000


@dataclass(frozen=True, eq=False)
class FlowPhase:
    """A phase: flows between different nodes that begin together.

    Attributes
    ----------
    source, target : shape (flows,), nodes.
    size : shape (flows,), bytes.
    delay : seconds that its messages, one after the other, are delayed.
    across : bytes between leaf zones.
    times : shape (nodes,), how many nodes each stands for.
    """

    source: IntArray
    target: IntArray
    size: FloatArray
    latency_s: float
    inter_zone_bytes: float
    multiplicity: IntArray


def flow_phases(workload: TrainingWorkload, links: NetworkLinks, network: SimulatedNetwork, node_of_rank: IntArray, zones: Sequence[str],
           exchange_count: int) -> list[FlowPhase]:
    """Those of one step of allreduce, for the model as a whole, or of a parameter server; of all exchanges of gossip.

    Parameters
    ----------
    place : shape (ranks,), node of each rank.
    zones : entry i is the leaf zone of rank i.
    """
    if workload.strategy == "ps":
        return list(_ps_phases(workload, links, network, node_of_rank))
    if workload.is_gossip:
        graph, size = workload.make_graph(zones), workload.wire_bytes(workload.parameters)
        return [_inter_node_phase(network, node_of_rank, node_of_rank[graph.round(turn).target], np.full(len(node_of_rank), size), 1)
                for turn in range(exchange_count)]
    found = replace(
    workload.placement_traffic,
    pattern=workload.effective_pattern).phases(
        len(node_of_rank),
         network.leaf[node_of_rank])
    return [_inter_node_phase(network, node_of_rank[phase.source], node_of_rank[phase.target],
                     np.broadcast_to(phase.bytes_per_pair, phase.source.shape), phase.rounds) for phase in found]


def _inter_node_phase(network: SimulatedNetwork, source: IntArray, target: IntArray,
                      size: FloatArray, rounds: float) -> FlowPhase:
    apart = source != target
    source, target, size = source[apart], target[apart], np.asarray(size, float)[apart]
    delay = rounds * float(network.latency(source, target).max(initial=0.0))
    across = float(size.sum(where=network.leaf[source] != network.leaf[target]))
    return FlowPhase(source, target, size, delay, across, np.ones(len(network.leaf), np.int64))


def _ps_phases(workload: TrainingWorkload, links: NetworkLinks, network: SimulatedNetwork,
               node_of_rank: IntArray) -> Iterator[FlowPhase]:
    """All push their gradients, then all pull the parameters."""
    servers = node_of_rank[:workload.ps]
    workers, tasks = np.unique(node_of_rank[workload.ps:], return_counts=True)
    delay = float(network.latency(servers[:, None], workers[None]).max(initial=0.0))
    size = np.array(workload.shard_sizes(), float) * FLOAT32_BYTES
    leaving = network.leaf[servers][:, None] != network.leaf[workers][None]
    across = float((size[:, None] * tasks * leaving).sum())
    times = np.ones(len(links.nodes), np.int64)
    if len(servers) * len(workers) > MERGE_ABOVE:
        workers, tasks, alike = _merge_identical(links, servers, workers, tasks)
        times[workers] = alike
    server, worker = (axis.ravel() for axis in np.broadcast_arrays(servers[:, None], workers[None]))
    sizes = (size[:, None] * tasks).ravel()
    apart = server != worker
    server, worker, sizes = server[apart], worker[apart], sizes[apart]
    yield FlowPhase(worker, server, sizes, delay, across, times)
    yield FlowPhase(server, worker, sizes, delay, across, times)


def _merge_identical(links: NetworkLinks, servers: IntArray, workers: IntArray,
           tasks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The first node of those that are alike, the tasks on all of them, and how many they are."""
    alone = np.where(np.isin(workers, servers), workers, -1)
    key = np.stack([links.leaf[workers], links.node_capacity[workers], tasks, alone], axis=1)
    _, first, which, alike = np.unique(key, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return workers[first], np.bincount(which.ravel(), tasks).astype(np.int64), alike


# MERGED: The links of a job's nodes as SimGrid's platform: zones, capacities and delays are those of the cost model.

class SimulatedNetwork:
    """Ways between nodes: up from the leaf zone to the lowest common zone, and down again.

    A node's link and a zone's uplink carry their capacity in each direction. A slow way between two leaf zones
    (cost.Trunks) is a further link on it. Nodes without a zone are joined by their own links alone.

    Attributes
    ----------
    leaf : shape (nodes,), number of each node's leaf zone, counted over those that have a node.
    """

    def __init__(self, links: NetworkLinks) -> None:
        self._links = links
        zones, first, leaf = np.unique(links.leaf, return_index=True, return_inverse=True)
        self.leaf: IntArray = leaf.astype(np.int64)
        self._ancestors = [[zone for zone in row if zone >= 0] for row in links.ancestors[first].tolist()]
        number = {zone: place for place, zone in enumerate(zones.tolist())}
        self._inter_leaf = {frozenset(number[end] for end in ends): (trunk, number[ends[0]])
                        for trunk, ends in enumerate(links.slow_paths.leaf_pairs.tolist())}
        self._leaf_latencies: dict[tuple[int, int], float] = {}

    def latency(self, source: IntArray, target: IntArray) -> FloatArray:
        """Seconds one way from node to node, 0 inside a node; source and target broadcast against each other."""
        source, target = np.broadcast_arrays(source, target)
        count = len(self._ancestors)
        pairs, which = np.unique(self.leaf[source] * count + self.leaf[target], return_inverse=True)
        between = np.array([self._leaf_latency(int(pair) // count, int(pair) % count) for pair in pairs])
        node = self._links.node_latency
        return np.asarray(np.where(source == target, 0.0,
                                   node[source] + node[target] + between[which].reshape(source.shape)))

    def _leaf_latency(self, left: int, right: int) -> float:
        """Seconds one way from leaf zone to leaf zone."""
        if (left, right) not in self._leaf_latencies:
            up, down = self._uplinks_on_path(left, right)
            usual = float(self._links.zone_latency[up + down].sum())
            trunk = self._inter_leaf.get(frozenset((left, right)))
            slow = float(self._links.slow_paths.latency[trunk[0]]) if trunk and left != right else 0.0
            self._leaf_latencies[left, right] = max(usual, slow)
        return self._leaf_latencies[left, right]

    def _uplinks_on_path(self, left: int, right: int) -> tuple[list[int], list[int]]:
        """Zones whose uplinks are passed upwards, and then downwards, in this order."""
        here, there = self._ancestors[left], self._ancestors[right]
        return ([zone for zone in here if zone not in there],
                [zone for zone in reversed(there) if zone not in here])

    def _route(self, left: int, right: int) -> list[int]:
        """The links from leaf zone to leaf zone as `engine` counts them."""
        nodes, zones = len(self._links.nodes), len(self._links.zones)
        up, down = self._uplinks_on_path(left, right)
        way = [2 * (nodes + zone) for zone in up]
        if trunk := self._inter_leaf.get(frozenset((left, right))):
            way.append(2 * (nodes + zones + trunk[0]) + (trunk[1] != left))
        return way + [2 * (nodes + zone) + 1 for zone in down]

    def platform_spec(self, pairs: Iterable[tuple[int, int]], multiplicity: npt.ArrayLike = 1) -> dict[str, Any]:
        """The platform as `engine` reads it, with ways for all messages between these pairs of nodes.

        Parameters
        ----------
        times : shape (nodes,), how many nodes each stands for.
        """
        links = self._links
        capacity = np.concatenate([links.node_capacity * np.asarray(multiplicity), links.zone_capacity,
                                   links.slow_paths.capacity])
        leaves = {(min(ends), max(ends)) for ends in {(int(self.leaf[one]), int(self.leaf[other]))
                                                      for one, other in pairs}}
        return {"links": capacity.tolist(), "zones": len(self._ancestors),
                "hosts": [[leaf, node] for node, leaf in enumerate(self.leaf.tolist())],
                "ways": [[one, other, self._route(one, other)] for one, other in sorted(leaves) if one != other]}
