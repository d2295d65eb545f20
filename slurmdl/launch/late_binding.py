"""`--dl-node-binding=late`: ask for some nodes more than the job needs, and drop the worst from inside the job.

The submission asks for a range, `--nodes=N-(N+k)`: Slurm gives what is free, from N nodes on, so the job waits no
longer than for N (Slurm 22.05 tries the largest number first). Inside the job the first `slurmdl srun` knows the
nodes and the links as they are now, keeps the N best and gives the others back to the cluster, by `scontrol update
NodeList=` (scontrol(1), "resize"), which every user may do with an own job. The node of the batch script stays.

The commands of the script keep the environment of the larger job, as no program can change its caller's. So each
`slurmdl srun` asks the controller which nodes the job has by now; a plain `srun` needs `-N` and `-n`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, PlacementError, UnavailableError
from slurmdl.launch.submission_record import RequestedSize
from slurmdl.slurm import allocation, hostlist, process

if TYPE_CHECKING:
    from slurmdl.job_request import JobRequest


#: what Slurm told of the tasks of the larger job
_TASK_COUNT_VARIABLES = ("SLURM_NPROCS", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")


def _overallocated_count(nodes: int) -> int:
    return nodes + math.ceil(nodes / 8)


def overallocation_options(request: JobRequest) -> tuple[tuple[str, ...], RequestedSize]:
    """The options that ask for a few nodes more: one for each eight or part of eight.

    Slurm gives no more nodes than there are tasks, and CPUs for the tasks that are asked for; so where `-n` is
    given it is raised to the number of nodes where it is less, and every node gets room for its share of the
    tasks. The job's own steps still have the tasks that were asked for.

    Raises
    ------
    PlacementError : the number of nodes is not certain.
    """
    nodes, most = request.nodes or (0, None)
    if not nodes or nodes != most:
        raise PlacementError("--dl-node-binding=late: the number of nodes is not given (-N)")
    asked = RequestedSize(nodes, request.ntasks, request.ntasks_per_node)
    larger = _overallocated_count(nodes)
    options = [f"--nodes={nodes}-{larger}"]
    if request.ntasks is not None:
        tasks = max(request.ntasks, larger)
        per_node = max(request.ntasks_per_node or 0, -(-tasks // nodes))
        options += [f"--ntasks={tasks}", f"--ntasks-per-node={per_node}"]
    return tuple(options), asked


@dataclass(frozen=True)
class JobNodes:
    """What the controller says of a running job: its nodes, in Slurm's order, and that of the batch script."""

    nodes: tuple[str, ...]
    batch_host: str

    @classmethod
    def from_scontrol(cls, job_record: str) -> JobNodes:
        """From `scontrol -o show job`; InputError where that names no nodes."""
        fields = dict(re.findall(r"(?:^|\s)(NodeList|BatchHost)=(\S+)", job_record))
        nodes = tuple(hostlist.expand_hostlist(fields.get("NodeList", "").replace("(null)", "")))
        if not nodes:
            raise InputError("scontrol show job: no NodeList in its answer")
        return cls(nodes, fields.get("BatchHost", nodes[0]))


