"""Number of nodes and tasks of a job."""

from __future__ import annotations

from dataclasses import dataclass

from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest


@dataclass(frozen=True)
class JobSize:
    nodes: int
    tasks: int

    @property
    def max_tasks_per_node(self) -> int:
        return -(-self.tasks // self.nodes)

    def tasks_on_node(self, index: int) -> int:
        """Tasks of the i-th node in Slurm's even split: the first nodes take the remainder."""
        return self.tasks // self.nodes + (index < self.tasks % self.nodes)


def resolve_job_size(request: JobRequest) -> JobSize:
    """Size of the job; PlacementError if Slurm would choose the node count, or if the counts are contradictory."""
    per_node, tasks = request.ntasks_per_node, request.ntasks
    if request.nodes is not None:
        min_nodes, max_nodes = request.nodes
        if min_nodes != max_nodes:
            raise PlacementError(f"the node count is not certain (-N {min_nodes}-{max_nodes or ''})")
        nodes = min_nodes
    elif tasks is not None and per_node:
        nodes = -(-tasks // per_node)
    elif (tasks or 1) == 1:
        nodes = 1
    else:
        raise PlacementError(f"the node count is not certain (-n {tasks} without -N or --ntasks-per-node)")
    if tasks is None:
        tasks = nodes * (per_node or 1)
    if not 0 < nodes <= tasks:
        raise PlacementError(f"{tasks} tasks do not fill {nodes} nodes")
    if per_node and tasks > nodes * per_node:
        raise PlacementError(f"{tasks} tasks do not fit on {nodes} nodes with {per_node} tasks each")
    return JobSize(nodes, tasks)
