"""Progress lines of `slurmdl bench run`, with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmdl.units import format_coarse_duration

#: seconds between two lines about the same job
EVERY_S = 30.0


class Progress:
    """Progress over the cells of a matrix, run one after the other.

    Parameters
    ----------
    cells : number of cells of the matrix, repeats counted.
    to_run : number of cells that need a job.
    limit_s : time limit of a job, in seconds.
    report_progress : prints one line.
    now : clock, in seconds.
    """

    def __init__(self, cells: int, to_run: int, limit_s: float, report_progress: Callable[[str], None],
                 now: Callable[[], float] = time.monotonic) -> None:
        self._cells, self._left, self._limit_s = cells, to_run, limit_s
        self._report_progress, self._now = report_progress, now
        self._took_s: list[float] = []
        self._number, self._start_s, self._said_s = 0, now(), now()
        report_progress(f"{to_run} of {cells} cells to run, {self._estimate(0.0)}")

    def start(self, number: int) -> None:
        """Start timing cell `number`, counted from 1."""
        self._number, self._start_s = number, self._now()
        self._said_s = self._start_s

    def job(self, job: str, state: str, reason: str) -> None:
        """Report the state of the cell's job, at most once every EVERY_S seconds."""
        now = self._now()
        if now - self._said_s < EVERY_S:
            return
        self._said_s = now
        passed_s = now - self._start_s
        why = f" ({reason})" if state == "PENDING" and reason else ""
        self._report_progress(f"{self._number} of {self._cells}: job {job} is {state}{why}, "
                              f"{format_coarse_duration(passed_s)} since its submission; {self._estimate(passed_s)}")

    def end(self, number: int, cell: str, status: str, reason: str, left: int) -> None:
        """Report the result of cell `number`; `left` cells still need a job."""
        if number == self._number:
            self._took_s.append(self._now() - self._start_s)
        self._left = left
        self._report_progress(f"{number} of {self._cells}: {cell}: {status}{': ' * bool(reason)}{reason}"
                              + (f"; {self._estimate(0.0)}" if self._left else ""))

    def _estimate(self, passed_s: float) -> str:
        """Estimate the time left from the mean of the cells so far, or from the time limit before the first."""
        if not self._took_s:
            limit = format_coarse_duration(self._left * self._limit_s)
            return f"at most {limit} left ({format_coarse_duration(self._limit_s)} per job) and the time in the queue"
        mean_s = sum(self._took_s) / len(self._took_s)
        return f"about {format_coarse_duration(max(0.0, self._left * mean_s - passed_s))} left"
