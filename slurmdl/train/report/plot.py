"""Plot of loss and drift of a run against step and time."""

from __future__ import annotations

import os

from slurmdl import files
from slurmdl.errors import TrainError, UnavailableError
from slurmdl.train.report.meters import StepMeter


def check_plot_file(path: str) -> None:
    """Report before the training that a plot cannot be written.

    Raises
    ------
    UnavailableError : matplotlib is not installed.
    TrainError : an unsupported file format, or a file that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError("--plot: needs the package matplotlib: pip install 'slurmdl[plot]'") from error
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if path.rpartition(".")[2] not in formats:
        raise TrainError(f"--plot {path}: unsupported file name extension; expected one of {', '.join(formats)}")
    try:
        files.check_writable(path)
    except OSError as error:
        raise TrainError(f"--plot {os.path.abspath(path)}: cannot be written ({error.strerror})") from error


def write_plot(path: str, meter: StepMeter, title: str) -> None:
    """Write the plot: a row for each available curve, against step on the left and time on the right."""
    from matplotlib.figure import Figure

    rows = [(name, curve.points) for name, curve in (("loss", meter.loss), ("drift", meter.drift)) if curve.count]
    figure = Figure(figsize=(9, 1 + 3 * max(len(rows), 1)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(max(len(rows), 1), 2, sharex="col", squeeze=False)
    for (left, right), (name, points) in zip(panels, rows, strict=False):
        left.plot(points[:, 0], points[:, 2], linewidth=1)
        right.plot(points[:, 1], points[:, 2], linewidth=1)
        left.set_ylabel(name)
        left.grid(alpha=0.3)
        right.grid(alpha=0.3)
    panels[-1][0].set_xlabel("step")
    panels[-1][1].set_xlabel("time in steps / s")
    figure.savefig(path)
