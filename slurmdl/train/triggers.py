"""Triggers decide when the ranks exchange. A new one is one class and one line in TRIGGERS."""

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

#: steps between two due steps of the drift trigger: default, and if a budget affords more. Ranks decide half an
#: interval ahead
DECISION_INTERVAL, BUDGETED_DECISION_INTERVAL = 4, 2
#: default drift that triggers an exchange
DEFAULT_DRIFT_THRESHOLD = 0.05
#: default number of first steps with an exchange each
DEFAULT_WARMUP_STEPS = 30


class Trigger(Protocol):
    """Due steps of exchanges, and the urgency of an exchange for this rank.

    Ranks evaluate their models some steps ahead, so that the decision overlaps with computation.
    """

    def next_due(self, step: int) -> int:
        """The first due step after `step` (-1 for the start); equal on all ranks."""

    def is_unconditional(self, step: int) -> bool:
        """Whether all ranks exchange in a due step regardless of their models; equal on all ranks."""

    def decision_step(self, due_step: int) -> int:
        """The step in which ranks evaluate their models for a due step, after the previous due step."""

    def urgency(self, due_step: int) -> float:
        """This rank's current urgency of an exchange in a due step; from 1 it requests one."""

    def observe(self, step: int, exchanged: bool) -> None:
        """Record the result of a due step."""

    def reset_reference(self, step: int) -> None:
        """Record that all models were made equal in a step, outside of exchanges."""


class PeriodTrigger(Stateful, Trigger):
    """An exchange every `period` steps."""

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
        """Do nothing."""

    def reset_reference(self, step: int) -> None:
        """Do nothing."""


class DriftTrigger(Stateful, Trigger):
    """An exchange if |x - s| / |s| exceeds a threshold; x the model, s the model after the last exchange.

    The norms are estimated (DriftEstimator). The threshold scales with the learning rate: theta_t = theta_0 eta_t /
    eta_0, eta_0 the largest rate so far, so that a rate warm-up does not lower it. The first `trigger_warmup` steps
    all exchange, and intervals between exchanges are bounded by `max_interval`.

    References
    ----------
    N. Singh, D. Data, J. George, S. Diggavi: SPARQ-SGD: event-triggered and compressed communication in decentralized
    optimization. IEEE CDC 2020. arXiv:1910.14280
    """

    state_fields = ("_drift_estimator", "_max_learning_rate", "_last_exchange_step", "_budget")

    def __init__(self, config: StrategyConfig, parameters: FloatArray, sizes: Sequence[int],
                 learning_rate: Callable[[], float], cost: CommCost) -> None:
        self._warmup_steps = warmup_steps(config, parameters.size)
        self._decision_interval = decision_interval(config, parameters.size)
        self._learning_rate = learning_rate
        self._drift_estimator = DriftEstimator(parameters, sizes)
        self._initial_threshold = (DEFAULT_DRIFT_THRESHOLD if config.drift_threshold is None
                                   else config.drift_threshold)
        self._max_learning_rate = 0.0
        self._last_exchange_step = -1
        self._max_interval = MAX_INTERVAL if config.max_interval is None else config.max_interval
        self._budget = None
        if config.comm_budget is not None:
            self._budget = CommBudget(config.comm_budget, 4.0 * parameters.size, cost, self._decision_interval,
                                      config.max_interval)
            self._max_interval = self._budget.max_interval

    def next_due(self, step: int) -> int:
        if step + 1 < self._warmup_steps:
            return step + 1
        intervals = (step + 1 - self._warmup_steps) // self._decision_interval + 1
        return self._warmup_steps + intervals * self._decision_interval - 1

    def is_unconditional(self, step: int) -> bool:
        return step < self._warmup_steps

    def decision_step(self, due_step: int) -> int:
        return due_step - self._decision_interval // 2

    def urgency(self, due_step: int) -> float:
        if self.next_due(due_step) - self._last_exchange_step > self._max_interval:
            return math.inf
        return self._drift_estimator.relative_drift() / max(self.current_threshold(), 1e-12)

    def current_threshold(self) -> float:
        """The threshold at the current learning rate."""
        rate = self._learning_rate()
        self._max_learning_rate = max(self._max_learning_rate, rate)
        scale = rate / self._max_learning_rate if self._max_learning_rate else 1.0
        return self._initial_threshold * scale * (self._budget.threshold_factor if self._budget else 1.0)

    def observe(self, step: int, exchanged: bool) -> None:
        if exchanged:
            self.reset_reference(step)
        if self._budget:
            self._budget.update(step, exchanged, self.is_unconditional(step))

    def reset_reference(self, step: int) -> None:
        self._drift_estimator.reset()
        self._last_exchange_step = step


def warmup_steps(config: StrategyConfig, num_parameters: int) -> int:
    """Number of first steps with an exchange each; equal on all ranks."""
    if config.trigger_warmup is not None:
        return config.trigger_warmup
    if config.comm_budget is None:
        return DEFAULT_WARMUP_STEPS
    return min(DEFAULT_WARMUP_STEPS, affordable_warmup(
        affordable_rate(config.comm_budget, config.compression, num_parameters)))


def decision_interval(config: StrategyConfig, num_parameters: int) -> int:
    """Steps between two due steps of the drift trigger; equal on all ranks."""
    affords_more = config.comm_budget is not None and affordable_rate(
        config.comm_budget, config.compression, num_parameters) > 1 / DECISION_INTERVAL
    return BUDGETED_DECISION_INTERVAL if affords_more else DECISION_INTERVAL


TriggerFactory = Callable[[StrategyConfig, FloatArray, Sequence[int], Callable[[], float], CommCost], Trigger]

#: name -> factory(config, parameters, tensor sizes, learning rate, cost)
TRIGGERS: dict[str, TriggerFactory] = {
    "period": lambda config, parameters, sizes, learning_rate, cost: PeriodTrigger(config.exchange_period),
    "drift": DriftTrigger,
}
