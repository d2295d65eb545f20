"""What belongs to places in the parameters, so that servers of another number can share it out anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.strategies.strategy import ShardOptimizer, ShardState, StrategyContext


def assemble_shard(states: Sequence[ShardState], part: slice) -> dict[str, Any]:
    """What pieces say of a part of the parameters: by name a tensor as long as the part, or what holds for all of it.

    Parameters
    ----------
    pieces : which cover the part.
    """
    import torch

    found: dict[str, list[Any]] = {}
    for start, stop, its in sorted(states, key=lambda piece: piece[0]):
        low, high = max(start, part.start), min(stop, part.stop)
        if low < high:
            for name, value in its.items():
                found.setdefault(name, []).append(value[low - start:high - start]
                                 if _is_per_parameter(value) else value)
    return {name: torch.cat(values) if _is_per_parameter(values[0]) else values[0] for name, values in found.items()}


def _is_per_parameter(value: Any) -> bool:
    """Whether there is one for each parameter."""
    return getattr(value, "ndim", 0) == 1


# MERGED: Copies of shards on other servers, from which a lost server can be rebuilt.

ByteArray = npt.NDArray[np.uint8]

#: steps of a worker from one copy of a shard to the next: with Adam a copy is three models long, so that it costs
#: 1.5 % of what one worker exchanges
BACKUP_EVERY = 100
_BACKUP_TAG = 2
_HEADER_DTYPE = np.dtype([("updates", np.int64), ("start", np.int64), ("stop", np.int64), ("state", np.int64)])


@dataclass(frozen=True)
class ShardAssignment:
    """A shard of the parameters, and the server that holds it."""

    server: int
    part: slice


@dataclass(frozen=True)
class OwnedShard:
    """A server's shard of the parameters: where it lies in them, and the optimizer that updates it."""

    part: slice
    optimizer: ShardOptimizer


@dataclass(frozen=True)
class ShardBackup:
    """A server's shard as it was after some updates, held by another server.

    Attributes
    ----------
    part : where it lies in the parameters.
    state : of its optimizer, as Update.state gives it.
    """

    update_count: int
    part: slice
    parameters: npt.NDArray[np.float32]
    optimizer_state: ByteArray


def promote_backup(backup: ShardBackup, ctx: StrategyContext) -> ShardOptimizer:
    """Make a lost server's shard here: its parameters in their place, and an optimizer that goes on as the lost one.

    What workers have pushed since the copy was made is lost.
    """
    ctx.parameters[backup.part] = backup.parameters
    update = ctx.make_shard_optimizer(backup.part)
    update.load_state_bytes(backup.optimizer_state)
    return update


def next_alive(server: int, servers: Sequence[int], alive: Sequence[int]) -> int:
    """The next living server after one of `servers` in their ring."""
    place = servers.index(server)
    return next(its for its in (*servers[place + 1:], *servers[:place + 1]) if its in alive)


class ShardBackups:
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

    def __init__(self, ctx: StrategyContext,
                 assignments: Sequence[ShardAssignment], owned: Sequence[OwnedShard], every: int) -> None:
        servers, rank = ctx.servers, ctx.p2p.rank
        self._ctx, self._owned, self._every = ctx, owned, every
        self._next_server, self._previous_server = next_alive(
            rank, servers, servers), servers[servers.index(rank) - 1]
        self._previous_shard_count = sum(home.server == self._previous_server for home in assignments)
        self._is_only_server = len(servers) == 1
        self.held: dict[int, ShardBackup] = {}

    def exchange_if_due(self, update_count: int) -> None:
        """Exchange copies, where they are due after so many updates."""
        if self._is_only_server or update_count % self._every:
            return
        its, messages = self._ctx, self._ctx.p2p
        states = [shard.optimizer.state_bytes() for shard in self._owned]
        headers = np.array([(update_count, shard.part.start, shard.part.stop, state.size)
                            for shard, state in zip(self._owned, states, strict=True)], _HEADER_DTYPE)
        theirs = np.empty(self._previous_shard_count, _HEADER_DTYPE)
        its.comm_thread.call(lambda: messages.exchange([(self._next_server, headers.view(np.int64))],
                                                 [(self._previous_server, theirs.view(np.int64))], _BACKUP_TAG))
        rooms = [(np.empty(stop - start, np.float32), np.empty(length, np.uint8))
                 for _, start, stop, length in theirs.tolist()]
        leaving = [(its.parameters[shard.part], state) for shard, state in zip(self._owned, states, strict=True)]
        its.comm_thread.call(lambda: messages.exchange([(self._next_server, array) for pair in leaving for array in pair],
                                                 [(self._previous_server, room) for pair in rooms for room in pair], _BACKUP_TAG))
        self.held = {start: ShardBackup(told, slice(start, stop), *room)
                     for (told, start, stop, _), room in zip(theirs.tolist(), rooms, strict=True)}
