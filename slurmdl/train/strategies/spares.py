"""Copies of shards on other servers, from which a lost server can be rebuilt."""

from __future__ import annotations

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


class Spares:
    """A server's place in the ring of servers: it gives copies of its shard to the next, and holds those of the one
    before.

    All servers are pushed to equally often, each push to all of them at once. So each gets to the update after which
    a copy is due, whatever the others wait for.

    Parameters
    ----------
    every : updates from one copy to the next.

    Attributes
    ----------
    held : the newest copy of the shard of the server before; None where there is none yet, or no other server.
    """

    def __init__(self, setting: Setting, part: slice, update: Update, every: int) -> None:
        servers, place = setting.servers, setting.servers.index(setting.messages.rank)
        self._its, self._part, self._update, self._every = setting, part, update, every
        self._next, self._before = servers[(place + 1) % len(servers)], servers[place - 1]
        self._alone = len(servers) == 1
        self.held: Spare | None = None

    def after(self, updates: int) -> None:
        """Exchange copies, where they are due after so many updates."""
        if self._alone or updates % self._every:
            return
        its, part, state = self._its, self._part, self._update.state()
        header = np.array([(updates, part.start, part.stop, state.size)], _HEADER)
        theirs = np.empty_like(header)
        messages = its.messages
        its.courier.do(lambda: messages.exchange([(self._next, header.view(np.int64))],
                                                 [(self._before, theirs.view(np.int64))], _TAG))
        told, start, stop, length = theirs[0].item()
        model, memory = np.empty(stop - start, np.float32), np.empty(length, np.uint8)
        its.courier.do(lambda: messages.exchange(
            [(self._next, its.parameters[part]), (self._next, state)],
            [(self._before, model), (self._before, memory)], _TAG))
        self.held = Spare(told, slice(start, stop), model, memory)
