"""Synchronous parameter server: workers push gradients, each server updates its shard, workers pull it back."""

from __future__ import annotations

import numpy as np

from slurmdl.train.messages import bounds
from slurmdl.train.sgd import Sgd
from slurmdl.train.strategies.strategy import Setting, Strategy


def ps(setting: Setting) -> Strategy:
    """This rank's part: equal, all together, to one process on the workers' batches together.

    References
    ----------
    M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.
    """
    return Server(setting) if setting.messages.rank in setting.servers else Worker(setting)


class Worker:
    """Sends each server its shard of the gradients and receives that shard of the parameters."""

    def __init__(self, setting: Setting) -> None:
        edge = bounds(setting.parameters.size, len(setting.servers))
        shards = [(server, slice(edge[i], edge[i + 1])) for i, server in enumerate(setting.servers)]
        self._messages = setting.messages
        self._push = [(server, setting.gradients[shard]) for server, shard in shards]
        self._pull = [(server, setting.parameters[shard]) for server, shard in shards]

    def step(self, number: int) -> None:
        self._messages.exchange(self._push, self._pull)


class Server:
    """Holds one shard of the parameters and the momentum that belongs to it."""

    def __init__(self, setting: Setting) -> None:
        edge = bounds(setting.parameters.size, len(setting.servers))
        place = setting.servers.index(setting.messages.rank)
        self._messages = setting.messages
        self._shard = setting.parameters[edge[place]:edge[place + 1]]
        self._pushed = np.empty((len(setting.workers), self._shard.size), np.float32)
        self._sgd = Sgd(self._shard.size, setting.lr, setting.momentum)
        self._from = list(zip(setting.workers, self._pushed, strict=True))
        self._to = [(worker, self._shard) for worker in setting.workers]

    def step(self, number: int) -> None:
        self._messages.exchange([], self._from)
        self._sgd.update(self._shard, self._pushed.mean(0))
        self._messages.exchange(self._to, [])
