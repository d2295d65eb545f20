"""Ends a rank that waits for others longer than a limit, and finds out for which ones.

Ranks that wait answer roll calls. One whose wait exceeds the limit calls the roll: a rank that does not answer does
not wait itself, so the others wait for it, directly or not: it is stopped, computes, or hangs in code of the script.
If all answer, the ranks wait for each other, as after different calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.tags import Tag
from slurmdl.units import format_coarse_duration

#: seconds between two checks of a rank that waits
CHECK_INTERVAL_S = 1.0
#: seconds that other ranks have to answer, and for which a rank that has answered leaves the report to the caller
_ANSWER_S, _SILENT_S = 5.0, 30.0
_MAX_LISTED_RANKS = 8


class Messenger(Protocol):
    """What the watchdog needs of a transport.Transport."""

    rank: int
    alive_ranks: tuple[int, ...]

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any: ...
    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any: ...
    def iprobe(self, tag: int) -> int | None: ...
    def testall(self, requests: Sequence[Any]) -> bool: ...


class StalledError(TrainError):
    """This rank has waited longer than the limit."""


class Watchdog:
    """The limit of one rank.

    Args:
        limit_s: longest wait, in s; above 0.

    Attributes:
        limit_s: see above.
        format_rank: text of a rank for messages.
    """

    def __init__(self, transport: Messenger, limit_s: float) -> None:
        self._transport, self.limit_s = transport, limit_s
        self.format_rank: Callable[[int], str] = lambda rank: f"rank {rank}"
        self._next_check = self._silent_until = 0.0
        #: keeps the buffers of messages alive that no rank has received
        self._requests: list[Any] = []

    def check(self, waited_s: float) -> None:
        """Call often while this rank waits. Raises StalledError after the limit.

        Of several ranks that have waited too long, the lowest calls the roll, and the others only answer.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_INTERVAL_S
        self._answer()
        if waited_s >= self.limit_s and now >= self._silent_until:
            missing = self._call_roll()
            if missing is not None:
                raise StalledError(self._text(waited_s, missing))

    def _answer(self) -> None:
        for peer in self._receive(Tag.ROLL_CALL):
            self._send(peer, Tag.ROLL_ANSWER)
            if peer < self._transport.rank:
                self._silent_until = time.monotonic() + _SILENT_S

    def _call_roll(self) -> list[int] | None:
        """The ranks that do not answer; None if a lower rank calls the roll, too."""
        missing = {rank for rank in self._transport.alive_ranks if rank != self._transport.rank}
        for rank in missing:
            self._send(rank, Tag.ROLL_CALL)
        end = time.monotonic() + _ANSWER_S
        while missing and time.monotonic() < end:
            time.sleep(0.01)
            missing -= set(self._receive(Tag.ROLL_ANSWER))
            self._answer()
            if time.monotonic() < self._silent_until:
                return None
        return sorted(missing)

    def _send(self, peer: int, tag: Tag) -> None:
        self._requests.append(self._transport.isend(peer, np.zeros(1, np.uint8), tag))

    def _receive(self, tag: Tag) -> list[int]:
        """The ranks whose messages with this tag have arrived."""
        sources = []
        while (peer := self._transport.iprobe(tag)) is not None:
            request = self._transport.irecv(peer, np.zeros(1, np.uint8), tag)
            while not self._transport.testall([request]):
                time.sleep(1e-3)
            sources.append(peer)
        return sources

    def _text(self, waited_s: float, missing: Sequence[int]) -> str:
        waited = f"waited {format_coarse_duration(waited_s)}"
        limit = f"(--timeout {self.limit_s:g})"
        if not missing:
            return f"{waited}, and all ranks wait for each other; expected the same calls on all ranks {limit}"
        listed = ", ".join(map(self.format_rank, missing[:_MAX_LISTED_RANKS]))
        more = f" and {len(missing) - _MAX_LISTED_RANKS} more" * (len(missing) > _MAX_LISTED_RANKS)
        verb = "is stopped, or does not wait" if len(missing) == 1 else "are stopped, or do not wait"
        return f"{waited} for {listed}{more}, which {verb} for other ranks {limit}"
