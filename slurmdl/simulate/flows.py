"""What is under way at the same time, as one flow for all messages of a phase between two ranks.

Where a ring turns, each rank passes parts of one size to the same neighbour, turn after turn: that is one flow of
all their bytes, and the delay of as many turns. Ranks begin a phase together. The workers of a leaf zone whose nodes
are alike, and hold no server, can stand for each other: one flow to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmdl.placement.cost import FloatArray, IntArray, NetworkLinks
from slurmdl.simulate.network import SimulatedNetwork
from slurmdl.simulate.training import FLOAT32_BYTES, TrainingWorkload

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
