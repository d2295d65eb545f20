"""Placement of a job: nodes and rank map, computed from values alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from slurmdl.cluster.snapshot import ClusterSnapshot, Node
from slurmdl.errors import PlacementError, UsageError
from slurmdl.groups import launched_ranks_per_node
from slurmdl.job_request import JobRequest
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import BoolArray, FloatArray
from slurmdl.placement.candidate_nodes import topology_index
from slurmdl.placement.eligibility import JobSize, candidate_partitions, eligible_tasks, resolve_job_size
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.result import Placement
from slurmdl.placement.search import PlacementSearch
from slurmdl.placement.traffic import Traffic
from slurmdl.placement.zones import SearchProblem
from slurmdl.text import pluralize, sample_names
from slurmdl.topology.topology import Topology


def place_job(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
              matrices: tuple[FloatArray, ...] = ()) -> Placement:
    """Choose the nodes of a job and its rank map on them.

    Each choice that may win is evaluated with its own rank map. The least cost wins, then the fewest zones, the least
    Slurm weight, and the fewest unused nodes. Powered-down nodes are used if the job does not fit on those that are
    up. If too few nodes are free now, the choice is among the nodes that fit when idle, and `free_now` is false.
    `matrices` is the user's own traffic, see traffic.Traffic. With ranks per node in --dl-launcher, or a mesh with
    more than one task per node, the job still needs nodes for its tasks, but the traffic is that of its ranks.

    Raises PlacementError with the reason if no choice is possible or determined by the request, and UsageError for an
    unknown zone in --dl-zone, or for a mesh or groups that do not have the job's number of ranks or nodes.
    """
    if request.unplaceable_reason:
        raise PlacementError(request.unplaceable_reason)
    if request.nodelist:
        raise PlacementError("-w is given: the nodes are chosen already")
    job, traffic = resolve_job_size(request), Traffic.from_options(request.dl, matrices)
    check_feasible(job, cluster, topology)
    check_segment(request, job, topology)
    ranks_per_node, tasks_per_node = request.dl.ranks_per_node, job.max_tasks_per_node
    if not ranks_per_node:
        ranks_per_node = launched_ranks_per_node(request.dl.mesh, request.dl.groups, job.tasks, job.nodes)
        if not ranks_per_node and job.tasks == job.nodes and not request.dl.ps and request.script_ranks_per_node > 1:
            ranks_per_node = request.script_ranks_per_node
        if ranks_per_node:
            request = replace(request, dl=request.dl.with_ranks_per_node(ranks_per_node))
    if ranks_per_node:
        job = JobSize(job.nodes, job.nodes * ranks_per_node)
    if mismatch := traffic.size_mismatch(job.nodes, job.tasks):
        raise UsageError(mismatch)
    problem = SearchProblem(job, traffic.phases(job.tasks), traffic.is_zone_dependent, traffic.mesh,
                            tuple(group.nodes for group in traffic.groups.groups) if traffic.groups else ())
    search = PlacementSearch(request, cluster, topology, scores, problem, traffic)
    reason = ""
    for boots, free_now in ((False, True), (True, True), (True, False)):
        for partition in candidate_partitions(request, cluster) or (None,):
            eligible = eligible_tasks(request, cluster, partition)
            max_tasks = eligible.tasks_when_idle if not free_now else \
                eligible.tasks_now if boots else eligible.tasks_up
            if ranks_per_node:
                max_tasks = np.where(max_tasks >= tasks_per_node, ranks_per_node, 0)
            if request.exclusive_blocks and free_now:
                max_tasks = np.where(in_idle_leaf(cluster, topology), max_tasks, 0)
            try:
                resolved = replace(search, request=replace(request, exclusive=eligible.exclusive))
                placement = resolved.best_placement(max_tasks, free_now)
            except PlacementError as error:
                rejected = ", ".join(f"{count} {why}" for why, count in eligible.rejection_counts.items())
                reason = f"{error}; rejected: {rejected}" if rejected else str(error)
            else:
                if not (boots and free_now):
                    return placement
                reason = f"{placement.reason}; too few nodes are up, so powered-down ones boot for the job"
                return replace(placement, boots=True, reason=reason)
    raise PlacementError(reason)


def check_feasible(job: JobSize, cluster: ClusterSnapshot, topology: Topology) -> None:
    """Raise PlacementError if no choice is possible: no zones, another cluster, or too many nodes or tasks."""
    if not topology.zones:
        raise PlacementError("the topology has no zones")
    if cluster.names != topology.nodes and topology.node_index.keys().isdisjoint(cluster.names):
        raise PlacementError(f"{topology.source or 'the topology'} has none of the cluster's nodes: the cluster has "
                             f"{sample_names(cluster.names, 3)}, the topology has {sample_names(topology.nodes, 3)}")
    if job.nodes > len(cluster.names):
        raise PlacementError(f"{pluralize(job.nodes, 'node')} requested; the cluster has {len(cluster.names)}")
    cpus = int(cluster.cpus.sum())
    if job.tasks > cpus:
        raise PlacementError(f"{pluralize(job.tasks, 'task')} requested; the cluster has {pluralize(cpus, 'CPU')}")


def check_segment(request: JobRequest, job: JobSize, topology: Topology) -> None:
    """Raise PlacementError if no allocation can consist of the segments of --segment."""
    if topology.kind != "block" or not 0 < request.segment <= job.nodes:
        return  # Slurm ignores larger segments
    if job.nodes % request.segment:
        valid = ", ".join(str(size) for size in range(1, job.nodes + 1) if job.nodes % size == 0)
        raise PlacementError(f"--segment={request.segment} does not divide {pluralize(job.nodes, 'node')}; "
                             f"expected {valid}")
    largest = int(np.bincount(topology.leaf[topology.leaf >= 0]).max())
    if request.segment > largest:
        raise PlacementError(f"--segment={request.segment}: the largest block has {pluralize(largest, 'node')}")


def in_idle_leaf(cluster: ClusterSnapshot, topology: Topology) -> BoolArray:
    """Whether no node of a node's leaf zone runs anything; shape (nodes of the snapshot,)."""
    index = topology_index(cluster, topology)
    leaf = np.append(topology.leaf, -1)[index]
    is_busy = cluster.cpus_unallocated < cluster.cpus
    return np.asarray(~np.isin(leaf, leaf[is_busy & (leaf >= 0)]))


