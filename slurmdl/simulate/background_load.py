"""A cluster as others left it: a trace of jobs, replayed until the free nodes are scattered over the zones."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from slurmdl.topology.topology import Indices, Topology

#: how many times the jobs of a trace have filled the whole cluster before it is looked at
WARMUP_TURNOVER = 3.0
#: sizes in nodes, and durations in any unit, are log-uniform between these; a job takes a twentieth at most
JOB_SIZES = (1, 256)
JOB_DURATIONS = (1.0, 100.0)


def occupied_nodes(topology: Topology, busy_share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which nodes other jobs hold once about `share` of them is busy; shape (nodes,).

    Jobs come one after the other and take the nodes that `first_fit` gives; the one that ends first makes room
    whenever more than `share` would be busy.
    """
    generator = np.random.default_rng(seed)
    total = len(topology.nodes)
    largest = max(1, min(JOB_SIZES[1], total // 20))
    free = np.ones(total, bool)
    ends: list[tuple[float, int, Indices]] = []
    now, number, started = 0.0, 0, 0
    while started < WARMUP_TURNOVER * total:
        size = int(np.exp(generator.uniform(np.log(JOB_SIZES[0]), np.log(largest + 1))))
        while free.sum() - size < (1 - busy_share) * total:
            now, _, ended = heapq.heappop(ends)
            free[ended] = True
        nodes = best_fit_nodes(topology, free, size)
        free[nodes] = False
        duration = float(np.exp(generator.uniform(np.log(JOB_DURATIONS[0]), np.log(JOB_DURATIONS[1]))))
        heapq.heappush(ends, (now + duration, number, nodes))
        number, started = number + 1, started + size
    return ~free


def best_fit_nodes(topology: Topology, free: npt.NDArray[np.bool_], node_count: int) -> Indices:
    """Nodes as a scheduler with a tree takes them: the tightest of the lowest zones that fit, its fullest leaves."""
    room = topology.sum_below(free.astype(np.int64))
    fits = np.flatnonzero(room >= node_count)
    if len(fits):
        zone = int(fits[np.lexsort((room[fits], topology.level[fits]))[0]])
        inside = topology.indices_below(zone)
    else:
        inside = topology.node_order
    inside = inside[free[inside]]
    return inside[np.argsort(-room[topology.leaf[inside]], kind="stable")][:node_count]
