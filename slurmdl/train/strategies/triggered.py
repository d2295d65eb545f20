"""Strategies whose exchanges are agreed on: between the due steps, while the ranks compute."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from slurmdl.train.strategies.strategy import Setting, Strategy
from slurmdl.train.triggers import TRIGGERS, Cost


class Triggered(Strategy):
    """Asks the trigger for the due steps, and in each of them exchanges if the ranks have agreed to.

    Some steps before it each rank looks at its model; what follows from it the ranks agree on in the background, and
    act on at the due step. So nobody waits for an answer, and the same seed makes the same exchanges.
    """

    kept: tuple[str, ...] = ("_trigger", "_due", "_verdict", "turn")

    def __init__(self, setting: Setting, cost: Cost) -> None:
        super().__init__(setting)
        method = setting.method
        self._trigger = TRIGGERS[method.when](method, setting.parameters, setting.sizes, setting.rate, cost)
        self._due = self._trigger.next(-1)
        self._agreed: Future[bool] | None = None
        #: what has come of it, where a checkpoint was made before the due step
        self._verdict: bool | None = None
        #: due steps so far: all ranks count alike
        self.turn = 0

    def after_update(self, number: int) -> None:
        trigger, courier = self._trigger, self._its.courier
        if not trigger.sure(self._due) and number == trigger.look(self._due):
            self._its.copies.fetch_parameters()
            urgency = trigger.urgency(self._due)
            self._agreed = courier.give(lambda: self.agree(urgency))
        if number != self._due:
            return
        wanted = trigger.sure(number) or self._wanted()
        going = wanted and self._exchange()
        self.fired += going
        self.skipped += not wanted
        self.turn += 1
        trigger.settle(number, going)
        self._due = trigger.next(number)
        self._agreed = self._verdict = None

    def _exchange(self) -> bool:
        self._its.copies.fetch_parameters()
        going = self.exchange()
        if going:
            self._its.copies.store_parameters()
        return going

    def _wanted(self) -> bool:
        """What the ranks have agreed on for the due step; False before they have begun to."""
        if self._agreed is not None:
            self._verdict = bool(self._its.courier.wait(self._agreed))
        return bool(self._verdict)

    def exchange(self) -> bool:
        """Make the exchange of this turn; False where this rank rests in it."""
        raise NotImplementedError

    def agree(self, urgency: float) -> bool:
        """Whether this turn ends in an exchange; an errand of the courier, on all ranks that take part in it."""
        raise NotImplementedError

    def next_exchange(self, number: int) -> int:
        return self._trigger.next(number - 1)

    def pause(self, number: int) -> None:
        self._wanted()

    def renew(self, state: Mapping[str, Any], number: int) -> None:
        super().renew(state, number)
        self.turn, self._due = state.get("turn", 0), self._trigger.next(number - 1)
        self._trigger.joined(number - 1)

    def finish(self) -> None:
        self.weight = self._its.relative[self._its.place]
        self._wanted()
