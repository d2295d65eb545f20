"""Background load: a random job trace, replayed until the free nodes are scattered over the zones."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from slurmdl.topology.topology import Indices, Topology

WARMUP_TURNOVER = 3.0  # times that the jobs of the trace have filled the whole cluster
#: bounds of log-uniform job sizes in nodes (at most a twentieth of the cluster) and durations in any unit
JOB_SIZES = (1, 256)
JOB_DURATIONS = (1.0, 100.0)


def occupied_nodes(topology: Topology, busy_share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Nodes that other jobs hold, about `busy_share` of all; shape (nodes,).

    Jobs are placed by `best_fit_nodes`; the first one to finish is removed whenever more nodes would be busy.
    """
    generator = np.random.default_rng(seed)
    total = len(topology.nodes)
    largest = max(1, min(JOB_SIZES[1], total // 20))
    free = np.ones(total, bool)
    running: list[tuple[float, int, Indices]] = []  # end time, tie-breaker, nodes
    now, job_id, started = 0.0, 0, 0
    while started < WARMUP_TURNOVER * total:
        size = int(np.exp(generator.uniform(np.log(JOB_SIZES[0]), np.log(largest + 1))))
        while free.sum() - size < (1 - busy_share) * total:
            now, _, released = heapq.heappop(running)
            free[released] = True
        nodes = best_fit_nodes(topology, free, size)
        free[nodes] = False
        duration = float(np.exp(generator.uniform(np.log(JOB_DURATIONS[0]), np.log(JOB_DURATIONS[1]))))
        heapq.heappush(running, (now + duration, job_id, nodes))
        job_id, started = job_id + 1, started + size
    return ~free


def best_fit_nodes(topology: Topology, free: npt.NDArray[np.bool_], node_count: int) -> Indices:
    """Select nodes as Slurm's tree plugin does: the tightest of the lowest zones that fit, fullest leaves first."""
    free_below = topology.sum_below(free.astype(np.int64))
    fits = np.flatnonzero(free_below >= node_count)
    if len(fits):
        zone = int(fits[np.lexsort((free_below[fits], topology.level[fits]))[0]])
        candidates = topology.indices_below(zone)
    else:
        candidates = topology.node_order
    candidates = candidates[free[candidates]]
    return candidates[np.argsort(-free_below[topology.leaf[candidates]], kind="stable")][:node_count]
