"""Strategies whose exchanges are agreed on: between the due steps, while the ranks compute."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from slurmdl.train.comm_budget import CommCost
from slurmdl.train.strategies.strategy import Strategy, StrategyContext
from slurmdl.train.triggers import TRIGGERS


class TriggeredStrategy(Strategy):
    """Asks the trigger for the due steps, and in each of them exchanges if the ranks have agreed to.

    Some steps before it each rank looks at its model; what follows from it the ranks agree on in the background, and
    act on at the due step. So nobody waits for an answer, and the same seed makes the same exchanges.
    """

    state_fields: tuple[str, ...] = ("_trigger", "_due", "_verdict", "turn")

    def __init__(self, ctx: StrategyContext, cost: CommCost) -> None:
        super().__init__(ctx)
        method = ctx.config
        self._trigger = TRIGGERS[method.trigger_name](method, ctx.parameters, ctx.sizes, ctx.learning_rate, cost)
        self._due_step = self._trigger.next_due(-1)
        self._decision_future: Future[bool] | None = None
        #: what has come of it, where a checkpoint was made before the due step
        self._decision: bool | None = None
        #: due steps so far: all ranks count alike
        self.exchange_index = 0

    def after_optimizer_step(self, step: int) -> None:
        trigger, courier = self._trigger, self._ctx.comm_thread
        if not trigger.is_unconditional(self._due_step) and step == trigger.decision_step(self._due_step):
            self._ctx.device_copies.copy_to_host()
            urgency = trigger.urgency(self._due_step)
            self._decision_future = courier.submit(lambda: self.decide(urgency))
        if step != self._due_step:
            return
        wanted = trigger.is_unconditional(step) or self._await_decision()
        going = wanted and self._perform_exchange()
        self.exchanges += going
        self.exchanges_skipped += not wanted
        self.exchange_index += 1
        trigger.observe(step, going)
        self._due_step = trigger.next_due(step)
        self._decision_future = self._decision = None

    def _perform_exchange(self) -> bool:
        self._ctx.device_copies.copy_to_host()
        going = self.exchange()
        if going:
            self._ctx.device_copies.copy_to_device()
        return going

    def _await_decision(self) -> bool:
        """What the ranks have agreed on for the due step; False before they have begun to."""
        if self._decision_future is not None:
            self._decision = bool(self._ctx.comm_thread.wait(self._decision_future))
        return bool(self._decision)

    def exchange(self) -> bool:
        """Make the exchange of this turn; False where this rank rests in it."""
        raise NotImplementedError

    def decide(self, urgency: float) -> bool:
        """Whether this turn ends in an exchange; an errand of the courier, on all ranks that take part in it."""
        raise NotImplementedError

    def next_exchange(self, step: int) -> int:
        return self._trigger.next_due(step - 1)

    def quiesce(self, checkpoint_number: int) -> None:
        self._await_decision()

    def resume_from_average(self, state: Mapping[str, Any], step: int) -> None:
        super().resume_from_average(state, step)
        self.exchange_index, self._due_step = state.get("turn", 0), self._trigger.next_due(step - 1)
        self._trigger.reset_reference(step - 1)

    def finish(self) -> None:
        self.model_weight = self._ctx.relative_weights[self._ctx.worker_rank]
        self._await_decision()
