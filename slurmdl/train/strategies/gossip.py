"""Gossip: every worker updates by itself, then averages its parameters with one random partner."""

from __future__ import annotations

import numpy as np

from slurmdl.train.strategies.strategy import Setting


def partner(place: int, count: int, seed: int, step: int) -> int | None:
    """The partner of worker `place` out of `count` in a step, None for the one left over of an odd count.

    A random permutation paired off: every worker draws the same one, so that nothing need be agreed on.
    """
    order = np.random.default_rng((seed, step)).permutation(count)
    at = int(np.flatnonzero(order == place)[0])
    other = at ^ 1
    return int(order[other]) if other < count else None


class Gossip:
    """Pairwise averaging on a random matching per step; keeps the sum of the models.

    References
    ----------
    S. Boyd, A. Ghosh, B. Prabhakar, D. Shah: Randomized gossip algorithms. IEEE Trans. Inf. Theory 52 (2006).
    doi:10.1109/TIT.2006.874516
    X. Lian et al.: Can decentralized algorithms outperform centralized algorithms? NeurIPS 2017. arXiv:1705.09056
    """

    def __init__(self, setting: Setting) -> None:
        self._its = setting
        self._sgd = setting.sgd()
        self._theirs = np.empty_like(setting.parameters)

    def step(self, number: int) -> None:
        its, mine = self._its, self._its.parameters
        self._sgd.update(mine, its.gradients)
        place = partner(its.workers.index(its.messages.rank), len(its.workers), its.seed, number)
        if place is None:
            return
        peer = its.workers[place]
        its.messages.exchange([(peer, mine)], [(peer, self._theirs)])
        mine += self._theirs
        mine *= np.float32(0.5)
