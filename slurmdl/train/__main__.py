"""`python -m slurmdl.train`, to be started once per rank by srun or mpirun."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurmdl.errors import SlurmdlError, TrainError, UsageError, report
from slurmdl.train.options import parse
from slurmdl.train.runtime import Refused, is_first, node_name


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit status. What all ranks find wrong is said once; a rank that fails alone ends all."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        from slurmdl.train.trainer import train
        train(options)
    except (UsageError, Refused) as error:
        return report(error) if is_first() else error.exit_status
    except Exception as error:
        return _end_all(error)
    return 0


def _end_all(error: Exception) -> int:
    """Report with rank and node, and end the other ranks, which would wait for this one for ever."""
    from_mpi = sys.modules.get("mpi4py.MPI")
    rank = from_mpi.COMM_WORLD.Get_rank() if from_mpi else "?"
    known = isinstance(error, SlurmdlError)
    text = str(error) if known else f"internal error: {type(error).__name__}: {error} (SLURMDL_DEBUG=1 shows where)"
    failure = TrainError(f"train: rank {rank} on {node_name()}: {text}")
    failure.__cause__ = error
    report(failure)
    status = error.exit_status if isinstance(error, SlurmdlError) else SlurmdlError.exit_status
    if from_mpi and from_mpi.COMM_WORLD.Get_size() > 1:
        from_mpi.COMM_WORLD.Abort(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
