"""A threshold that sets itself so that the bytes stay within a budget."""

from __future__ import annotations

import math

from slurmdl.errors import BadOptions
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.kept import Kept
from slurmdl.train.triggers.trigger import Cost

#: how far log theta goes for an exchange too many
GAIN = 0.2
#: steps over which a surplus or a debt is spread
HORIZON = 200
#: log theta stays within this of its first value
LIMIT = math.log(1e4)
#: the most that the first steps take of what is paid for in HORIZON steps
FIRST = 0.25
#: how many times its mean the time without an exchange may be: where it has no bound, the few steps that are left
#: without one for long cost more accuracy on skewed data than those others are worth
REST = 2.5
#: longest time without an exchange, in steps, where nothing was said
SILENCE = 64


def paid(share: float, compress: str, parameters: int) -> float:
    """Exchanges per step that a budget pays for, as if all of it went into models, one in each exchange.

    What is the same on all ranks must follow from this: what else they send is not alike.
    """
    return min(1.0, share * 4 * parameters / COMPRESSORS[compress].size(parameters))


def first_steps(exchanges: float) -> int:
    """How many first steps, with an exchange in each, it pays for; `exchanges` as `paid` has them."""
    return int(FIRST * HORIZON * exchanges)


class Budget(Kept):
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

    kept = ("_spent", "_log")

    def __init__(self, share: float, full: float, cost: Cost, check: int, silence: int | None) -> None:
        left = share * full - cost.each - cost.check / check
        if silence is None:
            silence = min(SILENCE, max(check, math.ceil(REST * cost.exchange / left))) if left > 0 else SILENCE
        self.silence = silence
        self._least = min(1.0, check / max(check, silence // check * check))
        floor = (cost.each + (cost.exchange * self._least + cost.check) / check) / full
        if share < floor:
            raise BadOptions(f"--comm-budget {100 * share:g}%: below {100 * floor:.3g}%, which an exchange every "
                          f"{silence} steps (--silence{' and --global-every' * bool(cost.each)}) needs in any case")
        self._share, self._full, self._cost, self._check = share, full, cost, check
        self._spent = cost.once
        self._log = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def count(self, number: int, exchanged: bool, sure: bool) -> None:
        """Add what step `number` has cost, and move the threshold unless the step was sure to exchange."""
        self._spent += self._cost.exchange * exchanged + self._cost.check * (not sure)
        if not sure:
            after = number + 1 + HORIZON
            left = (self._share * self._full - self._cost.each) * after - self._spent
            wanted = (left / HORIZON * self._check - self._cost.check) / max(self._cost.exchange, 1.0)
            self._log += GAIN * (exchanged - min(1.0, max(self._least, wanted)))
            self._log = min(LIMIT, max(-LIMIT, self._log))
