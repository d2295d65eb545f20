"""How a rank ends: by itself at the end of a run, and with all others where something has failed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

from slurmdl.errors import (
    InvalidRunError,
    Preempted,
    SlurmdlError,
    TrainError,
    UnavailableError,
    UsageError,
    report_error,
)
from slurmdl.train.library import checkpoint_coordinator
from slurmdl.train.transports.transport import RankFailedError
from slurmdl.train.world import finalize_mpi, is_rank_zero, node_name

#: seconds for which a rank leaves it to the first one to end all, where a rank is lost
_FIRST_RANK_GRACE_SECONDS = 1.0
#: seconds in which mpirun passes on what a rank has said: what it has not when the ranks end is lost
_OUTPUT_FLUSH_SECONDS = 0.2
#: seconds in which the controller answers even where many jobs end at once, and in which it ends a requeued job
_CONTROLLER_TIMEOUT_SECONDS, _REQUEUE_WAIT_SECONDS = 20.0, 120.0


def report_failure(error: BaseException) -> int:
    """Report a failure and return the exit status for it.

    What all ranks find wrong is said once. A rank that fails alone says so with its rank and node and ends all
    others, which would wait for it for ever.
    """
    if isinstance(error, Preempted):
        if _initialized_mpi():
            # where srun ends the others as soon as one has ended, they end by themselves, with the same status
            for number in checkpoint_coordinator.PREEMPTION_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        if is_rank_zero():
            report_error(error)
        if error.job_ending:
            _wait_for_job_end()
        return error.exit_status
    if isinstance(error, (UsageError, InvalidRunError)):
        return report_error(error) if is_rank_zero() else error.exit_status
    mpi = _initialized_mpi()
    ends, known = False, isinstance(error, SlurmdlError)
    text = str(error) if known else f"internal error: {type(error).__name__}: {error} (SLURMDL_DEBUG=1 shows where)"
    if mpi and isinstance(error, RankFailedError):
        # all others learn of it, too: the first says so, and ends them; where it does not look, another one
        if _lower_rank_alive(mpi):
            time.sleep(_CONTROLLER_TIMEOUT_SECONDS if error.resumable else _FIRST_RANK_GRACE_SECONDS)
        if error.resumable:
            ends, words = requeue_job()
            text += f"; {words}"
    where = f"rank {mpi.COMM_WORLD.Get_rank()} on {node_name()}: " if mpi else ""
    failure = TrainError(f"train: {where}{text}")
    failure.__cause__ = error
    report_error(failure)
    if ends:
        _wait_for_job_end()
    return _abort_all(error.exit_status if isinstance(error, SlurmdlError) else SlurmdlError.exit_status)


def install_excepthook() -> None:
    """From now on an exception that a script does not catch ends all ranks."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SlurmdlError):
            exit_process(report_failure(error))
        before(kind, error, trace)
        exit_process(_abort_all(1))

    sys.excepthook = hook


def exit_process(status: int) -> NoReturn:
    """End this process at once, with MPI in order, but without what else the script would do."""
    finalize_mpi()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def requeue_job(environ: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """Let Slurm start this job again, from its checkpoint; by one rank alone.

    A job that its user has cancelled stays so, and one that is preempted Slurm itself requeues.

    Returns
    -------
    Whether Slurm is about to end this job, and what has become of it, in words.

    References
    ----------
    scontrol(1), requeue; sbatch(1), --requeue.
    """
    from slurmdl.slurm import process  # which a rank that is not stopped does without

    job = environ.get("SLURM_JOB_ID")
    if not job:
        return False, "the same command goes on from it"
    try:
        record = dict(word.partition("=")[::2] for word in process.check_output(
            ["scontrol", "-o", "show", "job", job], timeout=_CONTROLLER_TIMEOUT_SECONDS).split())
        state, reason = record.get("JobState", "unknown"), record.get("Reason")
        # at the time limit, and where it was cancelled, too, it is already COMPLETING
        if state != "RUNNING" and reason != "TimeLimit":
            return True, f"job {job} is {state} already, which is left to Slurm"
        if record.get("Requeue") == "0":
            return False, f"job {job} is not requeued: it may not be (sbatch --requeue)"
        answer = process.run_command(["scontrol", "requeue", job], timeout=_CONTROLLER_TIMEOUT_SECONDS)
    except UnavailableError as error:
        return False, f"job {job} is not requeued: {error}"
    # Slurm may end the job, and scontrol with it, before that has heard that it will
    if answer.returncode not in (0, -signal.SIGTERM):
        return False, f"job {job} is not requeued: {answer.first_error}"
    return True, f"job {job} is requeued"


def _wait_for_job_end() -> None:
    """Wait for Slurm to end this job, so that its script does not go on as if the training were over."""
    for number in checkpoint_coordinator.PREEMPTION_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(_REQUEUE_WAIT_SECONDS)


def _abort_all(status: int) -> int:
    """End the other ranks, too, where there are some; else give back the status."""
    mpi = _initialized_mpi()
    if mpi and mpi.COMM_WORLD.Get_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_OUTPUT_FLUSH_SECONDS)
        mpi.COMM_WORLD.Abort(status)
    return status


def _lower_rank_alive(mpi: Any) -> bool:
    """Whether a rank before this one lives."""
    world = mpi.COMM_WORLD
    lost = mpi.Group.Translate_ranks(world.Get_failed(), None, world.Get_group())
    return any(rank not in lost for rank in range(world.Get_rank()))


def _initialized_mpi() -> Any:
    """MPI, where this process has started it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi and mpi.Is_initialized() else None
