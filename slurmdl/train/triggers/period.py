"""An exchange every so many steps."""

from __future__ import annotations

from slurmdl.train.kept import Kept
from slurmdl.train.triggers.trigger import Trigger


class Period(Kept, Trigger):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def next(self, number: int) -> int:
        return ((number + 1) // self._steps + 1) * self._steps - 1

    def sure(self, number: int) -> bool:
        return True

    def look(self, due: int) -> int:
        return due

    def urgency(self, due: int) -> float:
        return 1.0

    def settle(self, number: int, exchanged: bool) -> None:
        """A period needs to know nothing of it."""

    def joined(self, number: int) -> None:
        """Nor of this."""
