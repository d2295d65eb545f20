"""What the transports of real processes share: the clock, the watchdog, and no recovery after rank failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from slurmdl.train.transports.transport import CommCoroutine
from slurmdl.train.transports.watchdog import StalledError, Watchdog


class RealTimeRank:
    """A rank that is a process; see `transport.Transport`."""

    watchdog: Watchdog | None = None
    device_backends: Mapping[str, str] = MappingProxyType({})
    start_coroutine: Callable[[CommCoroutine], Any] | None = None

    def watch(self, watchdog: Watchdog, on_stall: Callable[[StalledError], None]) -> None:
        """Check all waits from now on.

        A wait that is too long raises StalledError; one inside another library calls `on_stall`, from a thread.
        """
        self.watchdog = watchdog

    def now(self) -> float:
        return time.perf_counter()

    def emulate_compute(self, seconds: float) -> None:
        time.sleep(seconds)

    def agree(self, done: bool) -> bool:
        return done
