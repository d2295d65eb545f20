"""A cluster as others left it: a trace of jobs, replayed until the free nodes are scattered over the zones."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from slurmdl.topology.model import Indices, Topology

#: how many times the jobs of a trace have filled the whole cluster before it is looked at
TURNOVER = 3.0
#: sizes in nodes, and durations in any unit, are log-uniform between these; a job takes a twentieth at most
SIZES = (1, 256)
DURATIONS = (1.0, 100.0)


def busy_nodes(topology: Topology, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which nodes other jobs hold once about `share` of them is busy; shape (nodes,).

    Jobs come one after the other and take the nodes that `first_fit` gives; the one that ends first makes room
    whenever more than `share` would be busy.
    """
    generator = np.random.default_rng(seed)
    total = len(topology.nodes)
    largest = max(1, min(SIZES[1], total // 20))
    free = np.ones(total, bool)
    ends: list[tuple[float, int, Indices]] = []
    now, number, started = 0.0, 0, 0
    while started < TURNOVER * total:
        size = int(np.exp(generator.uniform(np.log(SIZES[0]), np.log(largest + 1))))
        while free.sum() - size < (1 - share) * total:
            now, _, ended = heapq.heappop(ends)
            free[ended] = True
        nodes = first_fit(topology, free, size)
        free[nodes] = False
        duration = float(np.exp(generator.uniform(np.log(DURATIONS[0]), np.log(DURATIONS[1]))))
        heapq.heappush(ends, (now + duration, number, nodes))
        number, started = number + 1, started + size
    return ~free


def first_fit(topology: Topology, free: npt.NDArray[np.bool_], size: int) -> Indices:
    """Nodes as a scheduler with a tree takes them: the tightest of the lowest zones that fit, its fullest leaves."""
    room = topology.sums(free.astype(np.int64))
    fits = np.flatnonzero(room >= size)
    if len(fits):
        zone = int(fits[np.lexsort((room[fits], topology.level[fits]))[0]])
        inside = topology.members(zone)
    else:
        inside = topology.order
    inside = inside[free[inside]]
    return inside[np.argsort(-room[topology.leaf[inside]], kind="stable")][:size]
