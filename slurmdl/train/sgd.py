"""Stochastic gradient descent with momentum on a flat buffer, or on a shard of one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class Sgd:
    """v = momentum v + g; x = x - lr v, in place, as torch.optim.SGD defines it (Sutskever et al. 2013)."""

    def __init__(self, size: int, lr: float, momentum: float) -> None:
        self.lr = np.float32(lr)
        self.momentum = np.float32(momentum)
        self._velocity: FloatArray = np.zeros(size, np.float32)
        self._step: FloatArray = np.zeros(size, np.float32)

    def update(self, parameters: FloatArray, gradients: FloatArray) -> None:
        """One step; both arrays have the shape (size,)."""
        self._velocity *= self.momentum
        self._velocity += gradients
        np.multiply(self._velocity, self.lr, out=self._step)
        parameters -= self._step
