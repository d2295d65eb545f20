"""Copies of shards on other servers, from which a lost server can be rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.train.strategies.strategy import Setting, Update

Bytes = npt.NDArray[np.uint8]

#: steps of a worker from one copy of a shard to the next: with Adam a copy is three models long, so that it costs
#: 1.5 % of what one worker exchanges
EVERY = 100
_TAG = 2
_HEADER = np.dtype([("updates", np.int64), ("start", np.int64), ("stop", np.int64), ("state", np.int64)])


@dataclass(frozen=True)
class Home:
    """A shard of the parameters, and the server that holds it."""

    server: int
    part: slice


@dataclass(frozen=True)
class Shard:
    """A server's shard of the parameters: where it lies in them, and the optimizer that updates it."""

    part: slice
    update: Update


@dataclass(frozen=True)
class Spare:
    """A server's shard as it was after some updates, held by another server.

    Attributes
    ----------
    part : where it lies in the parameters.
    state : of its optimizer, as Update.state gives it.
    """

    updates: int
    part: slice
    parameters: npt.NDArray[np.float32]
    state: Bytes


def rebuild(spare: Spare, setting: Setting) -> Update:
    """Make a lost server's shard here: its parameters in their place, and an optimizer that goes on as the lost one.

    What workers have pushed since the copy was made is lost.
    """
    setting.parameters[spare.part] = spare.parameters
    update = setting.updater(spare.part)
    update.restore(spare.state)
    return update


def following(server: int, servers: Sequence[int], living: Sequence[int]) -> int:
    """The next living server after one of `servers` in their ring."""
    place = servers.index(server)
    return next(its for its in (*servers[place + 1:], *servers[:place + 1]) if its in living)


class Spares:
    """A server's place in the ring of servers: it gives copies of its shards to the next, and holds those of the one
    before.

    All servers are pushed to equally often, each push to all of them at once. So each gets to the update after which
    a copy is due, whatever the others wait for.

    Parameters
    ----------
    homes : all shards.
    own : those of this server.
    every : updates from one copy to the next.

    Attributes
    ----------
    held : start of a shard of the server before -> its newest copy; none until the first is due, or without another
        server.
    """

    def __init__(self, setting: Setting, homes: Sequence[Home], own: Sequence[Shard], every: int) -> None:
        servers, rank = setting.servers, setting.messages.rank
        self._its, self._own, self._every = setting, own, every
        self._next, self._before = following(rank, servers, servers), servers[servers.index(rank) - 1]
        self._theirs = sum(home.server == self._before for home in homes)
        self._alone = len(servers) == 1
        self.held: dict[int, Spare] = {}

    def after(self, updates: int) -> None:
        """Exchange copies, where they are due after so many updates."""
        if self._alone or updates % self._every:
            return
        its, messages = self._its, self._its.messages
        states = [shard.update.state() for shard in self._own]
        headers = np.array([(updates, shard.part.start, shard.part.stop, state.size)
                            for shard, state in zip(self._own, states, strict=True)], _HEADER)
        theirs = np.empty(self._theirs, _HEADER)
        its.courier.do(lambda: messages.exchange([(self._next, headers.view(np.int64))],
                                                 [(self._before, theirs.view(np.int64))], _TAG))
        rooms = [(np.empty(stop - start, np.float32), np.empty(length, np.uint8))
                 for _, start, stop, length in theirs.tolist()]
        leaving = [(its.parameters[shard.part], state) for shard, state in zip(self._own, states, strict=True)]
        its.courier.do(lambda: messages.exchange([(self._next, array) for pair in leaving for array in pair],
                                                 [(self._before, room) for pair in rooms for room in pair], _TAG))
        self.held = {start: Spare(told, slice(start, stop), *room)
                     for (told, start, stop, _), room in zip(theirs.tolist(), rooms, strict=True)}
