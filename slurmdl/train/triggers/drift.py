"""An exchange when the local model has moved away from what it was at the last one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.train.kept import Kept
from slurmdl.train.method import Method
from slurmdl.train.mixing.moved import Moved
from slurmdl.train.triggers.budget import SILENCE, Budget, first_steps, paid
from slurmdl.train.triggers.trigger import Cost, Trigger

FloatArray = npt.NDArray[np.float32]

#: steps from one look at the drift to the next, of which ranks have half to agree: mostly, and where a budget pays
#: for more than that
CHECK, OFTEN = 4, 2
#: drift that asks for an exchange, where nothing else was said
THRESHOLD = 0.05
#: first steps with an exchange in each, where nothing was said
WARM_UP = 30


def warm_up(method: Method, parameters: int) -> int:
    """The first steps, with an exchange in each; alike on all ranks."""
    if method.warm_up is not None:
        return method.warm_up
    if method.comm_budget is None:
        return WARM_UP
    return min(WARM_UP, first_steps(paid(method.comm_budget, method.compress, parameters)))


def check(method: Method, parameters: int) -> int:
    """Steps from one look at the drift to the next; alike on all ranks."""
    often = method.comm_budget is not None and paid(method.comm_budget, method.compress, parameters) > 1 / CHECK
    return OFTEN if often else CHECK


class Drift(Kept, Trigger):
    """Asks for an exchange where |x - s| / |s| is above a threshold, x the model, s the model at the last exchange.

    The norms are estimated (Moved). The threshold is scaled with the learning rate: theta_t = theta_0
    eta_t / eta_0, eta_0 the largest rate so far, which leaves it as it is while a rate warms up. The first steps
    (`warm_up`) all end in an exchange, and no more than `silence` steps are left without one.

    References
    ----------
    N. Singh, D. Data, J. George, S. Diggavi: SPARQ-SGD: event-triggered and compressed communication in decentralized
    optimization. IEEE CDC 2020. arXiv:1910.14280
    """

    kept = ("_moved", "_peak", "_last", "_budget")

    def __init__(self, method: Method, parameters: FloatArray, sizes: Sequence[int], rate: Callable[[], float],
                 cost: Cost) -> None:
        self._warm_up, self._check = warm_up(method, parameters.size), check(method, parameters.size)
        self._rate = rate
        self._moved = Moved(parameters, sizes)
        self._threshold = THRESHOLD if method.threshold is None else method.threshold
        self._peak = 0.0
        self._last = -1
        self._silence = SILENCE if method.silence is None else method.silence
        self._budget = None
        if method.comm_budget is not None:
            self._budget = Budget(method.comm_budget, 4.0 * parameters.size, cost, self._check, method.silence)
            self._silence = self._budget.silence

    def next(self, number: int) -> int:
        if number + 1 < self._warm_up:
            return number + 1
        return self._warm_up + ((number + 1 - self._warm_up) // self._check + 1) * self._check - 1

    def sure(self, number: int) -> bool:
        return number < self._warm_up

    def look(self, due: int) -> int:
        return due - self._check // 2

    def urgency(self, due: int) -> float:
        if self.next(due) - self._last > self._silence:
            return math.inf
        return self._moved.far() / max(self.threshold(), 1e-12)

    def threshold(self) -> float:
        """The drift from which on an exchange is asked for now."""
        rate = self._rate()
        self._peak = max(self._peak, rate)
        scale = rate / self._peak if self._peak else 1.0
        return self._threshold * scale * (self._budget.factor if self._budget else 1.0)

    def settle(self, number: int, exchanged: bool) -> None:
        if exchanged:
            self._moved.mark()
            self._last = number
        if self._budget:
            self._budget.count(number, exchanged, self.sure(number))

    def joined(self, number: int) -> None:
        self._moved.mark()
        self._last = number
