"""Gossip: every worker updates by itself, then averages its parameters with those of one other."""

from __future__ import annotations

import numpy as np

from slurmdl.train.graphs import GRAPHS
from slurmdl.train.strategies.strategy import Setting, Strategy


class Gossip(Strategy):
    """The mean of two models in every step, whose the traffic says (see graphs); keeps the sum of the models.

    References
    ----------
    X. Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017. arXiv:1705.09056
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._graph = GRAPHS[setting.method.traffic or ""]
        self._place = setting.place
        self._theirs = np.empty_like(setting.parameters)

    def after_update(self, number: int) -> None:
        its, mine = self._its, self._its.parameters
        target = self._graph(len(its.workers), its.seed, number)
        to, source = int(target[self._place]), int(np.flatnonzero(target == self._place)[0])
        if to == self._place:
            return
        sent, received = (its.workers[to], mine), (its.workers[source], self._theirs)
        its.courier.do(lambda: its.messages.exchange([sent], [received]))
        mine += self._theirs
        mine *= np.float32(0.5)
        self.fired += 1
