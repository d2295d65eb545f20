"""What the machine under a measurement was doing meanwhile."""

from __future__ import annotations

#: share of idle processors below which they bound the time
IDLE = 0.2


def processors() -> tuple[float, float]:
    """Idle and all time of the processors so far, in ticks; proc(5), /proc/stat."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [float(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
