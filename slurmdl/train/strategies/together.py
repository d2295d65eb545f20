"""Strategies in which all workers exchange at once, now and then."""

from __future__ import annotations

from slurmdl.train.mixing.votes import gathered
from slurmdl.train.strategies.means import mean
from slurmdl.train.strategies.strategy import Setting
from slurmdl.train.strategies.triggered import Triggered
from slurmdl.train.triggers import Cost


class Together(Triggered):
    """All exchange when they are asked to in the mean: all hear what each says, and so decide alike."""

    kept: tuple[str, ...] = ("_mean",)

    def __init__(self, setting: Setting) -> None:
        self._mean = mean(setting)
        count = len(setting.workers)
        once = 8.0 * setting.parameters.size * (count - 1) / count
        super().__init__(setting, Cost(self._mean.size, 4.0 * (count - 1), once))

    def agree(self, urgency: float) -> bool:
        return bool(gathered(self._its.messages, self._its.workers, urgency).mean() >= 1)
