"""Several flows of messages at once: while one of them is between zones, another one can be inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from slurmdl.train.messages import CommCoroutine, MeteredP2P


class CollectivePipeline:
    """Flows that are under way. Each has a tag of its own, so that ranks may come to them in any order."""

    def __init__(self, p2p: MeteredP2P) -> None:
        self._p2p = p2p
        self._in_flight: list[CommCoroutine] = []
        #: what each of them waits for
        self._pending_waits: list[tuple[Sequence[Any], bool]] = []

    def add(self, coroutine: CommCoroutine) -> None:
        """Begin a flow."""
        self._advance(coroutine, len(self._in_flight))

    def progress(self, max_in_flight: int = 0, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Carry on the flows until there are no more than `most`, or until `stop`; the oldest go first."""
        messages = self._p2p
        while len(self._in_flight) > max_in_flight:
            nothing_there = all(first for _, first in self._pending_waits)
            with messages.timing_wait() if nothing_there else nullcontext():
                which = messages.transport.wait_any_group(
                    [requests for requests, _ in self._pending_waits], should_stop)
            if which is None:
                return
            self._pending_waits.pop(which)
            self._advance(self._in_flight.pop(which), which)

    def _advance(self, coroutine: CommCoroutine, position: int) -> None:
        wait = next(coroutine, None)
        if wait is not None:
            self._in_flight.insert(position, coroutine)
            self._pending_waits.insert(position, wait)
