"""Communication budget: control of the drift threshold by the bytes sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurmdl.errors import InvalidOptionsError
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.stateful import Stateful

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
#: default bound of the interval between exchanges, in steps
MAX_INTERVAL = 64


@dataclass(frozen=True)
class CommCost:
    """Bytes sent by a rank.

    Attributes
    ----------
    per_exchange : in an exchange.
    per_decision : to decide on an exchange.
    one_off : once per run, as in the final average.
    per_step : in every step on average, as for global averages.
    """

    per_exchange: float
    per_decision: float = 0.0
    one_off: float = 0.0
    per_step: float = 0.0


def affordable_rate(share: float, compression: str, num_parameters: int) -> float:
    """Exchanges per step within a budget, if each sends one model and nothing else is sent.

    The other costs differ between ranks, but values derived from this one must be equal on all ranks.
    """
    return min(1.0, share * 4 * num_parameters / COMPRESSORS[compression].packed_bytes(num_parameters))


def affordable_warmup(exchange_rate: float) -> int:
    """Number of warm-up steps within a budget for `exchange_rate` exchanges per step, see `affordable_rate`."""
    return int(WARMUP_SHARE * HORIZON_STEPS * exchange_rate)


class CommBudget(Stateful):
    """Controls the threshold in each due step: log(threshold) += GAIN (exchanged - affordable).

    The budget is a share of the bytes of fp32 gossip in every step. All bytes count: exchanges with headers,
    decisions, warm-up and final average. The affordable exchange rate is the remaining budget over HORIZON_STEPS.

    Parameters
    ----------
    share : of `full_bytes`.
    full_bytes : bytes per step of fp32 gossip in every step.
    cost : of this rank; a single rank's exchanges may cost nothing.
    decision_interval : steps between two due steps.
    max_interval : bound of the interval between exchanges in steps; None for MAX_GAP_FACTOR times the mean interval,
        at most MAX_INTERVAL.

    Attributes
    ----------
    threshold_factor : factor of the initial threshold.
    max_interval : bound of the interval between exchanges, in steps.

    Raises
    ------
    InvalidOptionsError : a budget below the cost of an exchange every `max_interval` steps.
    """

    state_fields = ("_spent_bytes", "_log_factor")

    def __init__(self, share: float, full_bytes: float, cost: CommCost, decision_interval: int,
                 max_interval: int | None) -> None:
        if max_interval is None:
            remaining = share * full_bytes - cost.per_step - cost.per_decision / decision_interval
            mean_interval = cost.per_exchange / remaining if remaining > 0 else math.inf
            max_interval = MAX_INTERVAL if MAX_GAP_FACTOR * mean_interval > MAX_INTERVAL else \
                max(decision_interval, math.ceil(MAX_GAP_FACTOR * mean_interval))
        self.max_interval = max_interval
        self._min_exchange_rate = min(1.0, decision_interval / max(
            decision_interval, max_interval // decision_interval * decision_interval))
        per_due_step = cost.per_exchange * self._min_exchange_rate + cost.per_decision
        minimum = (cost.per_step + per_due_step / decision_interval) / full_bytes
        if share < minimum:
            raise InvalidOptionsError(
                f"--comm-budget {100 * share:g}%: below {100 * minimum:.3g}%, the cost of an exchange every "
                f"{max_interval} steps (--max-interval{' and --global-average-every' * bool(cost.per_step)})")
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
            remaining = (self._share * self._full_bytes - cost.per_step) * horizon - self._spent_bytes
            affordable = (remaining / HORIZON_STEPS * self._decision_interval - cost.per_decision) / max(
                cost.per_exchange, 1.0)
            self._log_factor += GAIN * (exchanged - min(1.0, max(self._min_exchange_rate, affordable)))
            self._log_factor = min(MAX_LOG_FACTOR, max(-MAX_LOG_FACTOR, self._log_factor))
