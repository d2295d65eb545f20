"""Which nodes of an allocation to keep, where it has more than the job was asked to run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.model import ClusterSnapshot, Node
from slurmdl.network import capacity
from slurmdl.network.model import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.placement.ranks.rankmap import best_rank_map
from slurmdl.placement.traffic import Traffic
from slurmdl.request import JobRequest
from slurmdl.topology.model import Topology


def select_subset(allocated: Sequence[str], request: JobRequest, required_node: str, topology: Topology, scores: LinkScores,
         matrices: tuple[npt.NDArray[np.float64], ...] = ()) -> tuple[str, ...]:
    """The nodes of an allocation that serve the job best, by the one decision that also places jobs.

    Where that leaves out the node that has to stay, it takes the place of the kept node whose loss costs least.

    Parameters
    ----------
    allocated : the nodes to choose from, in Slurm's order; each can take its share of the tasks.
    request : its number of nodes is the number to keep; of the rest only tasks and the --dl-* options count.
    stays : one of the nodes, e.g. that of the batch script.

    Raises
    ------
    PlacementError : the counts contradict each other, or the topology has no zones.
    """
    nodes, _ = request.nodes or (1, None)
    tasks = request.ntasks or nodes * (request.ntasks_per_node or 1)
    each = -(-tasks // nodes)
    asked = JobRequest(replace(request.dl, zone=()), request.nodes, tasks)
    free = ClusterSnapshot.from_nodes([Node(name, ("IDLE",), cpus=each, cpus_unallocated=each) for name in allocated])
    best = place_job(asked, free, topology, scores, matrices).nodes
    if required_node in best:
        return best
    traffic = Traffic.from_options(request.dl, matrices)
    slots = [tasks // nodes + (i < tasks % nodes) for i in range(nodes)]

    def cost(kept: tuple[str, ...]) -> tuple[float, ...]:
        return best_rank_map(list(zip(kept, slots, strict=True)), topology, scores, traffic,
                        request.dl.rank0).cost.sort_key

    ways = [tuple(name for name in allocated if name == required_node or (name in best and name != lost))
            for lost in _worst_node_per_leaf(best, topology, scores)]
    return min(ways, key=cost)


def _worst_node_per_leaf(nodes: Sequence[str], topology: Topology, scores: LinkScores) -> Iterator[str]:
    """Of each leaf zone the node with the slowest link, or the latest of equal ones: they differ in nothing else."""
    speed, delay = capacity.node_links(nodes, scores)
    seen = set()
    for i in np.lexsort((-delay, speed)):
        zone = topology.path_of(nodes[i])
        if zone not in seen:
            seen.add(zone)
            yield nodes[i]
