"""Requeue a job without some nodes, as its owner.

Slurm takes a new ExcNodeList only for a pending job. From the moment of `scontrol requeue` the job is pending, but
it starts again only after its processes have ended and a delay has passed: `cred_expire` of AuthInfo, 120 s by
default; `requeue_delay` of SchedulerParameters from 26.05 on (job_mgr.c, batch_requeue_fini). So the nodes are
excluded directly after the requeue. Unlike `scontrol requeuehold` and `release`, this leaves no job held, whenever it
is interrupted: the worst case is a job that is requeued without the exclusion.

Slurm resets the age priority of a requeued job itself (AccrueTime); a pending job keeps it, as nothing but its
ExcNodeList changes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from slurmdl import config
from slurmdl.cluster.load import query_cluster
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import BadNodesError, PlacementError, SlurmdlError, UnavailableError, UsageError, warn
from slurmdl.health import exclusions
from slurmdl.placement.eligibility import is_in_service
from slurmdl.slurm import process
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.slurm.jobs import JobRecord, own_job_id, query_job
from slurmdl.text import pluralize

#: attempts to exclude the nodes of a requeued job, and seconds between two
_UPDATE_ATTEMPTS, _UPDATE_INTERVAL_S = 5, 0.2
#: Slurm sends SIGTERM to the processes of a requeued job, and SIGKILL after KillWait (slurm.conf(5))
_SIGNALS_OF_REQUEUE = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
#: how often a job may requeue itself because of bad, slow or lost nodes
MAX_REQUEUES = 3
#: seconds until Slurm has terminated the processes of a requeued job (KillWait of slurm.conf(5) is 30)
_JOB_END_TIMEOUT_S = 120.0
#: seconds in which the shell that runs the job script gets its signal, too
_SHELL_END_S = 1.0


def requeue_and_exclude(job_id: str, reasons: Mapping[str, str], environ: Mapping[str, str],
                        report: Callable[[str], None], may_wait: bool = False, dry_run: bool = False,
                        this_job_only: bool = False) -> None:
    """Requeue a job, and exclude nodes from it and from later jobs of the user.

    Raises SlurmdlError if that is not possible; the job is not requeued then, unless the message says so. The job of
    this process requeues itself at most MAX_REQUEUES times. If Slurm has signaled this process, as one of the job,
    the signal takes effect at the end.

    Args:
        reasons: node -> why it is left out.
        report: called with what was done.
        may_wait: see `check_exclusion`.
        dry_run: only check whether it is possible.
        this_job_only: do not exclude the nodes from later jobs.
    """
    jobs = query_job(job_id)
    check_requeue(jobs[0])
    is_own = job_id in (own_job_id(environ), environ.get("SLURM_JOB_ID"))
    if is_own and jobs[0].state != "PENDING":
        _check_limit(jobs[0], environ)
    if reasons:
        cluster = query_cluster(config.load_config().cluster_backend)[0]
        for job in jobs:
            check_exclusion(job, tuple(reasons), cluster, may_wait)
    if dry_run:
        report(f"job {jobs[0].job_id} can be requeued{_without(tuple(reasons))}")
        return
    if is_own:
        with suppress(OSError):  # then all restarts count
            exclusions.write_mark(exclusions.mark_path("requeues", environ))
    if reasons and not this_job_only:
        # remembered first: if the job starts again before its nodes are excluded, it can see that they are bad
        try:
            exclusions.record_exclusions(reasons, environ, job_id)
        except SlurmdlError as error:
            warn(f"{error}; later jobs may use {fold_hostlist(reasons)}")
    with _deferred_signals():
        try:
            outcome = requeue_without(jobs, tuple(reasons))
        except UnavailableError:
            was_pending, jobs = jobs[0].state == "PENDING", query_job(job_id)
            if not was_pending or jobs[0].state == "PENDING":
                raise
            # it has started meanwhile
            check_requeue(jobs[0])
            outcome = requeue_without(jobs, tuple(reasons))
        report(outcome)


def wait_for_job_end() -> NoReturn:
    """Wait until Slurm terminates this requeued job, so that its script does not go on.

    Raises BadNodesError if that does not happen.
    """
    with _deferred_signals() as has_arrived:
        deadline = time.monotonic() + _JOB_END_TIMEOUT_S
        while not has_arrived() and time.monotonic() < deadline:
            time.sleep(0.1)
    raise BadNodesError("the job is requeued, but its processes still run")


def check_requeue(job: JobRecord) -> None:
    """Check that Slurm will requeue a job. Raises UsageError if it has ended or cannot be requeued."""
    if job.state not in ("PENDING", "RUNNING", "SUSPENDED"):
        raise UsageError(f"job {job.job_id} is {job.state}; expected PENDING, RUNNING or SUSPENDED")
    if job.state == "PENDING":
        return
    if not job.batch:
        raise UsageError(f"job {job.job_id} has no batch script; Slurm requeues only jobs of sbatch")
    if not job.requeue:
        raise UsageError(f"job {job.job_id} may not be requeued; expected a submission with --requeue")


def _check_limit(job: JobRecord, environ: Mapping[str, str]) -> None:
    """Raise BadNodesError if the job has requeued itself too often; its preemptions and time limits do not count."""
    requeues = exclusions.count_marks("requeues", environ)
    if requeues is None:
        requeues = job.restarts  # the job must not requeue itself forever
    if requeues >= MAX_REQUEUES:
        raise BadNodesError(f"job {job.job_id} has requeued itself {pluralize(requeues, 'time')}, the limit")


def check_exclusion(job: JobRecord, excluded: Sequence[str], cluster: ClusterSnapshot, may_wait: bool) -> None:
    """Check that a job can start without some nodes.

    Raises UsageError if a node is unknown, or the job itself requires it; PlacementError if too few nodes remain in
    each of its partitions. With `may_wait` nodes that are not in service now count.
    """
    if unknown := [node for node in excluded if node not in cluster.node_by_name]:
        raise UsageError(f"node {unknown[0]}: unknown to Slurm; expected one of {fold_hostlist(cluster.names)}")
    if required := [node for node in excluded if node in job.required]:
        raise UsageError(f"job {job.job_id} requires node {required[0]} (--nodelist)")
    remaining = [node for node in cluster.nodes if node.name not in {*excluded, *job.excluded}]
    best_partition, best_count = "", -1
    for partition in job.partitions:
        count = sum(partition in node.partitions and (may_wait or is_in_service(node)) for node in remaining)
        if count > best_count:
            best_partition, best_count = partition, count
    if best_count < job.min_nodes:
        raise PlacementError(
            f"job {job.job_id} needs {pluralize(job.min_nodes, 'node')}; without {fold_hostlist(excluded)} partition "
            f"{best_partition} has {best_count}{'' if may_wait else ' in service'}")


def requeue_without(jobs: Sequence[JobRecord], excluded: Sequence[str]) -> str:
    """Requeue a job and exclude nodes from its next start; exclude them only, if it is pending.

    Returns what was done. Raises UnavailableError if Slurm refuses; the message says whether the job was requeued.

    Args:
        jobs: result of `query_job`.
        excluded: in addition to the nodes that each component excludes already.
    """
    leader = jobs[0]
    if leader.state != "PENDING":
        _scontrol("requeue", leader.job_id)
    try:
        for job in jobs:
            if not set(excluded) <= set(job.excluded):
                _exclude(job, excluded)
    except UnavailableError as error:
        if leader.state == "PENDING":
            raise
        raise UnavailableError(f"job {leader.job_id} is requeued, but may start on {fold_hostlist(excluded)} "
                               f"again: {error}") from error
    if leader.state == "PENDING":
        return f"job {leader.job_id} is pending already; it will start{_without(excluded)}, and keeps its place in " \
               "the queue"
    return f"job {leader.job_id} is requeued{_without(excluded)}"


def _without(nodes: Sequence[str]) -> str:
    return f" without {fold_hostlist(nodes)}" if nodes else ""


def _exclude(job: JobRecord, excluded: Sequence[str]) -> None:
    """Add nodes to a pending job's ExcNodeList, and check that Slurm has them."""
    nodes = tuple(dict.fromkeys([*job.excluded, *excluded]))
    for attempt in range(_UPDATE_ATTEMPTS):
        try:
            _scontrol("update", f"JobId={job.job_id}", f"ExcNodeList={fold_hostlist(nodes)}")
            break
        except UnavailableError:
            if attempt == _UPDATE_ATTEMPTS - 1:
                raise
            time.sleep(_UPDATE_INTERVAL_S)
    current: list[JobRecord] = []
    with suppress(SlurmdlError):  # without an answer, scontrol's exit status counts
        current = [record for record in query_job(job.job_id) if record.job_id == job.job_id]
    if current and not set(nodes) <= set(current[0].excluded):
        raise UnavailableError(f"scontrol update: ExcNodeList is {fold_hostlist(current[0].excluded) or 'empty'}")


def _scontrol(*args: str) -> None:
    result = process.run_command(["scontrol", *args])
    if result.returncode:
        raise UnavailableError(f"scontrol {args[0]}: {result.first_error or f'exit status {result.returncode}'}")


@contextmanager
def _deferred_signals() -> Iterator[Callable[[], bool]]:
    """Defer the signals that a requeue sends to its own job; yields a function that returns whether one has arrived.

    At the end this process waits for a moment and then dies of the signal. It must not die before the shell of the
    job script, which would then run the next command. If the body raises an exception, the signal is discarded: the
    caller reports the error.

    Child processes inherit the signal mask, so they do not get the signals. The mask does not apply to threads of
    libraries, so handlers are set, too.
    """
    arrived: list[int] = []
    handlers = {number: signal.signal(number, lambda number, frame: arrived.append(number))
                for number in _SIGNALS_OF_REQUEUE}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_REQUEUE)
    try:
        yield lambda: bool(arrived or signal.sigpending() & {*_SIGNALS_OF_REQUEUE})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # calls the handlers of signals that have arrived
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        time.sleep(_SHELL_END_S)
        signal.signal(arrived[0], signal.SIG_DFL)
        signal.raise_signal(arrived[0])
