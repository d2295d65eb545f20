"""The lines that `slurmdl bench run` prints while it runs its cells as jobs, with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmdl.units import coarse_duration

#: seconds between two lines about the same job
EVERY_S = 30.0


class Progress:
    """Progress over the cells of a matrix, run one after the other.

    Parameters
    ----------
    cells : number of cells of the matrix, repeats counted.
    to_run : how many of them need a job.
    limit_s : time limit of a job, in seconds.
    say : prints one line.
    now : clock, in seconds.
    """

    def __init__(self, cells: int, to_run: int, limit_s: float, say: Callable[[str], None],
                 now: Callable[[], float] = time.monotonic) -> None:
        self._cells, self._left, self._limit_s, self._say, self._now = cells, to_run, limit_s, say, now
        self._took_s: list[float] = []
        self._number, self._start_s, self._said_s = 0, now(), now()
        say(f"{to_run} of {cells} cells to run, {self._estimate(0.0)}")

    def start(self, number: int) -> None:
        """Cell `number`, counted from 1, is about to be submitted."""
        self._number, self._start_s = number, self._now()
        self._said_s = self._start_s

    def job(self, job: str, state: str, reason: str) -> None:
        """The job of the cell has this state now; one line each EVERY_S seconds."""
        now = self._now()
        if now - self._said_s < EVERY_S:
            return
        self._said_s = now
        passed_s = now - self._start_s
        why = f" ({reason})" if state == "PENDING" and reason else ""
        self._say(f"{self._number} of {self._cells}: job {job} is {state}{why}, {coarse_duration(passed_s)} since "
                  f"its submission; {self._estimate(passed_s)}")

    def end(self, number: int, cell: str, status: str, reason: str, left: int) -> None:
        """The outcome of cell `number` is there, and `left` cells still need a job."""
        if number == self._number:
            self._took_s.append(self._now() - self._start_s)
        self._left = left
        self._say(f"{number} of {self._cells}: {cell}: {status}{': ' * bool(reason)}{reason}"
                  + (f"; {self._estimate(0.0)}" if self._left else ""))

    def _estimate(self, passed_s: float) -> str:
        """Time left, from the mean of the cells so far; from the time limit while there is none."""
        if not self._took_s:
            limit = coarse_duration(self._left * self._limit_s)
            return f"at most {limit} left ({coarse_duration(self._limit_s)} per job) and the time in the queue"
        mean_s = sum(self._took_s) / len(self._took_s)
        return f"about {coarse_duration(max(0.0, self._left * mean_s - passed_s))} left"
