"""Parameter servers in step: workers push gradients, each server updates its shard, workers pull it back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.messages import bounds
from slurmdl.train.strategies.pieces import Piece, gathered
from slurmdl.train.strategies.spares import EVERY, Home, Shard, Spares, following, rebuild
from slurmdl.train.strategies.strategy import FloatArray, Setting, Strategy

#: elements that are dealt out to servers at a time (4 MB)
BLOCK = 1 << 20
#: from here on the first number of a worker's header is that of a checkpoint
CALL = 2
#: in its place: the gradients that follow have overflowed, and are left out
SKIPS = -1


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


def settled(setting: Setting) -> list[Home]:
    """The shards of the parameters with their servers, in their order."""
    return [Home(server, part) for server, part in zip(setting.servers, shards(setting), strict=True)]


def moved(homes: Sequence[Home], before: Sequence[int], servers: Sequence[int]) -> list[Home]:
    """The same shards where of the servers `before` only `servers` are left: those of a lost one go to the next."""
    return [home if home.server in servers else Home(following(home.server, before, servers), home.part)
            for home in homes]


def aggregation(setting: Setting, homes: Sequence[Home]) -> tuple[float, float]:
    """Shares of the bytes between workers and servers that stay within nodes, and within leaf zones, 0 to 1."""
    node = zone = 0
    for home in homes:
        server, size = home.server, home.part.stop - home.part.start
        for worker in setting.workers:
            beside = setting.nodes[server] == setting.nodes[worker]
            node += beside * size
            zone += (beside or "" != setting.zones[server] == setting.zones[worker]) * size
    whole = max(1, setting.parameters.size * len(setting.workers))
    return node / whole, zone / whole


def mean(vectors: Sequence[FloatArray], out: FloatArray) -> None:
    """Write the mean of vectors into `out`, bit for bit as np.mean does, but without a copy of all of them."""
    out[:] = vectors[0]
    for vector in vectors[1:]:
        out += vector
    out /= np.float32(len(vectors))


class Worker(Strategy):
    """Sends each server its shard of the gradients and receives that shard of the parameters.

    Before the gradients goes a header: 1, or SKIPS, and the numbers of the worker's optimizer, whose schedules so
    reach the servers, or 0 where the worker has made its last step, or CALL and a number where the servers are to
    make that checkpoint with the workers.

    Parameters
    ----------
    homes : the shards; None for those of all servers of the setting.
    """

    updates = False
    in_step = alike = survives = True
    tag = 0

    def __init__(self, setting: Setting, homes: Sequence[Home] | None = None) -> None:
        super().__init__(setting)
        self._homes = homes or settled(setting)
        self.aggregation = aggregation(setting, self._homes)
        self._header = np.zeros(1 + setting.numbers().size)
        self._heads = [(server, self._header) for server in setting.servers]
        self._push = [(home.server, setting.gradients[home.part]) for home in self._homes]
        self._pull = [(home.server, setting.parameters[home.part]) for home in self._homes]

    def without(self, setting: Setting) -> Strategy:
        return type(self)(setting, moved(self._homes, self._its.servers, setting.servers))

    def before_update(self, number: int, skips: bool = False) -> None:
        self._header[0], self._header[1:] = SKIPS if skips else 1, self._its.numbers()
        if not skips:
            self._its.copies.fetch_gradients(slice(None))()
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads + self._push, self._pull, self.tag))
        self.fired += 1

    def pause(self, number: int) -> None:
        self._header[0] = CALL + number
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads, [], self.tag))

    def finish(self) -> None:
        self._header[0] = 0
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads, []))


class Holder(Strategy):
    """A server's shards of the parameters, and the state of the optimizer that belongs to them: one shard, but more
    where others are lost.

    Parameters
    ----------
    homes : all shards; None for those of all servers of the setting.
    own : this server's shards; None where it begins with that of the parameters as they are.

    Attributes
    ----------
    spares : the copies that servers hold of each other.
    """

    updates = False
    alike = survives = True

    def __init__(self, setting: Setting, homes: Sequence[Home] | None = None,
                 own: Sequence[Shard] | None = None) -> None:
        super().__init__(setting)
        self._homes = homes or settled(setting)
        mine = [home.part for home in self._homes if home.server == setting.messages.rank]
        self._own = own or [Shard(part, setting.updater(part)) for part in mine]
        self.aggregation = aggregation(setting, self._homes)
        self.spares = Spares(setting, self._homes, self._own, self._copied())

    def _copied(self) -> int:
        """Updates from one copy of the shards on another server to the next."""
        return EVERY

    def _rooms(self) -> list[FloatArray]:
        """Memory for what a worker pushes or pulls."""
        return [self._its.parameters[shard.part].copy() for shard in self._own]

    def without(self, setting: Setting) -> Strategy:
        homes = moved(self._homes, self._its.servers, setting.servers)
        kept = {shard.part.start: shard for shard in self._own}
        own = [kept.get(home.part.start) or self._rebuilt(home, setting)
               for home in homes if home.server == setting.messages.rank]
        return type(self)(setting, homes, own)

    def _rebuilt(self, home: Home, setting: Setting) -> Shard:
        spare = self.spares.held.get(home.part.start)
        if spare is None:
            lost = next(its.server for its in self._homes if its.part == home.part)
            raise TrainError(f"no copy of the shard of rank {lost} on {setting.nodes[lost]}, which is lost; a server "
                             f"gives the next one a copy every {EVERY} steps")
        return Shard(home.part, rebuild(spare, setting))

    @property
    def parts(self) -> list[slice]:
        """The parts of the parameters that it holds."""
        return [shard.part for shard in self._own]

    def pieces(self) -> dict[str, list[Piece]]:
        """The shards, and what their optimizers remember."""
        import torch

        return {"shard": [(part.start, part.stop, {"parameters": torch.from_numpy(self._its.parameters[part])})
                          for part in self.parts],
                "optimizer": [piece for shard in self._own for piece in shard.update.pieces()]}

    def fill(self, shards: Sequence[Piece], memory: Sequence[Piece]) -> None:
        """Take up shards of servers that may have been others, and what their optimizers remember."""
        for shard in self._own:
            self._its.parameters[shard.part] = gathered(shards, shard.part)["parameters"].numpy()
            shard.update.fill(memory)


class Server(Holder):
    """Updates its shard with the mean of what all workers push, in step with them; those that skip are left out.

    Equal, all together, to one process on the workers' batches together.

    References
    ----------
    M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.
    """

    in_step = True

    def __init__(self, setting: Setting, homes: Sequence[Home] | None = None,
                 own: Sequence[Shard] | None = None) -> None:
        super().__init__(setting, homes, own)
        self._pushed = {worker: self._rooms() for worker in setting.workers}
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
        its.courier.do(lambda: its.messages.exchange(
            [], [(worker, room) for worker, rooms in self._pushed.items() for room in rooms]))
        numbers = next(iter(self._headers.values()))[1:]
        pushed = [rooms for worker, rooms in self._pushed.items() if self._headers[worker][0] != SKIPS]
        for index, shard in enumerate(self._own if pushed else ()):
            mean([rooms[index] for rooms in pushed], its.gradients[shard.part])
            shard.update(numbers)
        its.courier.do(lambda: its.messages.exchange(
            [(worker, its.parameters[shard.part]) for worker in self._pushed for shard in self._own], []))
        self.spares.after(number + 1)
        return True
