"""Local SGD: workers train on their own for a while, then the mean of their changes moves the outer parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slurmdl.train.comm_budget import CommCost
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.mixing.collectives import bruck_allgather
from slurmdl.train.strategies.mean_reducers import make_mean_reducer
from slurmdl.train.strategies.strategy import StrategyContext
from slurmdl.train.strategies.triggered import TriggeredStrategy


class LocalSGD(TriggeredStrategy):
    """Outer momentum on the outer parameters z: u = mu u + mean(q), z += alpha (mean(q) + mu u), x = z.

    The pseudo-gradient q is the compressed change x - z, with error feedback. All workers exchange when the mean of
    their drifts reaches the threshold, or every period.

    References
    ----------
    A. Douillard et al.: DiLoCo: distributed low-communication training of language models. 2023. arXiv:2311.08105
    S. P. Karimireddy et al.: Error feedback fixes SignSGD. ICML 2019. arXiv:1901.09847
    """

    state_fields: tuple[str, ...] = ("_mean_reducer", "_outer_parameters", "_outer_momentum", "_residual")

    def __init__(self, ctx: StrategyContext) -> None:
        self._mean_reducer = make_mean_reducer(ctx)
        count = len(ctx.workers)
        allreduce_bytes = 8.0 * ctx.parameters.size * (count - 1) / count
        super().__init__(ctx, CommCost(self._mean_reducer.message_bytes, 4.0 * (count - 1), allreduce_bytes))
        self._outer_parameters = ctx.parameters.copy()
        self._outer_momentum = np.zeros_like(self._outer_parameters)
        self._residual = np.zeros_like(self._outer_parameters)
        self._feedback_decay = np.float32(COMPRESSORS[ctx.config.compression].feedback_decay)
        self._pseudo_gradient = np.empty_like(self._outer_parameters)

    def resume_from_average(self, state: Mapping[str, Any], step: int) -> None:
        super().resume_from_average(state, step)
        self._outer_parameters[:] = state["_outer_parameters"].numpy()
        self._outer_momentum[:] = state["_outer_momentum"].numpy()

    def decide(self, urgency: float) -> bool:
        # all workers gather the same values, and so decide equally
        return bool(bruck_allgather(self._ctx.p2p, self._ctx.workers, urgency).mean() >= 1)

    def exchange(self) -> bool:
        ctx, reducer, change = self._ctx, self._mean_reducer, self._pseudo_gradient
        rate, momentum = np.float32(ctx.config.outer_lr), np.float32(ctx.config.outer_momentum)
        np.subtract(ctx.parameters, self._outer_parameters, out=change)
        change += self._feedback_decay * self._residual
        ctx.comm_thread.call(lambda: reducer.reduce(change, self.exchange_index, ctx.relative_weights))
        np.subtract(change, reducer.contribution, out=self._residual)
        self._outer_momentum *= momentum
        self._outer_momentum += reducer.mean
        self._outer_parameters += rate * (reducer.mean + momentum * self._outer_momentum)
        ctx.parameters[:] = self._outer_parameters
        return True
