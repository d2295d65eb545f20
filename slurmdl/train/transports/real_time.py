"""What the transports of real processes share: the clock, and no recovery after rank failures."""

from __future__ import annotations

import time


class RealTimeRank:
    """A rank that is a process; see `transport.Transport`."""

    def now(self) -> float:
        return time.perf_counter()

    def emulate_compute(self, seconds: float) -> None:
        time.sleep(seconds)

    def agree(self, done: bool) -> bool:
        return done
