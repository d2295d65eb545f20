"""What the machine under a measurement was doing meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

#: share of idle processors below which they bound the time
IDLE = 0.2


class Processors:
    """Counts, from its making on, how idle the processors are; proc(5), /proc/stat."""

    def __init__(self) -> None:
        self._idle, self._all = _ticks()

    def idle(self) -> float:
        """Share of the processors' time so far that was idle; 1 before the first tick."""
        idle, every = _ticks()
        return (idle - self._idle) / (every - self._all) if every > self._all else 1.0


def bound(idle: Sequence[float]) -> str:
    """Words for a metric whose figures say more of the processors than of anything else, "" for others.

    Parameters
    ----------
    idle : shares of idle processors, one for each repeat.
    """
    middle = statistics.median(idle)
    return f"; CPU-bound: {middle:.0%} idle" if middle < IDLE else ""


def _ticks() -> tuple[float, float]:
    """Idle and all time of the processors, in ticks."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [float(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
