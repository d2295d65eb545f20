"""What is under way at the same time, as one flow for all messages of a phase between two ranks.

Where a ring turns, each rank passes parts of one size to the same neighbour, turn after turn: that is one flow of
all their bytes, and the delay of as many turns. Ranks begin a phase together. The workers of a leaf zone whose nodes
are alike, and hold no server, can stand for each other: one flow to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmdl.placement.cost import FloatArray, IntArray, Links
from slurmdl.simulate.network import Network
from slurmdl.simulate.training import ELEMENT, Training

#: flows of a phase from which on nodes that are alike are taken together
MANY = 20_000


@dataclass(frozen=True, eq=False)
class Flows:
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
    delay: float
    across: float
    times: IntArray


def phases(training: Training, links: Links, network: Network, place: IntArray, zones: Sequence[str],
           exchanges: int) -> list[Flows]:
    """Those of one step of allreduce, for the model as a whole, or of a parameter server; of all exchanges of gossip.

    Parameters
    ----------
    place : shape (ranks,), node of each rank.
    zones : entry i is the leaf zone of rank i.
    """
    if training.strategy == "ps":
        return list(_shards(training, links, network, place))
    if training.gossips:
        graph, size = training.graph(zones), training.bytes(training.parameters)
        return [_between(network, place, place[graph.round(turn).target], np.full(len(place), size), 1)
                for turn in range(exchanges)]
    found = replace(training.placed_as, pattern=training.pattern).phases(len(place), network.leaf[place])
    return [_between(network, place[phase.source], place[phase.target],
                     np.broadcast_to(phase.size, phase.source.shape), phase.rounds) for phase in found]


def _between(network: Network, source: IntArray, target: IntArray, size: FloatArray, rounds: float) -> Flows:
    apart = source != target
    source, target, size = source[apart], target[apart], np.asarray(size, float)[apart]
    delay = rounds * float(network.delay(source, target).max(initial=0.0))
    across = float(size.sum(where=network.leaf[source] != network.leaf[target]))
    return Flows(source, target, size, delay, across, np.ones(len(network.leaf), np.int64))


def _shards(training: Training, links: Links, network: Network, place: IntArray) -> Iterator[Flows]:
    """All push their gradients, then all pull the parameters."""
    servers = place[:training.ps]
    workers, tasks = np.unique(place[training.ps:], return_counts=True)
    delay = float(network.delay(servers[:, None], workers[None]).max(initial=0.0))
    size = np.array(training.shards(), float) * ELEMENT
    leaving = network.leaf[servers][:, None] != network.leaf[workers][None]
    across = float((size[:, None] * tasks * leaving).sum())
    times = np.ones(len(links.nodes), np.int64)
    if len(servers) * len(workers) > MANY:
        workers, tasks, alike = _alike(links, servers, workers, tasks)
        times[workers] = alike
    server, worker = (axis.ravel() for axis in np.broadcast_arrays(servers[:, None], workers[None]))
    sizes = (size[:, None] * tasks).ravel()
    apart = server != worker
    server, worker, sizes = server[apart], worker[apart], sizes[apart]
    yield Flows(worker, server, sizes, delay, across, times)
    yield Flows(server, worker, sizes, delay, across, times)


def _alike(links: Links, servers: IntArray, workers: IntArray,
           tasks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The first node of those that are alike, the tasks on all of them, and how many they are."""
    alone = np.where(np.isin(workers, servers), workers, -1)
    key = np.stack([links.leaf[workers], links.node_capacity[workers], tasks, alone], axis=1)
    _, first, which, alike = np.unique(key, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return workers[first], np.bincount(which.ravel(), tasks).astype(np.int64), alike
