"""The first `slurmdl srun` of a job's start: check the nodes, and drop bad and spare ones.

--dl-preflight checks the nodes once per start of the job. A job with spare nodes (--dl-node-binding=late) continues
without bad nodes; others are requeued.

--dl-node-binding=late requests a range, `--nodes=N-(N+k)`. Slurm allocates the free nodes from N on, so the job waits
no longer than for N (Slurm 22.05 tries the largest number first). In the job the first `slurmdl srun` knows the nodes
and the present state of the links. It keeps the N best nodes and releases the others by `scontrol update NodeList=`
(scontrol(1), "resize"), which needs no privilege for a user's own job. The node of the batch script stays.

The batch script keeps the environment of the larger job, since a program cannot change its parent's environment. So
each `slurmdl srun` queries the nodes that the job has now; a plain `srun` needs `-N` and `-n`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmdl.errors import BadNodesError, InputError, PlacementError, SlurmdlError, internal_error_text
from slurmdl.launch import step_inputs, traffic_file
from slurmdl.launch.step_inputs import StepCall
from slurmdl.launch.submission_record import RequestedSize, overallocated_count
from slurmdl.slurm import hostlist, jobs
from slurmdl.slurm.jobs import Allocation
from slurmdl.text import pluralize

if TYPE_CHECKING:
    from slurmdl.health.preflight import Preflight

#: task counts of the larger job
_TASK_COUNT_VARIABLES = ("SLURM_NPROCS", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")


def check_nodes_once(call: StepCall) -> frozenset[str]:
    """Check the nodes of this job unless an earlier step of this start did; return the nodes that must be left out.

    Bad nodes are left out of a job with spare nodes. Without spare nodes the job is requeued, and this does not
    return. A check that fails itself costs a warning, not the step.

    Raises BadNodesError if the job can do neither, unless --dl-on-bad-nodes=run.
    """
    from slurmdl.health import exclusions, site_checks
    from slurmdl.health.preflight import format_table, keep_link_samples, run_preflight

    environ, options = call.environ, call.options
    mark = exclusions.mark_path("preflight", environ)
    if not options.preflight or os.path.exists(mark):
        return frozenset()
    try:
        nodes = jobs.read_allocation(environ).nodes
        topology, _ = step_inputs.load_job_topology(call.get_slurm_config(), nodes,
                                                    environ.get("SLURM_JOB_PARTITION", ""), strict=False)
        result = run_preflight(nodes, topology, environ, call.on_warning, options.preflight,
                               site_reasons=site_checks.load_site_reasons(call.site_config, call.on_warning))
    except Exception as error:
        text = str(error) if isinstance(error, SlurmdlError) else internal_error_text(error)
        call.on_warning(f"preflight: the nodes are not checked: {text}")
        return frozenset()
    keep_link_samples(result, environ, call.on_warning)
    if options.explain:
        for line in format_table(result).splitlines():
            call.on_warning(line)
    excluded = _act_on_bad_nodes(call, result)
    try:
        exclusions.write_mark(mark)
    except OSError as error:
        call.on_warning(f"{mark}: cannot be written ({error.strerror}); the next step of the job checks the nodes "
                        "again")
    return excluded


def _act_on_bad_nodes(call: StepCall, result: Preflight) -> frozenset[str]:
    """Replace bad nodes by spare ones, else requeue the job, else run with them or give up (docs/health.md)."""
    from slurmdl.health import exclusions, requeue

    bad, job_id, problem = result.reasons, jobs.own_job_id(call.environ), ""
    if not bad:
        return frozenset()
    for node, reason in bad.items():
        call.on_warning(f"preflight: {node}: {reason}")
    names, size = hostlist.fold_hostlist(bad), call.record.requested_size if call.record else None
    # the node of the batch script cannot be released
    has_spare_nodes = size is not None and len(result.reports.keys() - bad.keys()) >= size.nodes \
        and call.environ.get("SLURMD_NODENAME", "") not in bad
    if has_spare_nodes:
        call.on_warning(f"preflight: the job continues without {names}")
    else:
        try:
            requeue.requeue_and_exclude(job_id, bad, call.environ,
                                        lambda outcome: call.on_warning(f"preflight: {outcome}"),
                                        may_wait=call.options.on_bad_nodes == "wait")
        except SlurmdlError as error:
            problem = str(error)
        else:
            requeue.wait_for_job_end()
    with suppress(SlurmdlError):  # the requeue has not remembered them
        exclusions.record_exclusions(bad, call.environ, job_id)
    if problem and call.options.on_bad_nodes != "run":
        raise BadNodesError(f"preflight: {names} bad, and {problem}; the step is not started "
                            "(--dl-on-bad-nodes=run starts it)")
    if problem:
        call.on_warning(f"preflight: {problem}; the step runs with {names}")
    return frozenset(bad) if has_spare_nodes else frozenset()


def reduce_job(call: StepCall, size: RequestedSize, excluded: Collection[str] = ()) -> StepCall:
    """Reduce a job submitted with --dl-node-binding=late to the best of its nodes.

    If the job cannot be reduced, its steps run on the nodes that would have been kept, and a warning says so. With
    --dl-dry-run it is not reduced. Raises SlurmdlError if the nodes of the job are not known.

    Args:
        call: with the result of `environ_with_requested_size`.
        excluded: nodes that are not kept; the others are enough, and that of the batch script is one of them.
    """
    environ, dry_run = call.environ, call.options.dry_run
    allocation, job_id = jobs.read_allocation(environ), jobs.own_job_id(environ)
    job = jobs.query_job(job_id)[0]
    if not job.nodes:
        raise InputError(f"squeue --jobs={job_id}: the job has no nodes")
    host = job.batch_host or job.nodes[0]
    kept: Sequence[str] = job.nodes
    # a job with still more nodes is another job that inherited the submission record
    if size.nodes < len(job.nodes) <= overallocated_count(size.nodes):
        # checked before nodes are chosen: the step of a probe is listed for a moment after its end
        is_busy = not dry_run and jobs.other_steps_run(job_id)
        candidates = [node for node in job.nodes if node not in excluded]
        call = replace(call, link_scores=call.load_link_scores())
        try:
            kept = choose_nodes(call, size, candidates, host)
        except PlacementError as error:
            kept = [host, *(node for node in candidates if node != host)][:size.nodes]
            call.on_warning(f"{error}; the step runs on the first {pluralize(size.nodes, 'node')} of the job")
        shortfall = _cpu_shortfall_reason(environ, size, allocation.restricted_to(kept))
        if shortfall:
            kept = job.nodes
            call.on_warning(f"the job keeps its {pluralize(len(kept), 'node')}, and the step has all of them: "
                            f"{shortfall}")
        elif not dry_run:
            problem = "other steps run" if is_busy else jobs.shrink_job_error(job_id, kept)
            if problem:
                call.on_warning(f"the job keeps its {pluralize(len(job.nodes), 'node')} ({problem}); the step runs "
                                f"on {size.nodes} of them")
    return replace(call, environ=environ_with_nodes(environ, allocation.restricted_to(kept)))


def choose_nodes(call: StepCall, size: RequestedSize, nodes: Sequence[str], host: str) -> Sequence[str]:
    """The best nodes for a job of this size, `host` among them. PlacementError if none can be chosen."""
    from slurmdl.job_request import JobRequest
    from slurmdl.placement.place import select_subset

    request = JobRequest(call.options, (size.nodes, size.nodes), size.tasks, size.tasks_per_node)
    return select_subset(nodes, request, host, call.load_topology(nodes)[0], call.load_link_scores(),
                         traffic_file.load_traffic(call.options))


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
