"""Allreduce: every worker updates with the mean of all gradients, so all replicas stay the same."""

from __future__ import annotations

import numpy as np

from slurmdl.train.strategies.strategy import Setting
from slurmdl.train.sums import Sum, by_zone


class Allreduce:
    """Equal to one process on the workers' batches together; traffic `ring` or `hierarchical`."""

    def __init__(self, setting: Setting) -> None:
        self._its = setting
        self._sgd = setting.sgd()
        # in rank-map order a ring enters each zone once
        groups = by_zone(setting.workers, setting.zones) if setting.traffic == "hierarchical" else [setting.workers]
        self._sum = Sum(setting.messages, groups, setting.gradients)

    def step(self, number: int) -> None:
        its, gradients = self._its, self._its.gradients
        self._sum.run()
        gradients /= np.float32(len(its.workers))
        self._sgd.update(its.parameters, gradients)
