"""Gossip: every worker updates by itself, then averages its parameters with those of one other."""

from __future__ import annotations

import numpy as np

from slurmdl.train.graphs import GRAPHS
from slurmdl.train.strategies.strategy import Setting


class Gossip:
    """The mean of two models in every step, whose the traffic says (see graphs); keeps the sum of the models.

    References
    ----------
    X. Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017. arXiv:1705.09056
    """

    def __init__(self, setting: Setting) -> None:
        self._its = setting
        self._sgd = setting.sgd()
        self._graph = GRAPHS[setting.traffic]
        self._place = setting.workers.index(setting.messages.rank)
        self._theirs = np.empty_like(setting.parameters)

    def step(self, number: int) -> None:
        its, mine = self._its, self._its.parameters
        self._sgd.update(mine, its.gradients)
        target = self._graph(len(its.workers), its.seed, number)
        to, source = int(target[self._place]), int(np.flatnonzero(target == self._place)[0])
        if to == self._place:
            return
        its.messages.exchange([(its.workers[to], mine)], [(its.workers[source], self._theirs)])
        mine += self._theirs
        mine *= np.float32(0.5)
