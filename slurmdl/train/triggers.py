"""Triggers decide when the ranks exchange: every period, or by the drift of the models within a budget of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InvalidOptionsError
from slurmdl.train.checkpointed_fields import CheckpointedFields
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.strategy_config import DEFAULT_COMM_BUDGET, StrategyConfig

FloatArray = npt.NDArray[np.float32]

#: steps between two due steps of the drift trigger, also if the budget affords more. Ranks decide half an interval
#: ahead
DECISION_INTERVAL, SHORT_DECISION_INTERVAL = 4, 2
#: drift that triggers an exchange at first
INITIAL_THRESHOLD = 0.05
#: maximum number of first steps with an exchange each
MAX_WARMUP_STEPS = 30
#: change of log(threshold) for one exchange too many
GAIN = 0.2
#: steps over which a surplus or deficit is spread
HORIZON_STEPS = 200
#: bound of the change of log(threshold)
MAX_LOG_FACTOR = math.log(1e4)
#: largest share of the budget of HORIZON_STEPS for the warm-up
WARMUP_SHARE = 0.25
#: bound of the interval between exchanges, relative to its mean. On skewed data, rare long intervals cost more
#: accuracy than the exchanges saved
MAX_GAP_FACTOR = 2.5
#: bound of the interval between exchanges, in steps
MAX_INTERVAL = 64


#: sampled coordinates
MAX_COORDINATES = 4096


class DriftEstimator(CheckpointedFields):
    """Drift of a model since the last reset, estimated on MAX_COORDINATES coordinates.

    Args:
        parameters: shape (D,), the model, which changes in place.
        sizes: elements of each of its tensors.
    """

    state_fields = ("_reference",)

    def __init__(self, parameters: npt.NDArray[np.float32], sizes: Sequence[int]) -> None:
        self._parameters = parameters
        self._indices, self._multiplicity = sample_coordinates(sizes)
        self.reset()

    def reset(self) -> None:
        """Make the current model the reference."""
        self._reference = self._parameters[self._indices]

    def relative_drift(self) -> float:
        """|x - s| / |s|, x the model and s the reference."""
        current = self._parameters[self._indices].astype(np.float64)
        drift = float(np.dot(self._multiplicity, (current - self._reference) ** 2)) ** 0.5
        norm = float(np.dot(self._multiplicity, self._reference.astype(np.float64) ** 2)) ** 0.5
        return drift / norm if norm else math.inf if drift else 0.0


def sample_coordinates(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Sample evenly spaced coordinates of tensors of these sizes, consecutive in a flat vector.

    Return them, and the number of elements that each represents, both of shape (samples,): in proportion to the
    tensor's size, at least one, or all elements if they are at most MAX_COORDINATES.
    """
    total = sum(sizes)
    indices, multiplicity = [np.empty(0, np.int64)], [np.empty(0)]
    start = 0
    for size in sizes:
        count = min(size, max(1, round(MAX_COORDINATES * size / total))) if total > MAX_COORDINATES else size
        indices.append(start + (2 * np.arange(count) + 1) * size // (2 * max(count, 1)))
        multiplicity.append(np.full(count, size / max(count, 1)))
        start += size
    return np.concatenate(indices), np.concatenate(multiplicity)


@dataclass(frozen=True)
class CommCost:
    """Bytes sent by a rank.

    Attributes:
        per_exchange: in an exchange.
        per_decision: to decide on an exchange.
        one_off: once per run, as in the final average.
    """

    per_exchange: float
    per_decision: float = 0.0
    one_off: float = 0.0


class CommBudget(CheckpointedFields):
    """Controls the threshold in each due step: log(threshold) += GAIN (exchanged - affordable).

    The budget is a share of the bytes of fp32 gossip in every step. All bytes count: exchanges with headers,
    decisions, warm-up and final average. The affordable exchange rate is the remaining budget over HORIZON_STEPS.
    Raises InvalidOptionsError if the budget is below the cost of an exchange every `max_interval` steps.

    Args:
        share: of `full_bytes`.
        full_bytes: bytes per step of fp32 gossip in every step.
        cost: of this rank; a single rank's exchanges may cost nothing.
        decision_interval: steps between two due steps.

    Attributes:
        threshold_factor: factor of the initial threshold.
        max_interval: maximum steps between exchanges: MAX_GAP_FACTOR times the mean, at most MAX_INTERVAL.
    """

    state_fields = ("_spent_bytes", "_log_factor")

    def __init__(self, share: float, full_bytes: float, cost: CommCost, decision_interval: int) -> None:
        remaining = share * full_bytes - cost.per_decision / decision_interval
        mean_interval = cost.per_exchange / remaining if remaining > 0 else math.inf
        self.max_interval = math.ceil(min(MAX_INTERVAL, max(decision_interval, MAX_GAP_FACTOR * mean_interval)))
        self._min_exchange_rate = 1 / (self.max_interval // decision_interval)
        per_due_step = cost.per_exchange * self._min_exchange_rate + cost.per_decision
        minimum = per_due_step / decision_interval / full_bytes
        if share < minimum:
            raise InvalidOptionsError(
                f"--comm-budget {100 * share:g}%: below {100 * minimum:.3g}%, the cost of an exchange every "
                f"{self.max_interval} steps")
        self._share, self._full_bytes, self._cost = share, full_bytes, cost
        self._decision_interval = decision_interval
        self._spent_bytes = cost.one_off
        self._log_factor = 0.0

    @property
    def threshold_factor(self) -> float:
        return math.exp(self._log_factor)

    def update(self, step: int, exchanged: bool, unconditional: bool) -> None:
        """Add the cost of a due step, and adjust the threshold unless its exchange was unconditional."""
        cost = self._cost
        self._spent_bytes += cost.per_exchange * exchanged + cost.per_decision * (not unconditional)
        if not unconditional:
            horizon = step + 1 + HORIZON_STEPS
            remaining = self._share * self._full_bytes * horizon - self._spent_bytes
            affordable = (remaining / HORIZON_STEPS * self._decision_interval - cost.per_decision) / max(
                cost.per_exchange, 1.0)
            self._log_factor += GAIN * (exchanged - min(1.0, max(self._min_exchange_rate, affordable)))
            self._log_factor = min(MAX_LOG_FACTOR, max(-MAX_LOG_FACTOR, self._log_factor))


class Trigger(CheckpointedFields):
    """An exchange every `exchange_period` steps, or of a fragment in each equal part of them, by all ranks.

    Args:
        parameters: shape (D,), the model, which changes in place.
        sizes: elements of each of its tensors.
        learning_rate: returns the current learning rate.
        cost: of this rank's exchanges.
    """

    def __init__(self, config: StrategyConfig, parameters: FloatArray, sizes: Sequence[int],
                 learning_rate: Callable[[], float], cost: CommCost) -> None:
        self._period = config.exchange_period // config.fragments

    def next_due(self, step: int) -> int:
        """The first due step after `step` (-1 for the start); equal on all ranks."""
        return ((step + 1) // self._period + 1) * self._period - 1

    def is_unconditional(self, step: int) -> bool:
        """Whether all ranks exchange in a due step regardless of their models; equal on all ranks."""
        return True

    def decision_step(self, due_step: int) -> int:
        """The step in which ranks evaluate their models for a due step, after the previous due step.

        It is some steps ahead, so that the decision overlaps with computation.
        """
        return due_step

    def drift_ratio(self, due_step: int) -> float:
        """Drift of this rank's model as a multiple of the threshold in a due step; from 1 it requests an exchange."""
        return 1.0

    def observe(self, step: int, exchanged: bool) -> None:
        """Record the result of a due step."""

    def reset_reference(self, step: int) -> None:
        """Record that all models were made equal in a step, outside of exchanges."""


class DriftTrigger(Trigger):
    """An exchange if |x - s| / |s| exceeds a threshold; x the model, s the model after the last exchange.

    The norms are estimated (DriftEstimator). The budget sets the threshold, which scales with the learning rate:
    theta_t = theta eta_t / eta_0, eta_0 the largest rate so far, so that a rate warm-up does not lower it. In the
    first steps all exchange, and intervals between exchanges are bounded (CommBudget).

    Reference: N. Singh, D. Data, J. George, S. Diggavi: SPARQ-SGD: event-triggered and compressed communication in
    decentralized optimization. IEEE CDC 2020. arXiv:1910.14280
    """

    state_fields = ("_drift_estimator", "_max_learning_rate", "_last_exchange_step", "_budget")

    def __init__(self, config: StrategyConfig, parameters: FloatArray, sizes: Sequence[int],
                 learning_rate: Callable[[], float], cost: CommCost) -> None:
        self._learning_rate = learning_rate
        self._drift_estimator = DriftEstimator(parameters, sizes)
        self._max_learning_rate = 0.0
        self._last_exchange_step = -1
        share = DEFAULT_COMM_BUDGET if config.comm_budget is None else config.comm_budget
        full_bytes = 4 * parameters.size
        # exchanges per step that the budget pays for, if each sends one model and nothing else is sent: the other
        # costs differ between ranks, but due steps must not
        rate = min(1.0, share * full_bytes / COMPRESSORS[config.compression].packed_bytes(parameters.size))
        self._warmup_steps = min(MAX_WARMUP_STEPS, int(WARMUP_SHARE * HORIZON_STEPS * rate))
        self._decision_interval = DECISION_INTERVAL if rate <= 1 / DECISION_INTERVAL else SHORT_DECISION_INTERVAL
        self._budget = CommBudget(share, full_bytes, cost, self._decision_interval)

    def next_due(self, step: int) -> int:
        if step + 1 < self._warmup_steps:
            return step + 1
        intervals = (step + 1 - self._warmup_steps) // self._decision_interval + 1
        return self._warmup_steps + intervals * self._decision_interval - 1

    def is_unconditional(self, step: int) -> bool:
        return step < self._warmup_steps

    def decision_step(self, due_step: int) -> int:
        return due_step - self._decision_interval // 2

    def drift_ratio(self, due_step: int) -> float:
        if self.next_due(due_step) - self._last_exchange_step > self._budget.max_interval:
            return math.inf
        rate = self._learning_rate()
        self._max_learning_rate = max(self._max_learning_rate, rate)
        scale = rate / self._max_learning_rate if self._max_learning_rate else 1.0
        threshold = INITIAL_THRESHOLD * scale * self._budget.threshold_factor
        return self._drift_estimator.relative_drift() / max(threshold, 1e-12)

    def observe(self, step: int, exchanged: bool) -> None:
        if exchanged:
            self.reset_reference(step)
        self._budget.update(step, exchanged, self.is_unconditional(step))

    def reset_reference(self, step: int) -> None:
        self._drift_estimator.reset()
        self._last_exchange_step = step
