"""What no choice of nodes can mend, told before anything is computed."""

from __future__ import annotations

from slurmdl.cluster.model import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.placement.shape import JobSize
from slurmdl.topology.model import Topology


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
                             f"the cluster's are {_first_names(cluster.names)}, the topology's {_first_names(topology.nodes)}")
    if job.nodes > len(cluster.names):
        raise PlacementError(f"{job.nodes} nodes are asked for, the cluster has {len(cluster.names)}")
    cpus = int(cluster.cpus.sum())
    if job.tasks > cpus:
        raise PlacementError(f"{job.tasks} tasks are asked for, the cluster has {cpus} CPUs")


def _first_names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") or "none"
