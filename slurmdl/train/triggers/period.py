"""An exchange every so many steps."""

from __future__ import annotations

from slurmdl.train.kept import Stateful
from slurmdl.train.triggers.trigger import Trigger


class PeriodTrigger(Stateful, Trigger):
    def __init__(self, period: int) -> None:
        self._period = period

    def next_due(self, step: int) -> int:
        return ((step + 1) // self._period + 1) * self._period - 1

    def is_unconditional(self, step: int) -> bool:
        return True

    def decision_step(self, due_step: int) -> int:
        return due_step

    def urgency(self, due_step: int) -> float:
        return 1.0

    def observe(self, step: int, exchanged: bool) -> None:
        """A period needs to know nothing of it."""

    def reset_reference(self, step: int) -> None:
        """Nor of this."""
