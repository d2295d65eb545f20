"""What every trigger offers: when the replicas exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CommCost:
    """Bytes that a rank sends.

    Attributes
    ----------
    exchange : in one exchange.
    check : in one step in which an exchange is agreed on, whether one comes of it or not.
    once : besides all that in the whole run, as in the final average.
    each : besides all that in each step, in the mean, as in global averages.
    """

    per_exchange: float
    per_decision: float = 0.0
    one_off: float = 0.0
    per_step: float = 0.0


class Trigger(Protocol):
    """Says after which steps an exchange is due, and how urgent it is for this rank.

    The ranks look at their models some steps before, so that what they tell each other travels meanwhile.
    """

    def next_due(self, step: int) -> int:
        """The first step after step `number`, -1 for the start, in which an exchange is due; alike on all ranks."""

    def is_unconditional(self, step: int) -> bool:
        """Whether all ranks exchange in a step that is due, whatever their models are; alike on all ranks."""

    def decision_step(self, due_step: int) -> int:
        """The step in which ranks look at their models for an exchange in step `due`, later than the one before."""

    def urgency(self, due_step: int) -> float:
        """How much this rank asks for an exchange in step `due`, by its model now; from 1 on it wants one."""

    def observe(self, step: int, exchanged: bool) -> None:
        """What has come of a step that was due."""

    def reset_reference(self, step: int) -> None:
        """All models were made alike in step `number`, besides the exchanges."""
