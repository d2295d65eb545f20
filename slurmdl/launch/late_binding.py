"""`--dl-node-binding=late`: request more nodes than the job needs; drop the worst ones inside the job.

The submission requests a range, `--nodes=N-(N+k)`. Slurm allocates the free nodes from N on, so the job waits no
longer than for N (Slurm 22.05 tries the largest number first). In the job the first `slurmdl srun` knows the nodes
and the present state of the links. It keeps the N best nodes and releases the others by `scontrol update NodeList=`
(scontrol(1), "resize"), which needs no privilege for a user's own job. The node of the batch script stays.

The batch script keeps the environment of the larger job, since a program cannot change its parent's environment. So
each `slurmdl srun` queries the nodes that the job has now; a plain `srun` needs `-N` and `-n`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from slurmdl.errors import InputError, PlacementError
from slurmdl.launch.submission_record import RequestedSize, overallocated_count
from slurmdl.slurm import hostlist, jobs
from slurmdl.slurm.jobs import Allocation, JobRecord
from slurmdl.text import pluralize

#: task counts of the larger job
_TASK_COUNT_VARIABLES = ("SLURM_NPROCS", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")


def shrink_job(environ: Mapping[str, str], requested_size: RequestedSize,
               choose_nodes: Callable[[JobRecord], Sequence[str]], on_warning: Callable[[str], None], *,
               dry_run: bool, left_out: Collection[str] = ()) -> dict[str, str]:
    """Reduce the job to the requested number of nodes and return its new environment.

    If the job cannot be reduced, its steps run on the nodes that would have been kept, and a warning says so. Raises
    SlurmdlError if the nodes of the job are not known.

    Args:
        environ: result of `environ_with_requested_size`.
        dry_run: do everything but the reduction.
        left_out: nodes that are not kept; the others are enough, and that of the batch script is one of them.
    """
    job_allocation = jobs.read_allocation(environ)
    job_id = jobs.own_job_id(environ)
    job = jobs.query_job(job_id)[0]
    if not job.nodes:
        raise InputError(f"squeue --jobs={job_id}: the job has no nodes")
    host = job.batch_host or job.nodes[0]
    kept: Sequence[str] = job.nodes
    # a job with still more nodes is another job that inherited the submission record
    if requested_size.nodes < len(job.nodes) <= overallocated_count(requested_size.nodes):
        # checked before `choose_nodes`: the step of a probe is listed for a moment after its end
        is_busy = not dry_run and jobs.other_steps_run(job_id)
        candidates = replace(job, nodes=tuple(node for node in job.nodes if node not in left_out), batch_host=host)
        try:
            kept = choose_nodes(candidates)
        except PlacementError as error:
            others = (node for node in candidates.nodes if node != host)
            kept = [host, *others][:requested_size.nodes]
            on_warning(f"{error}; the step runs on the first {pluralize(requested_size.nodes, 'node')} of the job")
        shortfall = _cpu_shortfall_reason(environ, requested_size, job_allocation.restricted_to(kept))
        if shortfall:
            kept = job.nodes
            on_warning(f"the job keeps its {pluralize(len(kept), 'node')}, and the step has all of them: {shortfall}")
        elif not dry_run:
            problem = "other steps run" if is_busy else jobs.shrink_job_error(job_id, kept)
            if problem:
                on_warning(f"the job keeps its {pluralize(len(job.nodes), 'node')} ({problem}); the step runs on "
                           f"{requested_size.nodes} of them")
    return environ_with_nodes(environ, job_allocation.restricted_to(kept))


def _cpu_shortfall_reason(environ: Mapping[str, str], requested_size: RequestedSize,
                          kept: Allocation) -> str:
    """Why the tasks do not fit the job's CPUs on these nodes, or "".

    For tasks that the nodes do not share evenly, Slurm 24.11 allocates no more CPUs in total than the tasks need,
    regardless of `--ntasks-per-node` and `--mincpus`. Slurm 22.05 gives each node its share.
    """
    cpus_per_task, cpus = environ.get("SLURM_CPUS_PER_TASK", "1"), sum(kept.cpus_per_node)
    tasks = requested_size.tasks
    if tasks is None or not cpus_per_task.isdigit() or tasks * int(cpus_per_task) <= cpus:
        return ""
    return f"{tasks} tasks do not fit the {pluralize(cpus, 'CPU')} that it has on {len(kept.nodes)} of them"


def environ_with_nodes(environ: Mapping[str, str], kept: Allocation) -> dict[str, str]:
    """The environment of a job that was reduced to these nodes, as in Slurm's script for a resized job."""
    count, nodes = str(len(kept.nodes)), hostlist.fold_hostlist(kept.nodes)
    return {**environ, "SLURM_NNODES": count, "SLURM_JOB_NUM_NODES": count, "SLURM_NODELIST": nodes,
            "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_CPUS_PER_NODE": jobs.fold_counts(kept.cpus_per_node)}


def environ_with_requested_size(environ: Mapping[str, str], requested_size: RequestedSize) -> dict[str, str]:
    """The environment with the requested numbers of nodes and tasks, before the nodes are chosen."""
    count = str(requested_size.nodes)
    changed = {name: value for name, value in environ.items() if name not in _TASK_COUNT_VARIABLES}
    changed |= {"SLURM_NNODES": count, "SLURM_JOB_NUM_NODES": count}
    if requested_size.tasks is not None:
        changed |= {"SLURM_NPROCS": str(requested_size.tasks), "SLURM_NTASKS": str(requested_size.tasks)}
    if requested_size.tasks_per_node is not None:
        changed["SLURM_NTASKS_PER_NODE"] = str(requested_size.tasks_per_node)
    return changed
