"""Stubs of a model and an optimizer, to run the messages of strategies without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.strategies.strategy import ShardState


class PlainParameters:
    """Parameters without a network; see StrategyContext.relocate_parameters."""

    def __init__(self, parameters: npt.NDArray[np.float32]) -> None:
        self.parameters = parameters

    def relocate_parameters(self, memory: npt.NDArray[np.float32]) -> None:
        memory[:] = self.parameters
        self.parameters = memory


class NoOpOptimizer:
    """A ShardOptimizer that changes nothing."""

    def __call__(self, hyperparameters: Any) -> None:
        """Ignore the gradients."""

    def state_bytes(self) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)

    def load_state_bytes(self, state: npt.NDArray[np.uint8]) -> None:
        """Ignore the state."""

    def shard_states(self) -> list[ShardState]:
        return []

    def load_shard_states(self, states: Sequence[ShardState]) -> None:
        """Ignore the states."""
