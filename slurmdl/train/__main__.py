"""`python -m slurmdl.train`, started once per rank by srun or mpirun; `export` as the first word is a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurmdl.errors import SlurmdlError, report_error
from slurmdl.train.library import shutdown
from slurmdl.train.trainer.options import parse_train_options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or export a checkpoint, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["export"]:
        return _export(argv[1:])
    try:
        options = parse_train_options(argv)
        from slurmdl.train.trainer.trainer import train
        train(options)
    except Exception as error:
        return shutdown.report_failure(error)
    return 0


def _export(argv: Sequence[str]) -> int:
    from slurmdl.train.library.checkpoint_export import run_export
    try:
        return run_export(argv)
    except SlurmdlError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
