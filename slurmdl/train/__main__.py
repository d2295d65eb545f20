"""`python -m slurmdl.train`, started once per rank by srun or mpirun; `export` as the first word is a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurmdl.train.library import shutdown
from slurmdl.train.trainer.options import parse_train_options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or export a checkpoint, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["export"]:
            from slurmdl.train.library.checkpoint_export import run_export
            return run_export(argv[1:])
        options = parse_train_options(argv)
        from slurmdl.train.trainer.trainer import train
        train(options)
    except Exception as error:
        return shutdown.report_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
