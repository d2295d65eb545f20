"""Local SGD: workers go their own way for a while, then the mean of their changes moves a common model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.mixing.votes import gathered
from slurmdl.train.strategies.means import mean
from slurmdl.train.strategies.strategy import Setting
from slurmdl.train.strategies.triggered import Triggered
from slurmdl.train.triggers import Cost


class LocalSgd(Triggered):
    """With momentum of the common model z: u = mu u + mean(q), z += alpha (mean(q) + mu u), x = z.

    q is the compressed change x - z, with what was left out of the one before. All workers exchange when the mean of
    their drifts reaches the threshold, or every period.

    References
    ----------
    A. Douillard et al.: DiLoCo: distributed low-communication training of language models. 2023. arXiv:2311.08105
    S. P. Karimireddy et al.: Error feedback fixes SignSGD. ICML 2019. arXiv:1901.09847
    """

    kept: tuple[str, ...] = ("_mean", "_common", "_speed", "_left_out")

    def __init__(self, setting: Setting) -> None:
        self._mean = mean(setting)
        count = len(setting.workers)
        once = 8.0 * setting.parameters.size * (count - 1) / count
        super().__init__(setting, Cost(self._mean.size, 4.0 * (count - 1), once))
        self._common = setting.parameters.copy()
        self._speed, self._left_out = np.zeros_like(self._common), np.zeros_like(self._common)
        self._feedback = np.float32(COMPRESSORS[setting.method.compress].feedback)
        self._change = np.empty_like(self._common)

    def renew(self, state: Mapping[str, Any], number: int) -> None:
        super().renew(state, number)
        self._common[:], self._speed[:] = state["_common"].numpy(), state["_speed"].numpy()

    def agree(self, urgency: float) -> bool:
        # all workers gather the same values, so that they decide alike
        return bool(gathered(self._its.messages, self._its.workers, urgency).mean() >= 1)

    def exchange(self) -> bool:
        its, made, change = self._its, self._mean, self._change
        rate, momentum = np.float32(its.method.outer_lr), np.float32(its.method.outer_momentum)
        np.subtract(its.parameters, self._common, out=change)
        change += self._feedback * self._left_out
        its.courier.do(lambda: made.run(change, self.turn, its.relative))
        np.subtract(change, made.counted, out=self._left_out)
        self._speed *= momentum
        self._speed += made.mean
        self._common += rate * (made.mean + momentum * self._speed)
        its.parameters[:] = self._common
        return True
