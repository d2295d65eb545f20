"""Number of nodes and tasks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.slurm.step_layout import block_distribution
from slurmdl.text import pluralize


@dataclass(frozen=True)
class JobSize:
    nodes: int
    tasks: int

    @property
    def max_tasks_per_node(self) -> int:
        return -(-self.tasks // self.nodes)

    def tasks_on_node(self, index: int) -> int:
        """Tasks of the i-th node in an even split: the first nodes take the remainder.

        For jobs without --ntasks-per-node and whole nodes see `split_tasks`.
        """
        return self.tasks // self.nodes + (index < self.tasks % self.nodes)


def resolve_job_size(request: JobRequest) -> JobSize:
    """Size of the job; PlacementError if Slurm would choose the node count, or if the counts are contradictory."""
    per_node, tasks = request.ntasks_per_node, request.ntasks
    if request.gpus and request.dl.node_binding == "late":
        raise PlacementError("--dl-node-binding=late: the GPU options count GPUs for a fixed number of nodes")
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
        raise PlacementError(f"{pluralize(tasks, 'task')} do not fill {pluralize(nodes, 'node')}")
    if per_node and tasks > nodes * per_node:
        raise PlacementError(f"{tasks} tasks do not fit on {pluralize(nodes, 'node')} with "
                             f"{pluralize(per_node, 'task')} each")
    return JobSize(nodes, tasks)


def split_tasks(request: JobRequest, job: JobSize, max_tasks: Sequence[int]) -> list[int]:
    """Tasks per node as Slurm 22.05 allocates their CPUs (select/cons_tres, CPUs or cores of one thread).

    Without a number of tasks per node, each node in Slurm's order takes all it can, and leaves one CPU for each of
    the next nodes: `-N 3 -n 10` gives 8, 1, 1 (_cpus_to_use in src/plugins/select/cons_tres/job_test.c).

    Args:
        max_tasks: tasks that each node of the job can take, in Slurm's order.
    """
    if request.dl.ranks_per_node:
        return [request.dl.ranks_per_node] * job.nodes
    if request.ntasks_per_node or request.exclusive:
        limits = [request.ntasks_per_node or limit for limit in max_tasks]
        return block_distribution(limits, job.tasks)
    cpus_per_task, gpus = request.cpus_per_task or 1, request.gpus
    min_cpus = max(cpus_per_task, gpus.cpus_per_gpu * max(gpus.per_node, 1) if gpus else 0)
    remaining = max(job.tasks * cpus_per_task, job.nodes * min_cpus)
    limits = []
    for further_nodes, limit in zip(reversed(range(job.nodes)), max_tasks, strict=True):
        cpus = min(limit * cpus_per_task, max(remaining - further_nodes, min_cpus))
        limits.append(cpus // cpus_per_task)
        remaining -= cpus
    return block_distribution(limits, job.tasks)
