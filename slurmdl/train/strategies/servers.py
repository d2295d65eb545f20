"""Parameter servers in step: workers push gradients, each server updates its shard, workers pull it back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from slurmdl.train.messages import bounds
from slurmdl.train.strategies.pieces import Piece, gathered
from slurmdl.train.strategies.spares import EVERY, Spares
from slurmdl.train.strategies.strategy import Setting, Strategy

#: elements that are dealt out to servers at a time (4 MB)
BLOCK = 1 << 20
#: from here on the first number of a worker's header is that of a checkpoint
CALL = 2


def shards(setting: Setting) -> list[slice]:
    """The part of the parameters that each server holds, in their order.

    Contiguous blocks are dealt out by the speed of the servers' links to the workers, as the plan's costs tell it;
    servers of one node share its link. Where nothing is known, all get as much.
    """
    nodes, zones = setting.nodes, setting.zones
    costs = [np.mean([setting.costs.get("|".join(sorted((zones[server], zones[worker]))), np.nan)
                      for worker in setting.workers]) for server in setting.servers]
    if not setting.costs or not np.all(np.isfinite(costs)):
        speed = np.ones(len(costs))
    else:
        beside = [sum(nodes[other] == nodes[server] for other in setting.servers) for server in setting.servers]
        speed = 1 / (np.maximum(costs, 1e-30) * beside)
    return cut(setting.parameters.size, speed.tolist())


def cut(size: int, speeds: Sequence[float]) -> list[slice]:
    """Parts of `size` elements in proportion to some speeds, of whole blocks where each has one."""
    if len(set(speeds)) == 1:
        edge = bounds(size, len(speeds))
    else:
        share = np.cumsum(speeds) / sum(speeds)
        edge = [0, *np.rint(size * share).astype(int).tolist()]
    if size >= len(speeds) * BLOCK:
        edge = [round(border / BLOCK) * BLOCK for border in edge[:-1]] + [size]
    return [slice(begin, end) for begin, end in pairwise(edge)]


def aggregation(setting: Setting, parts: Sequence[slice]) -> tuple[float, float]:
    """Shares of the bytes between workers and servers that stay within nodes, and within leaf zones, 0 to 1."""
    node = zone = 0
    for server, part in zip(setting.servers, parts, strict=True):
        for worker in setting.workers:
            beside = setting.nodes[server] == setting.nodes[worker]
            node += beside * (part.stop - part.start)
            zone += (beside or "" != setting.zones[server] == setting.zones[worker]) * (part.stop - part.start)
    whole = max(1, setting.parameters.size * len(setting.workers))
    return node / whole, zone / whole


class Worker(Strategy):
    """Sends each server its shard of the gradients and receives that shard of the parameters.

    Before the gradients goes a header: 1 and the numbers of the worker's optimizer, whose schedules so reach the
    servers, or 0 where the worker has made its last step, or CALL and a number where the servers are to make that
    checkpoint with the workers.
    """

    updates = False
    in_step = alike = from_mean = True
    tag = 0

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        its = shards(setting)
        self.aggregation = aggregation(setting, its)
        parts = list(zip(setting.servers, its, strict=True))
        self._header = np.zeros(1 + setting.numbers().size)
        self._heads = [(server, self._header) for server in setting.servers]
        self._push = [(server, setting.gradients[part]) for server, part in parts]
        self._pull = [(server, setting.parameters[part]) for server, part in parts]

    def before_update(self, number: int) -> None:
        self._header[0], self._header[1:] = 1, self._its.numbers()
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads + self._push, self._pull, self.tag))
        self.fired += 1

    def pause(self, number: int) -> None:
        self._header[0] = CALL + number
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads, [], self.tag))

    def finish(self) -> None:
        self._header[0] = 0
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads, []))


class Holder(Strategy):
    """A server's shard of the parameters, and the optimizer's state that belongs to it.

    Parameters
    ----------
    every : updates from one copy of the shard on another server to the next.

    Attributes
    ----------
    part : of the parameters, which it holds.
    spares : the copies that servers hold of each other.
    """

    updates = False
    alike = True

    def __init__(self, setting: Setting, every: int) -> None:
        super().__init__(setting)
        parts = shards(setting)
        self.part = part = parts[setting.servers.index(setting.messages.rank)]
        self.aggregation = aggregation(setting, parts)
        self._gradients, self._shard = setting.gradients[part], setting.parameters[part]
        self._update = setting.updater(part)
        self.spares = Spares(setting, part, self._update, every)

    def pieces(self) -> dict[str, list[Piece]]:
        """The shard, and what its optimizer remembers."""
        import torch

        shard = {"parameters": torch.from_numpy(self._shard), **self._further()}
        return {"shard": [(self.part.start, self.part.stop, shard)], "optimizer": self._update.pieces()}

    def fill(self, shards: Sequence[Piece], memory: Sequence[Piece]) -> None:
        """Take up shards of servers that may have been others, and what their optimizers remember."""
        self._shard[:] = gathered(shards, self.part)["parameters"].numpy()
        self._update.fill(memory)

    def _further(self) -> dict[str, Any]:
        """Tensors as long as the shard, by name."""
        return {}


class Server(Holder):
    """Updates its shard with the mean of what all workers push, in step with them.

    Equal, all together, to one process on the workers' batches together.

    References
    ----------
    M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.
    """

    in_step = from_mean = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, EVERY)
        self._pushed = {worker: np.empty_like(self._shard) for worker in setting.workers}
        self._headers = {worker: np.ones(1 + setting.numbers().size) for worker in setting.workers}

    def serve(self, number: int) -> bool:
        its = self._its
        its.courier.do(lambda: its.messages.exchange([], list(self._headers.items())))
        word = int(next(iter(self._headers.values()))[0])
        if word >= CALL:
            self.called = word - CALL
            return True
        for worker in [worker for worker, header in self._headers.items() if not header[0]]:
            del self._headers[worker], self._pushed[worker]
        if not self._headers:
            return False
        its.courier.do(lambda: its.messages.exchange([], list(self._pushed.items())))
        np.mean(list(self._pushed.values()), axis=0, out=self._gradients)
        self._update(next(iter(self._headers.values()))[1:])
        its.courier.do(lambda: its.messages.exchange([(worker, self._shard) for worker in self._pushed], []))
        self.spares.after(number + 1)
        return True
