"""Allreduce: every worker updates with the mean of all gradients, so all replicas stay the same."""

from __future__ import annotations

import numpy as np

from slurmdl.train.strategies.strategy import Setting, Strategy
from slurmdl.train.sums import Sum, by_zone


class Allreduce(Strategy):
    """Equal to one process on the workers' batches together; traffic `ring` or `hierarchical`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        # in rank-map order a ring enters each zone once
        hierarchical = setting.method.traffic == "hierarchical"
        groups = by_zone(setting.workers, setting.zones) if hierarchical else [setting.workers]
        self._sum = Sum(setting.messages, groups, setting.gradients)

    def before_update(self, number: int) -> None:
        self._its.courier.do(self._sum.run)
        gradients = self._its.gradients
        gradients /= np.float32(len(self._its.workers))
        self.fired += 1
