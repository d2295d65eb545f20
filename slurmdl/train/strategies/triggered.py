"""Base of strategies whose ranks decide jointly on each exchange, while they compute."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from slurmdl.train.comm_budget import CommCost
from slurmdl.train.strategies.strategy import Strategy, StrategyContext
from slurmdl.train.triggers import TRIGGERS


class TriggeredStrategy(Strategy):
    """Exchanges in the due steps of a trigger, if the ranks decide to.

    Some steps ahead each rank evaluates its model; the ranks decide in the background, and act in the due step. So
    decisions do not block, and runs with equal seeds make the same exchanges.
    """

    state_fields: tuple[str, ...] = ("_trigger", "_due_step", "_decision", "exchange_index")

    def __init__(self, ctx: StrategyContext, cost: CommCost) -> None:
        super().__init__(ctx)
        config = ctx.config
        self._trigger = TRIGGERS[config.trigger_name](config, ctx.parameters, ctx.sizes, ctx.learning_rate, cost)
        self._due_step = self._trigger.next_due(-1)
        self._decision_future: Future[bool] | None = None
        #: result of the decision, if a checkpoint precedes the due step
        self._decision: bool | None = None
        #: number of due steps so far; equal on all ranks
        self.exchange_index = 0

    def after_optimizer_step(self, step: int) -> None:
        trigger = self._trigger
        if not trigger.is_unconditional(self._due_step) and step == trigger.decision_step(self._due_step):
            self._ctx.device_copies.copy_to_host()
            urgency = trigger.urgency(self._due_step)
            self._decision_future = self._ctx.comm_thread.submit(lambda: self.decide(urgency))
        if step != self._due_step:
            return
        wanted = trigger.is_unconditional(step) or self._await_decision()
        exchanged = wanted and self._perform_exchange()
        self.exchanges += exchanged
        self.exchanges_skipped += not wanted
        self.exchange_index += 1
        trigger.observe(step, exchanged)
        self._due_step = trigger.next_due(step)
        self._decision_future = self._decision = None

    def _perform_exchange(self) -> bool:
        self._ctx.device_copies.copy_to_host()
        exchanged = self.exchange()
        if exchanged:
            self._ctx.device_copies.copy_to_device()
        return exchanged

    def _await_decision(self) -> bool:
        """Wait for the decision on the due step; False if it has not been started."""
        if self._decision_future is not None:
            self._decision = bool(self._ctx.comm_thread.wait(self._decision_future))
        return bool(self._decision)

    def exchange(self) -> bool:
        """Make the current exchange; return False if this rank has no partner in it."""
        raise NotImplementedError

    def decide(self, urgency: float) -> bool:
        """Decide on the current exchange; an op on all ranks that take part in it."""
        raise NotImplementedError

    def next_exchange(self, step: int) -> int:
        return self._trigger.next_due(step - 1)

    def quiesce(self, checkpoint_number: int) -> None:
        self._await_decision()

    def resume_from_average(self, state: Mapping[str, Any], step: int) -> None:
        super().resume_from_average(state, step)
        self.exchange_index, self._due_step = state.get("exchange_index", 0), self._trigger.next_due(step - 1)
        self._trigger.reset_reference(step - 1)

    def finish(self) -> None:
        self.model_weight = self._ctx.relative_weights[self._ctx.worker_rank]
        self._await_decision()
