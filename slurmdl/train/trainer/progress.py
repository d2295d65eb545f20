"""Progress of a run: bar or log lines, metrics file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import TextIO

from slurmdl import units
from slurmdl.errors import TrainError

#: characters of the bar
_BAR_WIDTH = 30


class Progress:
    """Progress of the first worker: a bar if stderr is a terminal, else lines on stdout.

    Args:
        metrics: file for one JSON object per step, "" for none; TrainError if it cannot be written.
        completed_steps: steps before a restart, whose metrics stay in the file.
        now: clock for the remaining time, in s.
    """

    def __init__(self, steps: int, log_every: int, metrics: str = "", completed_steps: int = 0,
                 terminal: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._log_every = steps, log_every
        self._now, self._start_s, self._first_step = now, now(), completed_steps
        self._terminal = terminal or (sys.stderr if sys.stderr and sys.stderr.isatty() else None)
        self._metrics = _open_metrics(metrics, completed_steps) if metrics else None
        self._recent: list[dict[str, float]] = []

    def log_step(self, metrics: dict[str, float]) -> None:
        """Log a step's metrics: `step` (from 1), `loss`, `seconds`, and others.

        `global_step` is present if it can differ from the worker's `step`.
        """
        step = int(metrics["step"])
        global_step = min(int(metrics.get("global_step", step)), self._steps)
        if self._metrics:
            print(json.dumps(metrics), file=self._metrics)
        self._recent.append(metrics)
        if self._terminal:
            self._draw_bar(step, global_step)
        if step % self._log_every == 0:
            if self._metrics:
                self._metrics.flush()
            if not self._terminal:
                print(self._status_line(step, global_step), flush=True)
            self._recent.clear()

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()

    def _status_line(self, step: int, global_step: int) -> str:
        def mean(name: str) -> float:
            return sum(metrics[name] for metrics in self._recent) / len(self._recent)

        line = f"step {step} of {self._steps}: loss {mean('loss'):.4f}, {mean('seconds'):.4f} s/step"
        if mean("seconds"):
            line += f", communication {mean('exposed_comm_seconds') / mean('seconds'):.0%}"
        accuracies = [metrics["test_accuracy"] for metrics in self._recent if "test_accuracy" in metrics]
        line += f", accuracy {accuracies[-1]:.2%}" if accuracies else ""
        remaining = f", {units.format_coarse_duration(self._remaining_s(global_step))} left"
        return line + remaining * (global_step < self._steps)

    def _remaining_s(self, global_step: int) -> float:
        """Estimate the remaining seconds from the mean time per step since the start, evaluations included."""
        completed = global_step - self._first_step
        return (self._now() - self._start_s) / completed * (self._steps - global_step) if completed > 0 else 0.0

    def _draw_bar(self, step: int, global_step: int) -> None:
        assert self._terminal
        filled = _BAR_WIDTH * global_step // self._steps
        end = "\n" if global_step == self._steps else ""
        bar = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"
        print(f"\r{bar} {self._status_line(step, global_step)}\x1b[K", end=end, file=self._terminal, flush=True)


def _open_metrics(path: str, completed_steps: int) -> TextIO:
    """Open a metrics file and keep the lines of the completed steps."""
    kept_lines: list[str] = []
    if completed_steps and os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as existing:
            kept_lines = list(islice(existing, completed_steps))
    file = open_for_writing(path)
    file.writelines(line for line in kept_lines if line.endswith("\n"))
    return file


def open_for_writing(path: str) -> TextIO:
    """Open a text file for writing; TrainError if that fails."""
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}") from error
