"""Several flows of messages at once: while one of them is between zones, another one can be inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from slurmdl.train.messages import Flow, Messages


class Pipeline:
    """Flows that are under way. Each has a tag of its own, so that ranks may come to them in any order."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._going: list[Flow] = []
        #: what each of them waits for
        self._waits: list[tuple[Sequence[Any], bool]] = []

    def add(self, flow: Flow) -> None:
        """Begin a flow."""
        self._go_on(flow, len(self._going))

    def carry_on(self, most: int = 0, stop: Callable[[], bool] = lambda: False) -> None:
        """Carry on the flows until there are no more than `most`, or until `stop`; the oldest go first."""
        messages = self._messages
        while len(self._going) > most:
            nothing_there = all(first for _, first in self._waits)
            with messages.awaiting() if nothing_there else nullcontext():
                which = messages.transport.either([requests for requests, _ in self._waits], stop)
            if which is None:
                return
            self._waits.pop(which)
            self._go_on(self._going.pop(which), which)

    def _go_on(self, flow: Flow, place: int) -> None:
        wait = next(flow, None)
        if wait is not None:
            self._going.insert(place, flow)
            self._waits.insert(place, wait)
