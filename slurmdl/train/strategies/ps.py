"""Synchronous parameter server: workers push gradients, each server updates its shard, workers pull it back."""

from __future__ import annotations

import numpy as np

from slurmdl.train.messages import bounds
from slurmdl.train.strategies.strategy import Setting, Strategy


def ps(setting: Setting) -> Strategy:
    """This rank's part: equal, all together, to one process on the workers' batches together.

    Before the gradients goes a header: 1 and the numbers of the worker's optimizer, whose schedules so reach the
    servers, or 0 where the worker has made its last step.

    References
    ----------
    M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.
    """
    return Server(setting) if setting.messages.rank in setting.servers else Worker(setting)


class Worker(Strategy):
    """Sends each server its shard of the gradients and receives that shard of the parameters."""

    updates = False
    in_step = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        edge = bounds(setting.parameters.size, len(setting.servers))
        shards = [(server, slice(edge[i], edge[i + 1])) for i, server in enumerate(setting.servers)]
        self._header = np.zeros(1 + setting.numbers().size)
        self._heads = [(server, self._header) for server in setting.servers]
        self._push = [(server, setting.gradients[shard]) for server, shard in shards]
        self._pull = [(server, setting.parameters[shard]) for server, shard in shards]

    def before_update(self, number: int) -> None:
        self._header[0], self._header[1:] = 1, self._its.numbers()
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads + self._push, self._pull))
        self.fired += 1

    def finish(self) -> None:
        self._header[0] = 0
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads, []))


class Server(Strategy):
    """Holds one shard of the parameters and the optimizer's state that belongs to it."""

    in_step = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        edge = bounds(setting.parameters.size, len(setting.servers))
        place = setting.servers.index(setting.messages.rank)
        part = slice(edge[place], edge[place + 1])
        self._gradients, self._shard = setting.gradients[part], setting.parameters[part]
        self._pushed = {worker: np.empty_like(self._shard) for worker in setting.workers}
        self._headers = {worker: np.ones(1 + setting.numbers().size) for worker in setting.workers}
        self._update = setting.updater(part)

    def serve(self, number: int) -> bool:
        its = self._its
        its.courier.do(lambda: its.messages.exchange([], list(self._headers.items())))
        for worker in [worker for worker, header in self._headers.items() if not header[0]]:
            del self._headers[worker], self._pushed[worker]
        if not self._headers:
            return False
        its.courier.do(lambda: its.messages.exchange([], list(self._pushed.items())))
        np.mean(list(self._pushed.values()), axis=0, out=self._gradients)
        self._update(next(iter(self._headers.values()))[1:])
        its.courier.do(lambda: its.messages.exchange([(worker, self._shard) for worker in self._pushed], []))
        return True
