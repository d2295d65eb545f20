"""`python -m slurmdl.train`, started once per rank by srun or mpirun; `export` as the first word is a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurmdl.errors import SlurmdlError, report_error, warn
from slurmdl.train.library import shutdown
from slurmdl.train.trainer.options import TrainParser, parse_train_options


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
    shutdown.exit_if_gloo_runs()
    return 0


def _export(argv: Sequence[str]) -> int:
    parser = TrainParser(prog="slurmdl train export", allow_abbrev=False,
                         description="Write the model of a checkpoint to a file, for "
                                     "model.load_state_dict(torch.load(FILE)). Models of the workers that differ are "
                                     "averaged.")
    parser.add_argument("directory", metavar="DIR", help="directory of the checkpoints (--checkpoint-dir)")
    parser.add_argument("--step", type=int, metavar="N", help="number of the checkpoint (default: the newest that is "
                                                              "complete)")
    parser.add_argument("--output", default="model.pt", metavar="FILE", help="default: %(default)s")
    try:
        arguments = parser.parse_args(argv)
        from slurmdl.train.library.checkpoint_restore import export_model
        number, model_count = export_model(arguments.directory, arguments.step, arguments.output)
    except SlurmdlError as error:
        return report_error(error)
    mean = f", the mean of {model_count} workers" if model_count > 1 else ""
    warn(f"train export: {arguments.output}: the model of step {number}{mean}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
