"""An exchange when the local model has moved away from what it was at the last one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.train.comm_budget import MAX_INTERVAL, CommBudget, CommCost, affordable_rate, affordable_warmup
from slurmdl.train.mixing.drift_estimator import DriftEstimator
from slurmdl.train.stateful import Stateful
from slurmdl.train.strategy_config import StrategyConfig

FloatArray = npt.NDArray[np.float32]

#: steps from one look at the drift to the next, of which ranks have half to agree: mostly, and where a budget pays
#: for more than that
DECISION_INTERVAL, BUDGETED_DECISION_INTERVAL = 4, 2
#: drift that asks for an exchange, where nothing else was said
DEFAULT_DRIFT_THRESHOLD = 0.05
#: first steps with an exchange in each, where nothing was said
DEFAULT_WARMUP_STEPS = 30


def warmup_steps(config: StrategyConfig, num_parameters: int) -> int:
    """The first steps, with an exchange in each; alike on all ranks."""
    if config.trigger_warmup is not None:
        return config.trigger_warmup
    if config.comm_budget is None:
        return DEFAULT_WARMUP_STEPS
    return min(DEFAULT_WARMUP_STEPS, affordable_warmup(
        affordable_rate(config.comm_budget, config.compression, num_parameters)))


def decision_interval(config: StrategyConfig, num_parameters: int) -> int:
    """Steps from one look at the drift to the next; alike on all ranks."""
    often = config.comm_budget is not None and affordable_rate(
    config.comm_budget, config.compression, num_parameters) > 1 / DECISION_INTERVAL
    return BUDGETED_DECISION_INTERVAL if often else DECISION_INTERVAL


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


class DriftTrigger(Stateful, Trigger):
    """Asks for an exchange where |x - s| / |s| is above a threshold, x the model, s the model at the last exchange.

    The norms are estimated (Moved). The threshold is scaled with the learning rate: theta_t = theta_0
    eta_t / eta_0, eta_0 the largest rate so far, which leaves it as it is while a rate warms up. The first steps
    (`warm_up`) all end in an exchange, and no more than `silence` steps are left without one.

    References
    ----------
    N. Singh, D. Data, J. George, S. Diggavi: SPARQ-SGD: event-triggered and compressed communication in decentralized
    optimization. IEEE CDC 2020. arXiv:1910.14280
    """

    state_fields = ("_moved", "_peak", "_last", "_budget")

    def __init__(self, config: StrategyConfig, parameters: FloatArray, sizes: Sequence[int], learning_rate: Callable[[], float],
                 cost: CommCost) -> None:
        self._warmup_steps, self._decision_interval = warmup_steps(
    config, parameters.size), decision_interval(
        config, parameters.size)
        self._learning_rate = learning_rate
        self._drift_estimator = DriftEstimator(parameters, sizes)
        self._initial_threshold = DEFAULT_DRIFT_THRESHOLD if config.drift_threshold is None else config.drift_threshold
        self._max_learning_rate = 0.0
        self._last_exchange_step = -1
        self._max_interval = MAX_INTERVAL if config.max_interval is None else config.max_interval
        self._budget = None
        if config.comm_budget is not None:
            self._budget = CommBudget(
    config.comm_budget,
    4.0 * parameters.size,
    cost,
    self._decision_interval,
     config.max_interval)
            self._max_interval = self._budget.max_interval

    def next_due(self, step: int) -> int:
        if step + 1 < self._warmup_steps:
            return step + 1
        return self._warmup_steps + ((step + 1 - self._warmup_steps) //
                                     self._decision_interval + 1) * self._decision_interval - 1

    def is_unconditional(self, step: int) -> bool:
        return step < self._warmup_steps

    def decision_step(self, due_step: int) -> int:
        return due_step - self._decision_interval // 2

    def urgency(self, due_step: int) -> float:
        if self.next_due(due_step) - self._last_exchange_step > self._max_interval:
            return math.inf
        return self._drift_estimator.relative_drift() / max(self.current_threshold(), 1e-12)

    def current_threshold(self) -> float:
        """The drift from which on an exchange is asked for now."""
        rate = self._learning_rate()
        self._max_learning_rate = max(self._max_learning_rate, rate)
        scale = rate / self._max_learning_rate if self._max_learning_rate else 1.0
        return self._initial_threshold * scale * (self._budget.threshold_factor if self._budget else 1.0)

    def observe(self, step: int, exchanged: bool) -> None:
        if exchanged:
            self._drift_estimator.reset()
            self._last_exchange_step = step
        if self._budget:
            self._budget.update(step, exchanged, self.is_unconditional(step))

    def reset_reference(self, step: int) -> None:
        self._drift_estimator.reset()
        self._last_exchange_step = step


# MERGED: An exchange every so many steps.

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


# MERGED: What every trigger offers: when the replicas exchange.





# MERGED: When the replicas exchange.

__all__ = ["TRIGGERS", "CommCost", "Trigger"]

TriggerFactory = Callable[[StrategyConfig, npt.NDArray[np.float32],
    Sequence[int], Callable[[], float], CommCost], Trigger]

#: name -> what makes it from the method, the parameters, the sizes of their tensors, the learning rate and the bytes
TRIGGERS: dict[str, TriggerFactory] = {
    "period": lambda method, parameters, sizes, rate, cost: PeriodTrigger(method.exchange_period),
    "drift": DriftTrigger,
}
