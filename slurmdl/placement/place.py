"""The one decision: nodes and rank map for a job, from values alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.snapshot import ClusterSnapshot, Node
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.eligibility import EligibleTasks, candidate_partitions, eligible_tasks
from slurmdl.placement.job_size import JobSize, resolve_job_size
from slurmdl.placement.ranks.rank_orders import best_rank_map
from slurmdl.placement.result import Placement
from slurmdl.placement.search import PlacementSearch
from slurmdl.placement.traffic import Traffic
from slurmdl.text import sample_names
from slurmdl.topology.topology import Topology


def place_job(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
          matrices: tuple[npt.NDArray[np.float64], ...] = ()) -> Placement:
    """The nodes that serve the job best, and the rank map that it gets on exactly these.

    Every choice that may win is scored with its own rank map; the least cost wins, then the fewest zones, then
    the least Slurm weight, then the tightest fit. Where too few nodes are free now, the choice is made among the
    nodes that fit once they are idle, and `free_now` is false.

    Parameters
    ----------
    matrices : the user's own traffic, see traffic.Traffic.

    Raises
    ------
    PlacementError : no choice is possible or it would be a guess; the text says why.
    UsageError : a zone of --dl-zone does not exist.
    """
    if request.unplaceable_reason:
        raise PlacementError(request.unplaceable_reason)
    if request.nodelist:
        raise PlacementError("-w is given: the nodes are chosen already")
    job, traffic = resolve_job_size(request), Traffic.from_options(request.dl, matrices)
    check_feasible(job, cluster, topology)
    instance = PlacementSearch(request, cluster, topology, scores, job, traffic, traffic.phases(job.tasks))
    refusal = ""
    for free_now in (True, False):
        for partition in candidate_partitions(request, cluster) or (None,):
            found = eligible_tasks(request, cluster, partition)
            try:
                return instance.best_placement(found.tasks_now if free_now else found.tasks_when_idle, free_now)
            except PlacementError as error:
                refusal = _with_rejections(error, found)
    raise PlacementError(refusal)


def _with_rejections(error: PlacementError, eligible: EligibleTasks) -> str:
    refused = ", ".join(f"{count} {why}" for why, count in eligible.rejection_counts.items())
    return f"{error}{f'; refused: {refused}' if refused else ''}"






# MERGED: Which nodes of an allocation to keep, where it has more than the job was asked to run on.

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


# MERGED: What no choice of nodes can mend, told before anything is computed.

def check_feasible(job: JobSize, cluster: ClusterSnapshot, topology: Topology) -> None:
    """Nothing where a choice is thinkable.

    Raises
    ------
    PlacementError : the topology has no zones or is that of another cluster; more nodes or tasks than there are.
    """
    if not topology.zones:
        raise PlacementError("the topology has no zones")
    if cluster.names != topology.nodes and topology.node_index.keys().isdisjoint(cluster.names):
        raise PlacementError(f"{topology.source or 'the topology'} has none of the cluster's nodes: "
                             f"the cluster's are {sample_names(cluster.names, 3)}, the topology's {sample_names(topology.nodes, 3)}")
    if job.nodes > len(cluster.names):
        raise PlacementError(f"{job.nodes} nodes are asked for, the cluster has {len(cluster.names)}")
    cpus = int(cluster.cpus.sum())
    if job.tasks > cpus:
        raise PlacementError(f"{job.tasks} tasks are asked for, the cluster has {cpus} CPUs")
