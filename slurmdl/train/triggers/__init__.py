"""When the replicas exchange.

A new trigger is one file here, one line in TRIGGERS, and its name in method.TRIGGERS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.train.method import Method
from slurmdl.train.triggers.drift import Drift
from slurmdl.train.triggers.period import Period
from slurmdl.train.triggers.trigger import Cost, Trigger

__all__ = ["TRIGGERS", "Cost", "Trigger"]

Make = Callable[[Method, npt.NDArray[np.float32], Sequence[int], Callable[[], float], Cost], Trigger]

#: name -> what makes it from the method, the parameters, the sizes of their tensors, the learning rate and the bytes
TRIGGERS: dict[str, Make] = {
    "period": lambda method, parameters, sizes, rate, cost: Period(method.every),
    "drift": Drift,
}
