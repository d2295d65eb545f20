"""Stand-ins for a model and an optimizer in tests of messages alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.strategies.strategy import ShardState


class PlainParameters:
    """Parameters without a network; see strategies.strategy.Setting.settle."""

    def __init__(self, parameters: npt.NDArray[np.float32]) -> None:
        self.parameters = parameters

    def settle(self, memory: npt.NDArray[np.float32]) -> None:
        memory[:] = self.parameters
        self.parameters = memory


class NoOpOptimizer:
    """An optimizer that changes nothing; see strategies.strategy.Update."""

    def __call__(self, numbers: Any) -> None:
        """Ignore the gradients."""

    def state(self) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)

    def restore(self, state: npt.NDArray[np.uint8]) -> None:
        """Ignore the state."""

    def pieces(self) -> list[ShardState]:
        return []

    def fill(self, pieces: Sequence[ShardState]) -> None:
        """Ignore the pieces."""
