"""Synchronous parameter server: workers push gradients, each server updates its shard, workers pull it back."""

from __future__ import annotations

import numpy as np

from slurmdl.train.messages import bounds
from slurmdl.train.strategies.strategy import Setting, Strategy


def ps(setting: Setting) -> Strategy:
    """This rank's part: equal, all together, to one process on the workers' batches together.

    References
    ----------
    M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.
    """
    return Server(setting) if setting.messages.rank in setting.servers else Worker(setting)


class Worker(Strategy):
    """Sends each server its shard of the gradients and receives that shard of the parameters."""

    updates = False

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        edge = bounds(setting.parameters.size, len(setting.servers))
        shards = [(server, slice(edge[i], edge[i + 1])) for i, server in enumerate(setting.servers)]
        self._push = [(server, setting.gradients[shard]) for server, shard in shards]
        self._pull = [(server, setting.parameters[shard]) for server, shard in shards]

    def before_update(self, number: int) -> None:
        self._its.courier.do(lambda: self._its.messages.exchange(self._push, self._pull))
        self.fired += 1


class Server(Strategy):
    """Holds one shard of the parameters and the optimizer's state that belongs to it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        edge = bounds(setting.parameters.size, len(setting.servers))
        place = setting.servers.index(setting.messages.rank)
        part = slice(edge[place], edge[place + 1])
        self._gradients, shard = setting.gradients[part], setting.parameters[part]
        self._pushed = np.empty((len(setting.workers), shard.size), np.float32)
        self._update = setting.updater(part)
        self._from = list(zip(setting.workers, self._pushed, strict=True))
        self._to = [(worker, shard) for worker in setting.workers]

    def serve(self, number: int) -> None:
        its = self._its
        its.courier.do(lambda: its.messages.exchange([], self._from))
        np.mean(self._pushed, axis=0, out=self._gradients)
        self._update()
        its.courier.do(lambda: its.messages.exchange(self._to, []))
