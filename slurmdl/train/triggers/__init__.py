"""When the replicas exchange.

A new trigger is one file here, one line in TRIGGERS, and its name in method.TRIGGERS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.train.method import StrategyConfig
from slurmdl.train.triggers.drift import DriftTrigger
from slurmdl.train.triggers.period import PeriodTrigger
from slurmdl.train.triggers.trigger import CommCost, Trigger

__all__ = ["TRIGGERS", "CommCost", "Trigger"]

TriggerFactory = Callable[[StrategyConfig, npt.NDArray[np.float32],
    Sequence[int], Callable[[], float], CommCost], Trigger]

#: name -> what makes it from the method, the parameters, the sizes of their tensors, the learning rate and the bytes
TRIGGERS: dict[str, TriggerFactory] = {
    "period": lambda method, parameters, sizes, rate, cost: PeriodTrigger(method.exchange_period),
    "drift": DriftTrigger,
}
