"""How a rank ends: by itself at the end of a run, and with all others where something has failed."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, NoReturn

from slurmdl.errors import SlurmdlError, TrainError, UsageError, report
from slurmdl.train.runtime import Refused, is_first, node_name


def failed(error: BaseException) -> int:
    """Report a failure and return the exit status for it.

    What all ranks find wrong is said once. A rank that fails alone says so with its rank and node and ends all
    others, which would wait for it for ever.
    """
    if isinstance(error, (UsageError, Refused)):
        return report(error) if is_first() else error.exit_status
    mpi = _mpi()
    known = isinstance(error, SlurmdlError)
    text = str(error) if known else f"internal error: {type(error).__name__}: {error} (SLURMDL_DEBUG=1 shows where)"
    where = f"rank {mpi.COMM_WORLD.Get_rank()} on {node_name()}: " if mpi else ""
    failure = TrainError(f"train: {where}{text}")
    failure.__cause__ = error
    report(failure)
    return _end_all(error.exit_status if isinstance(error, SlurmdlError) else SlurmdlError.exit_status)


def end_together() -> None:
    """From now on an exception that a script does not catch ends all ranks."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SlurmdlError):
            leave(failed(error))
        before(kind, error, trace)
        leave(_end_all(1))

    sys.excepthook = hook


def leave(status: int) -> NoReturn:
    """End this process at once, with MPI in order, but without what else the script would do."""
    mpi = _mpi()
    if mpi and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_all(status: int) -> int:
    """End the other ranks, too, where there are some; else give back the status."""
    mpi = _mpi()
    if mpi and mpi.COMM_WORLD.Get_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(status)
    return status


def _mpi() -> Any:
    """MPI, where this process has started it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi and mpi.Is_initialized() else None
