"""Idle share of the machine's CPUs during a measurement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

#: idle share of the CPUs below which a measurement counts as CPU-bound
CPU_BOUND_IDLE = 0.2


class CpuIdleMeter:
    """Measures the idle share of all CPUs since its creation; proc(5), /proc/stat."""

    def __init__(self) -> None:
        self._idle, self._total = _read_ticks()

    def idle_share(self) -> float:
        """Return the idle share of the CPU time so far; 1 before the first tick."""
        idle, total = _read_ticks()
        return (idle - self._idle) / (total - self._total) if total > self._total else 1.0


def cpu_bound_note(idle: Sequence[float]) -> str:
    """Return a note for a metric that was CPU-bound, "" otherwise.

    Parameters
    ----------
    idle : idle share of the CPUs in each repeat.
    """
    median = statistics.median(idle)
    return f"; CPU-bound: {median:.0%} idle" if median < CPU_BOUND_IDLE else ""


def _read_ticks() -> tuple[float, float]:
    """Return the idle and the total CPU time in ticks."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [float(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
