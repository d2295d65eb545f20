"""Gossip: every worker updates by itself, then averages its parameters with those of one other."""

from __future__ import annotations

import numpy as np

from slurmdl.train.graphs import GRAPHS, Members
from slurmdl.train.strategies.strategy import Setting, Strategy


class Gossip(Strategy):
    """The mean of two models in every step, whose the traffic says (see graphs); keeps the sum of the models.

    References
    ----------
    X. Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017. arXiv:1705.09056
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        zones = [setting.zones[worker] for worker in setting.workers]
        self._graph = GRAPHS[setting.method.traffic or ""](Members(zones, setting.seed, setting.costs))
        self._place = setting.place
        self._theirs = np.empty_like(setting.parameters)

    def after_update(self, number: int) -> None:
        its, mine = self._its, self._its.parameters
        turn = self._graph.round(number)
        to, source = int(turn.target[self._place]), int(turn.source[self._place])
        if to == self._place:
            return
        sent, received = (its.workers[to], mine), (its.workers[source], self._theirs)
        its.courier.do(lambda: its.messages.exchange([sent], [received]))
        weight = np.float32(turn.weight[self._place])
        mine *= 1 - weight
        self._theirs *= weight
        mine += self._theirs
        self.fired += 1
