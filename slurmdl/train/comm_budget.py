"""A threshold that sets itself so that the bytes stay within a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurmdl.errors import InvalidOptionsError
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.stateful import Stateful

#: how far log theta goes for an exchange too many
GAIN = 0.2
#: steps over which a surplus or a debt is spread
HORIZON_STEPS = 200
#: log theta stays within this of its first value
MAX_LOG_FACTOR = math.log(1e4)
#: the most that the first steps take of what is paid for in HORIZON steps
WARMUP_SHARE = 0.25
#: how many times its mean the time without an exchange may be: where it has no bound, the few steps that are left
#: without one for long cost more accuracy on skewed data than those others are worth
MAX_GAP_FACTOR = 2.5
#: longest time without an exchange, in steps, where nothing was said
MAX_INTERVAL = 64


def affordable_rate(share: float, compression: str, num_parameters: int) -> float:
    """Exchanges per step that a budget pays for, as if all of it went into models, one in each exchange.

    What is the same on all ranks must follow from this: what else they send is not alike.
    """
    return min(1.0, share * 4 * num_parameters / COMPRESSORS[compression].packed_bytes(num_parameters))


def affordable_warmup(exchange_rate: float) -> int:
    """How many first steps, with an exchange in each, it pays for; `exchanges` as `paid` has them."""
    return int(WARMUP_SHARE * HORIZON_STEPS * exchange_rate)


class CommBudget(Stateful):
    """Moves the threshold after each due step: log theta += GAIN (exchanged - wanted).

    The budget is a share of what fp32 gossip at every step sends, and all counts: exchanges with their headers, what
    ranks tell each other to agree, the first steps and the final average. What is wanted is what is left of the
    budget for the next HORIZON steps.

    Parameters
    ----------
    share : of `full`.
    full : bytes per step of fp32 gossip at every step.
    cost : of this rank; its exchanges may cost nothing where it is alone.
    check : steps from one due step to the next.
    silence : longest time without an exchange, in steps, where one was asked for; else it is REST times the mean one,
        at most SILENCE.

    Attributes
    ----------
    factor : what the first threshold is to be multiplied with.
    silence : longest time without an exchange, in steps.

    Raises
    ------
    BadOptions : a budget below what `silence` forces.
    """

    state_fields = ("_spent", "_log")

    def __init__(self, share: float, full_bytes: float, cost: CommCost,
                 decision_interval: int, max_interval: int | None) -> None:
        left = share * full_bytes - cost.per_step - cost.per_decision / decision_interval
        if max_interval is None:
            max_interval = min(
    MAX_INTERVAL, max(
        decision_interval, math.ceil(
            MAX_GAP_FACTOR * cost.per_exchange / left))) if left > 0 else MAX_INTERVAL
        self.max_interval = max_interval
        self._min_exchange_rate = min(1.0, decision_interval / max(decision_interval,
                                      max_interval // decision_interval * decision_interval))
        floor = (cost.per_step + (cost.per_exchange * self._min_exchange_rate + \
                 cost.per_decision) / decision_interval) / full_bytes
        if share < floor:
            raise InvalidOptionsError(f"--comm-budget {100 * share:g}%: below {100 * floor:.3g}%, which an exchange every "
                          f"{max_interval} steps (--silence{' and --global-every' * bool(cost.per_step)}) needs in any case")
        self._share, self._full_bytes, self._cost, self._decision_interval = share, full_bytes, cost, decision_interval
        self._spent_bytes = cost.one_off
        self._log_factor = 0.0

    @property
    def threshold_factor(self) -> float:
        return math.exp(self._log_factor)

    def update(self, step: int, exchanged: bool, unconditional: bool) -> None:
        """Add what step `number` has cost, and move the threshold unless the step was sure to exchange."""
        self._spent_bytes += self._cost.per_exchange * exchanged + self._cost.per_decision * (not unconditional)
        if not unconditional:
            after = step + 1 + HORIZON_STEPS
            left = (self._share * self._full_bytes - self._cost.per_step) * after - self._spent_bytes
            wanted = (left / HORIZON_STEPS * self._decision_interval - \
                      self._cost.per_decision) / max(self._cost.per_exchange, 1.0)
            self._log_factor += GAIN * (exchanged - min(1.0, max(self._min_exchange_rate, wanted)))
            self._log_factor = min(MAX_LOG_FACTOR, max(-MAX_LOG_FACTOR, self._log_factor))


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
