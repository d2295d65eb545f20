"""What a strategy is given, and what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.train.messages import Messages
from slurmdl.train.sgd import Sgd

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """This rank's part of a run.

    Attributes
    ----------
    messages : of this rank.
    workers, servers : ranks by role, each in rank order.
    parameters, gradients : shape (D,), the replica's flat buffers; parameters start alike on all ranks.
    lr, momentum : of SGD.
    seed : the same on all ranks.
    traffic : who sends what to whom, one of plan.PATTERNS of the strategy.
    zones : entry i is the leaf zone of rank i.
    """

    messages: Messages
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    parameters: FloatArray
    gradients: FloatArray
    lr: float
    momentum: float
    seed: int
    traffic: str
    zones: tuple[str, ...]

    def sgd(self) -> Sgd:
        """An optimizer for the whole of the parameters."""
        return Sgd(self.parameters.size, self.lr, self.momentum)


class Strategy(Protocol):
    """One rank's part in a strategy."""

    def step(self, number: int) -> None:
        """Turn the gradients of step `number` (from 0) into new parameters, by talking to the other ranks.

        A server, which has no gradients of its own, serves the workers' step of this number.
        """
