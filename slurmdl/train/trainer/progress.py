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
_WIDTH = 30


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

    def __init__(self, steps: int, every: int, metrics: str = "", tensorboard: str = "",
                 done: int = 0, terminal: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._every = steps, every
        self._now, self._start_s, self._first_step = now, now(), done
        self._terminal = terminal or (sys.stderr if sys.stderr and sys.stderr.isatty() else None)
        self._metrics = _from(metrics, done) if metrics else None
        self._board = _board(tensorboard) if tensorboard else None
        self._recent: list[dict[str, float]] = []

    def step(self, figures: dict[str, float]) -> None:
        """Show the figures of a step: `step` (from 1), `loss`, `seconds` and whatever else is known of it; `done`,
        where a worker makes other steps than the run has.
        """
        done = int(figures["step"])
        of_run = min(int(figures.get("done", done)), self._steps)
        if self._metrics:
            print(json.dumps(figures), file=self._metrics)
        if self._board:
            for name, value in figures.items():
                if name != "step":
                    self._board.add_scalar(name, value, done)
        self._recent.append(figures)
        if self._terminal:
            self._bar(done, of_run)
        if done % self._every == 0:
            if self._metrics:
                self._metrics.flush()
            if not self._terminal:
                print(self._line(done, of_run), flush=True)
            self._recent.clear()

    def _line(self, step: int, of_run: int) -> str:
        def mean(name: str) -> float:
            return sum(figures[name] for figures in self._recent) / len(self._recent)

        line = f"step {step} of {self._steps}: loss {mean('loss'):.4f}, {mean('seconds'):.4f} s/step"
        if mean("seconds"):
            line += f", communication {mean('comm_seconds') / mean('seconds'):.0%}"
        scores = [figures["accuracy"] for figures in self._recent if "accuracy" in figures]
        line += f", accuracy {scores[-1]:.2%}" if scores else ""
        left = f", {units.coarse_duration(self._left_s(of_run))} left"
        return line + left * (of_run < self._steps)

    def _left_s(self, of_run: int) -> float:
        """Seconds to the last step if the steps to come take as long as those of this start: evaluations, checkpoints
        and this output included.
        """
        made = of_run - self._first_step
        return (self._now() - self._start_s) / made * (self._steps - of_run) if made > 0 else 0.0

    def _bar(self, step: int, of_run: int) -> None:
        assert self._terminal
        full = _WIDTH * of_run // self._steps
        end = "\n" if of_run == self._steps else ""
        bar = f"[{'#' * full}{'.' * (_WIDTH - full)}]"
        print(f"\r{bar} {self._line(step, of_run)}\x1b[K", end=end, file=self._terminal, flush=True)

    def close(self) -> None:
        """Write out what is left."""
        for file in (self._metrics, self._board):
            if file:
                file.close()


def _from(path: str, done: int) -> TextIO:
    """A file of figures, in which those of the first `done` steps stay."""
    kept: list[str] = []
    if done and os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as before:
            kept = list(islice(before, done))
    file = writable(path)
    file.writelines(line for line in kept if line.endswith("\n"))
    return file


def writable(path: str) -> TextIO:
    """A text file opened anew, or a TrainError that says why not."""
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}") from error


def _board(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn("train: --tensorboard is left aside: it needs the package tensorboard (pip install tensorboard)")
        return None
    return SummaryWriter(folder)
