"""Allreduce: every worker updates with the mean of all gradients, so all replicas stay the same."""

from __future__ import annotations

import numpy as np

from slurmdl.train.messages import ring_sum
from slurmdl.train.strategies.strategy import Setting


class Allreduce:
    """Equal to one process on the workers' batches together."""

    def __init__(self, setting: Setting) -> None:
        self._its = setting
        self._sgd = setting.sgd()

    def step(self, number: int) -> None:
        its, gradients = self._its, self._its.gradients
        ring_sum(its.messages, its.workers, gradients)
        gradients /= np.float32(len(its.workers))
        self._sgd.update(its.parameters, gradients)
