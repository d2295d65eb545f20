"""Termination of ranks: at the end of a run, of all ranks after a failure, and of workers that wait for servers."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, NoReturn

from slurmdl.errors import (
    InvalidRunError,
    Preempted,
    SlurmdlError,
    TrainError,
    UnavailableError,
    UsageError,
    internal_error_text,
    report_error,
    warn,
)
from slurmdl.train.library import checkpointer
from slurmdl.train.slow_ranks import requeue_without_nodes
from slurmdl.train.transports.torch_distributed import LostRankError, finalize_process_group
from slurmdl.train.transports.transport import CHECK_INTERVAL_S, RankFailedError
from slurmdl.train.world import World, finalize_mpi, has_torch_ranks, is_rank_zero, node_name

#: seconds that the first surviving rank has to abort all ranks
_FIRST_RANK_GRACE_SECONDS = 1.0
#: seconds for the message of a rank that has failed, and for its launcher to end the others
_LOST_RANK_GRACE_SECONDS = 5.0
#: seconds for rank 0 on a busy node to report a failure of all ranks, until its launcher ends the others
_RANK_0_GRACE_SECONDS = 20.0
#: seconds for mpirun to forward output before the ranks are aborted, or before Slurm terminates its daemons
_OUTPUT_FLUSH_SECONDS, _REQUEUE_FLUSH_SECONDS = 0.2, 1.0
#: ranks that abort at different times, at intervals of the time for the output
_MAX_ABORT_DELAYS = 10
#: timeout of slurmctld under load, and maximum time until it terminates a requeued job
_CONTROLLER_TIMEOUT_SECONDS, _REQUEUE_WAIT_SECONDS = 20.0, 120.0


def report_failure(error: BaseException) -> int:
    """Report a failure, abort all ranks if only this one fails, and return the exit status.

    Rank 0 reports failures of all ranks. A rank that fails alone reports its rank and node.
    """
    if isinstance(error, Preempted):
        if _initialized_mpi() or _torch_rank() is not None:
            # if srun terminates the other ranks early, they exit with the same status nevertheless
            checkpointer.install_signal_handlers(signal.SIG_IGN)
        if is_rank_zero():
            report_error(error)
        if error.job_ending:
            _wait_for_job_end()
        return error.exit_status
    if isinstance(error, (UsageError, InvalidRunError)):
        if is_rank_zero():
            return report_error(error)
        time.sleep(_RANK_0_GRACE_SECONDS)  # or the launcher would end rank 0, which may not have reported it yet
        return error.exit_status
    mpi = _initialized_mpi()
    text = str(error) if isinstance(error, SlurmdlError) else \
        f"{internal_error_text(error)} (SLURMDL_DEBUG=1 shows where)"
    if mpi and isinstance(error, RankFailedError) and set(range(mpi.COMM_WORLD.Get_rank())) - set(_failed_ranks(mpi)):
        # the first surviving rank reports and aborts all; another one if it does not within the grace period
        time.sleep(_CONTROLLER_TIMEOUT_SECONDS if error.resumable else _FIRST_RANK_GRACE_SECONDS)
    if isinstance(error, LostRankError):
        time.sleep(_LOST_RANK_GRACE_SECONDS)  # the launcher ends this rank, too
    rank = mpi.COMM_WORLD.Get_rank() if mpi else _torch_rank()
    prefix = f"rank {rank} on {node_name()}: " if rank is not None else ""
    text = f"train: {prefix}{text}"
    job_ending = False
    if mpi and isinstance(error, RankFailedError) and error.resumable:
        job_ending, outcome = _requeue_without_failed_nodes(error, mpi, text)
        text += f"; {outcome}"
    failure = TrainError(text)
    failure.__cause__ = error
    report_error(failure)
    if job_ending:
        _wait_for_job_end()
    return _abort_all(error.exit_status if isinstance(error, SlurmdlError) else SlurmdlError.exit_status)


def install_excepthook() -> None:
    """Abort all ranks at an uncaught exception."""
    previous = sys.excepthook
    if getattr(previous, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        mpi = _initialized_mpi()
        has_other_ranks = (mpi and mpi.COMM_WORLD.Get_size() > 1) or has_torch_ranks()
        if hasattr(sys, "ps1") or (sys.flags.interactive and not has_other_ranks):
            # an interactive interpreter goes on, or starts after a script (python -i)
            previous(kind, error, trace)
            return
        if isinstance(error, SlurmdlError):
            exit_process(report_failure(error))
        previous(kind, error, trace)
        exit_process(_abort_all(1))

    sys.excepthook = hook


def exit_process(status: int) -> NoReturn:
    """Finalize MPI or torch.distributed and exit at once, without running the rest of the script."""
    finalize_mpi()
    if not status:
        finalize_process_group()
    _flush_output()
    os._exit(status)


def exit_if_gloo_runs() -> None:
    """Exit at once, with status 0, if there are other ranks over torch.distributed.

    A thread of gloo that drops a tensor while the interpreter shuts down would abort the process (pytorch#190489).
    """
    if has_torch_ranks():
        exit_process(0)


def _flush_output() -> None:
    """Write what this process has printed, before it exits at once."""
    sys.stdout.flush()
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__:
        # the excepthook of torch.distributed collects what other hooks print, and would print it after them
        sys.__stderr__.write(sys.stderr.getvalue())
        sys.__stderr__.flush()
    sys.stderr.flush()


def requeue_job(cause: str) -> tuple[bool, str]:
    """Requeue this job, so that it resumes from its checkpoint; called by one rank.

    `cause` is reported before the requeue, which terminates mpirun's daemons and so their forwarding of output.
    Cancelled jobs are not requeued; Slurm itself requeues preempted jobs. Returns whether Slurm is about to terminate
    this job, and a description.

    Reference: scontrol(1), requeue; sbatch(1), --requeue.
    """
    return _requeue_running_job(cause, _scontrol_requeue)


def _requeue_running_job(cause: str, requeue: Callable[[str], str]) -> tuple[bool, str]:
    """As `requeue_job`; `requeue` gets the ID of the job, and returns what was done."""
    from slurmdl.slurm import jobs  # imported only when needed

    job_id = jobs.own_job_id(os.environ)
    if not job_id:
        return False, "the same command resumes from it"
    try:
        job = jobs.query_job(job_id, timeout=_CONTROLLER_TIMEOUT_SECONDS)[0]
        # at the time limit, and if cancelled, the state is COMPLETING already
        if job.state != "RUNNING" and job.reason != "TimeLimit":
            return True, f"job {job_id} is {job.state} already, which is left to Slurm"
        if not job.requeue:
            return False, f"job {job_id} is not requeued: requeueing is not permitted (sbatch --requeue)"
        warn(f"{cause}; requeues job {job_id}")
        sys.stderr.flush()
        time.sleep(_REQUEUE_FLUSH_SECONDS)
        return True, requeue(job_id)
    except SlurmdlError as error:
        return False, f"job {job_id} is not requeued: {error}"


def _scontrol_requeue(job_id: str) -> str:
    from slurmdl.slurm import process

    answer = process.run_command(["scontrol", "requeue", job_id], timeout=_CONTROLLER_TIMEOUT_SECONDS)
    # Slurm may terminate scontrol together with the job
    if answer.returncode not in (0, -signal.SIGTERM):
        raise UnavailableError(answer.first_error)
    return f"job {job_id} is requeued"


def _requeue_without_failed_nodes(error: RankFailedError, mpi: Any, cause: str) -> tuple[bool, str]:
    """Requeue this job without the nodes of the failed ranks, as `requeue_job`, at most requeue.MAX_REQUEUES times.

    Only this job leaves them out: the rank may have failed by itself. If the job needs the nodes, it may start on
    them again.
    """
    ranks = error.ranks or _failed_ranks(mpi)
    reasons = {error.node_of_rank[rank]: f"rank {rank} failed" for rank in ranks if error.node_of_rank}

    def requeue(job_id: str) -> str:
        try:
            outcome = requeue_without_nodes(reasons, this_job_only=True)
        except UnavailableError as refusal:
            if not reasons:
                raise
            warn(f"train: {refusal}; job {job_id} may start on {', '.join(reasons)} again")
            outcome = requeue_without_nodes({})
        return outcome or f"job {job_id} is requeued"  # no output if Slurm has terminated the command

    return _requeue_running_job(cause, requeue)


def requeue_job_without(reasons: Mapping[str, str], cause: str) -> tuple[bool, str]:
    """Requeue this job without nodes (node -> reason), as `requeue_job`; the job continues if Slurm refuses."""
    warn(f"{cause}; requeues the job without {', '.join(reasons)}")
    sys.stderr.flush()
    time.sleep(_REQUEUE_FLUSH_SECONDS)
    try:
        # no output if Slurm has terminated the command
        return True, requeue_without_nodes(reasons) or "the job is requeued"
    except SlurmdlError as error:
        return False, str(error)


def _wait_for_job_end() -> None:
    """Wait until Slurm terminates this job, so that its script does not continue."""
    checkpointer.install_signal_handlers(signal.SIG_DFL)
    time.sleep(_REQUEUE_WAIT_SECONDS)


def _abort_all(status: int) -> int:
    """Abort all ranks if there are several; else return the status.

    Without MPI the launcher ends the others, or the loss of this rank does.
    """
    mpi = _initialized_mpi()
    if not mpi and _torch_rank() is not None:
        _flush_output()
        os._exit(status)  # the end of the program would wait for the others
    if mpi and mpi.COMM_WORLD.Get_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        # one after the other, if several fail: mpirun of Open MPI 5 may hang if two ranks abort at once
        time.sleep(_OUTPUT_FLUSH_SECONDS * (1 + min(mpi.COMM_WORLD.Get_rank(), _MAX_ABORT_DELAYS)))
        mpi.COMM_WORLD.Abort(status)
    return status


def _failed_ranks(mpi: Any) -> list[int]:
    """The ranks that MPI knows to have failed (MPI_Comm_get_failed of ULFM)."""
    world = mpi.COMM_WORLD
    return list(mpi.Group.Translate_ranks(world.Get_failed(), None, world.Get_group()))


def _torch_rank() -> int | None:
    """This rank in the process group of torch.distributed; None without one."""
    distributed = sys.modules.get("torch.distributed")
    return int(distributed.get_rank()) if distributed and distributed.is_initialized() else None


def _initialized_mpi() -> Any:
    """The module mpi4py.MPI if it is initialized, else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi and mpi.Is_initialized() else None


_MODULE = "torch.distributed.distributed_c10d"
_COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list")


def watch_server_waits(world: World, is_over: Callable[[], bool], on_wait: Callable[[TrainError], None]) -> None:
    """Until the run is over, call `on_wait` with an error if a thread waits for a server in a collective, forever.

    The collective is one of torch.distributed. Servers do not run the code of the script below `Run.wrap`, so a group
    that contains one does not complete there.
    """
    servers = set(world.ranks_with_role("ps"))

    def run() -> None:
        while not is_over():
            time.sleep(CHECK_INTERVAL_S)
            for frame in sys._current_frames().values():
                name, ranks = _collective_of(frame)
                if servers & ranks and not is_over():  # then the servers end, too
                    on_wait(TrainError(
                        f"torch.distributed.{name}() waits for {world.format_rank(min(servers & ranks))}, a "
                        "parameter server, which does not run the script; expected run.all_gather_object(), or a "
                        "group of the workers, made by new_group() before run.wrap()"))
                    return
    threading.Thread(target=run, daemon=True).start()


def _collective_of(frame: FrameType | None) -> tuple[str, set[int]]:
    """Name and ranks of the collective that a thread of the script calls; ("", set()) without one."""
    call: FrameType | None = None
    while frame:
        if frame.f_globals.get("__name__") == _MODULE and frame.f_code.co_name in _COLLECTIVES:
            call = frame
        elif call and str(frame.f_globals.get("__name__")).startswith("slurmdl."):
            return "", set()
        frame = frame.f_back
    return (call.f_code.co_name, _ranks_of(call.f_locals.get("group"))) if call else ("", set())


def _ranks_of(group: Any) -> set[int]:
    distributed = sys.modules["torch.distributed"]
    if not hasattr(distributed, "get_process_group_ranks"):  # PyTorch before 2.0
        return set() if group else set(range(distributed.get_world_size()))
    return set(distributed.get_process_group_ranks(group or distributed.group.WORLD))