def shrink_job(environ: Mapping[str, str], requested_size: RequestedSize, choose_nodes: Callable[[JobNodes], Sequence[str]],
         other_steps_run: Callable[[int], bool], on_warning: Callable[[str], None], *, dry_run: bool) -> dict[str, str]:
    """Reduce the job to the nodes that were asked for, and return the environment of the job as it is then.

    Where the job cannot be reduced, its steps run on the nodes that would have been kept, and one line says so.

    Parameters
    ----------
    environ : as `unchosen` gives it.
    choose : the nodes to keep.
    others_run : whether other steps of a job run; their tasks would be lost.
    dry_run : everything but the reduction.

    Raises
    ------
    SlurmdlError : the nodes of the job are not known.
    """
    given = allocation.read_allocation(environ)
    held = JobNodes.from_scontrol(process.check_output(["scontrol", "-o", "show", "job", str(given.job_id)]))
    kept: Sequence[str] = held.nodes
    # a job of more nodes than were asked for is another one, that inherited our mark
    if requested_size.nodes < len(held.nodes) <= _overallocated_count(requested_size.nodes):
        # asked before a probe's own step may be listed for a moment after its end
        busy = not dry_run and other_steps_run(given.job_id)
        try:
            kept = choose_nodes(held)
        except PlacementError as error:
            kept = [held.batch_host, *(node for node in held.nodes if node != held.batch_host)][:requested_size.nodes]
            on_warning(f"{error}; the first {requested_size.nodes} nodes of the job are kept")
        short = _cpu_shortfall_reason(environ, requested_size, given.restricted_to(kept))
        if short:
            kept = held.nodes
            on_warning(f"the job keeps its {len(kept)} nodes, and the step has all of them: {short}")
        elif not dry_run:
            problem = "other steps run" if busy else _shrink_error(given.job_id, kept)
            if problem:
                on_warning(
                    f"the job keeps its {len(held.nodes)} nodes ({problem}); the step runs on {requested_size.nodes} of them")
    return environ_with_nodes(environ, given.restricted_to(kept))


def _cpu_shortfall_reason(environ: Mapping[str, str], requested_size: RequestedSize,
                          allocation_kept: allocation.Allocation) -> str:
    """Why the job's tasks do not fit what it has on these nodes, "" where they do.

    For a number of tasks that the nodes do not share evenly Slurm 24.11 gives no more CPUs in all than they need,
    whatever `--ntasks-per-node` and `--mincpus` say; Slurm 22.05 gives each node its share.
    """
    each = environ.get("SLURM_CPUS_PER_TASK", "1")
    if requested_size.tasks is None or not each.isdigit() or requested_size.tasks * \
                                                        int(each) <= sum(allocation_kept.cpus_per_node):
        return ""
    return f"{requested_size.tasks} tasks do not fit the {sum(allocation_kept.cpus_per_node)} CPUs that it has on {len(allocation_kept.nodes)} of them"


def _shrink_error(job_id: int, nodes: Sequence[str]) -> str:
    """Give back all other nodes; why that failed, "" where it did not."""
    # scontrol leaves scripts in its working directory that set the variables which `environment` sets
    import tempfile

    with tempfile.TemporaryDirectory(prefix="slurmdl-") as folder:
        try:
            answer = process.run_command(["scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(nodes)}"],
                                 cwd=folder)
        except UnavailableError as error:
            return str(error)
    return answer.first_error or f"exit status {answer.returncode}" if answer.returncode else ""


def environ_with_nodes(environ: Mapping[str, str], kept: allocation.Allocation) -> dict[str, str]:
    """The environment of the job on these nodes only, as Slurm's own script for a resized job makes it."""
    count, nodes = str(len(kept.nodes)), hostlist.fold_hostlist(kept.nodes)
    return {**environ, "SLURM_NNODES": count, "SLURM_JOB_NUM_NODES": count, "SLURM_NODELIST": nodes,
            "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_CPUS_PER_NODE": allocation.fold_counts(kept.cpus_per_node)}


def environ_with_requested_size(environ: Mapping[str, str], requested_size: RequestedSize) -> dict[str, str]:
    """The environment with the number of nodes and the tasks that were asked for, whichever nodes they will be."""
    count = str(requested_size.nodes)
    changed = {name: value for name, value in environ.items() if name not in _TASK_COUNT_VARIABLES}
    changed |= {"SLURM_NNODES": count, "SLURM_JOB_NUM_NODES": count}
    if requested_size.tasks is not None:
        changed |= {"SLURM_NPROCS": str(requested_size.tasks), "SLURM_NTASKS": str(requested_size.tasks)}
    if requested_size.tasks_per_node is not None:
        changed["SLURM_NTASKS_PER_NODE"] = str(requested_size.tasks_per_node)
    return changed