def select_subset(allocated: Sequence[str], request: JobRequest, required_node: str, topology: Topology,
                  scores: LinkScores, matrices: tuple[FloatArray, ...] = ()) -> tuple[str, ...]:
    """Select the nodes to keep from an allocation, by the same search as `place_job`.

    If the selection lacks the required node, that node replaces the selected node whose loss costs least. Raises
    PlacementError if the counts contradict each other, or if the topology has no zones.

    Args:
        allocated: nodes to choose from, in Slurm's order; each can take its share of the tasks.
        request: gives the number of nodes to keep, the tasks and the --dl-* options.
        required_node: one of the nodes, e.g. the node of the batch script.
    """
    nodes, _ = request.nodes or (1, None)
    tasks = request.ntasks or nodes * (request.ntasks_per_node or 1)
    job, traffic = JobSize(nodes, tasks), Traffic.from_options(request.dl, matrices)
    cpus = job.max_tasks_per_node
    cluster = ClusterSnapshot.from_nodes([Node(name, ("IDLE",), cpus=cpus, cpus_unallocated=cpus)
                                          for name in allocated])
    selected = place_job(JobRequest(replace(request.dl, zone=()), request.nodes, tasks, exclusive=True), cluster,
                         topology, scores, matrices).nodes
    if required_node in selected:
        return selected

    def cost_key(kept: tuple[str, ...]) -> tuple[float, ...]:
        slots = [(name, job.tasks_on_node(i)) for i, name in enumerate(kept)]
        return best_rank_map(slots, topology, scores, traffic, request.dl.rank0).cost.sort_key

    alternatives = [tuple(name for name in allocated if name == required_node or (name in selected and name != lost))
                    for lost in _worst_node_per_leaf(selected, topology, scores)]
    return min(alternatives, key=cost_key)


def _worst_node_per_leaf(nodes: Sequence[str], topology: Topology, scores: LinkScores) -> Iterable[str]:
    """The node of each leaf zone with the slowest link, of equal ones with the highest latency."""
    bandwidth, latency = capacity.node_links(nodes, scores)
    worst: dict[str, str] = {}
    for i in np.lexsort((-latency, bandwidth)):
        worst.setdefault(topology.leaf_of(nodes[i]), nodes[i])
    return worst.values()
