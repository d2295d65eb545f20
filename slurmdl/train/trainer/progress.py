"""What a run shows while it goes on: a bar or lines, a file of figures, TensorBoard."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, TextIO

from slurmdl import units
from slurmdl.errors import TrainError, warn

#: characters of the bar
_BAR_WIDTH = 30


class Progress:
    """Of the first worker: a bar on a terminal's stderr, lines on a stdout that is a file or a pipe.

    Parameters
    ----------
    steps : of the run.
    every : steps between two lines.
    metrics : file for one JSON object per step, "" for none.
    tensorboard : folder for TensorBoard's files, "" for none.
    done : steps that an earlier start has made, whose figures stay in the file.
    now : clock for the time left, in seconds.

    Raises
    ------
    TrainError : a file cannot be written.
    """

    def __init__(self, steps: int, log_every: int, metrics: str = "", tensorboard: str = "",
                 completed_steps: int = 0, terminal: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._log_every = steps, log_every
        self._now, self._start_s, self._first_step = now, now(), completed_steps
        self._terminal = terminal or (sys.stderr if sys.stderr and sys.stderr.isatty() else None)
        self._metrics = _open_metrics(metrics, completed_steps) if metrics else None
        self._tensorboard = _open_tensorboard(tensorboard) if tensorboard else None
        self._recent: list[dict[str, float]] = []

    def log_step(self, metrics: dict[str, float]) -> None:
        """Show the figures of a step: `step` (from 1), `loss`, `seconds` and whatever else is known of it; `done`,
        where a worker makes other steps than the run has.
        """
        done = int(metrics["step"])
        of_run = min(int(metrics.get("done", done)), self._steps)
        if self._metrics:
            print(json.dumps(metrics), file=self._metrics)
        if self._tensorboard:
            for name, value in metrics.items():
                if name != "step":
                    self._tensorboard.add_scalar(name, value, done)
        self._recent.append(metrics)
        if self._terminal:
            self._draw_bar(done, of_run)
        if done % self._log_every == 0:
            if self._metrics:
                self._metrics.flush()
            if not self._terminal:
                print(self._status_line(done, of_run), flush=True)
            self._recent.clear()

    def _status_line(self, step: int, global_step: int) -> str:
        def mean(name: str) -> float:
            return sum(figures[name] for figures in self._recent) / len(self._recent)

        line = f"step {step} of {self._steps}: loss {mean('loss'):.4f}, {mean('seconds'):.4f} s/step"
        if mean("seconds"):
            line += f", communication {mean('comm_seconds') / mean('seconds'):.0%}"
        scores = [figures["accuracy"] for figures in self._recent if "accuracy" in figures]
        line += f", accuracy {scores[-1]:.2%}" if scores else ""
        left = f", {units.format_coarse_duration(self._remaining_s(global_step))} left"
        return line + left * (global_step < self._steps)

    def _remaining_s(self, global_step: int) -> float:
        """Seconds to the last step if the steps to come take as long as those of this start: evaluations, checkpoints
        and this output included.
        """
        made = global_step - self._first_step
        return (self._now() - self._start_s) / made * (self._steps - global_step) if made > 0 else 0.0

    def _draw_bar(self, step: int, global_step: int) -> None:
        assert self._terminal
        full = _BAR_WIDTH * global_step // self._steps
        end = "\n" if global_step == self._steps else ""
        bar = f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}]"
        print(f"\r{bar} {self._status_line(step, global_step)}\x1b[K", end=end, file=self._terminal, flush=True)

    def close(self) -> None:
        """Write out what is left."""
        for file in (self._metrics, self._tensorboard):
            if file:
                file.close()


def _open_metrics(path: str, completed_steps: int) -> TextIO:
    """A file of figures, in which those of the first `done` steps stay."""
    kept: list[str] = []
    if completed_steps and os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as before:
            kept = list(islice(before, completed_steps))
    file = open_for_writing(path)
    file.writelines(line for line in kept if line.endswith("\n"))
    return file


def open_for_writing(path: str) -> TextIO:
    """A text file opened anew, or a TrainError that says why not."""
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}") from error


def _open_tensorboard(directory: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn("train: --tensorboard is left aside: it needs the package tensorboard (pip install tensorboard)")
        return None
    return SummaryWriter(directory)
