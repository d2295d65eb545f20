"""Elastic averaging: workers are drawn towards a common centre, and draw it towards them."""

from __future__ import annotations

import numpy as np

from slurmdl.train.strategies.strategy import Setting
from slurmdl.train.strategies.together import Together

#: how far the centre goes towards the mean of the workers
PULL = 0.9


class Elastic(Together):
    """x_i -= a q_i and z += a sum(q), q_i the compressed distance x_i - z and a = PULL / n.

    The centre z is on every worker, and the same there. What is left out of a distance is in the next one.

    References
    ----------
    S. Zhang, A. Choromanska, Y. LeCun: Deep learning with elastic averaging SGD. NeurIPS 2015. arXiv:1412.6651
    """

    kept: tuple[str, ...] = ("centre",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.centre = setting.parameters.copy()
        self._distance = np.empty_like(self.centre)

    def exchange(self) -> bool:
        its, made, distance = self._its, self._mean, self._distance
        np.subtract(its.parameters, self.centre, out=distance)
        its.courier.do(lambda: made.run(distance, self.turn, its.relative))
        parameters = its.parameters
        parameters -= np.float32(PULL / len(its.workers)) * made.counted
        self.centre += np.float32(PULL) * made.mean
        return True
