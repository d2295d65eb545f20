"""Resharding of parameter servers, and backups of shards on other servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.strategies.strategy import ShardOptimizer, ShardState, StrategyContext
from slurmdl.train.tags import Tag

#: steps of a worker between two backups of a shard: with Adam a backup has three times the size of the shard, which
#: is 1.5 % of the traffic of one worker
BACKUP_EVERY = 100
#: in the header of a backup: update count, start and end of the shard, bytes of the optimizer's state
_NUM_HEADER_FIELDS = 4


@dataclass(frozen=True)
class ShardAssignment:
    """A shard of the parameters, and its server."""

    server: int
    part: slice


@dataclass(frozen=True)
class OwnedShard:
    """A server's shard: its slice of the parameters, and its optimizer."""

    part: slice
    optimizer: ShardOptimizer


@dataclass(frozen=True)
class ShardBackup:
    """Backup of another server's shard.

    Attributes:
        update_count: updates before the backup.
        part: slice of the parameters.
        optimizer_state: see ShardOptimizer.state_bytes.
    """

    update_count: int
    part: slice
    parameters: npt.NDArray[np.float32]
    optimizer_state: npt.NDArray[np.uint8]


def assemble_shard(states: Sequence[ShardState], part: slice) -> dict[str, Any]:
    """Assemble the state of a slice of the parameters from states that cover it.

    By name, a state is a tensor as long as its slice, or a value for the whole slice.
    """
    import torch

    def is_per_parameter(value: Any) -> bool:
        return getattr(value, "ndim", 0) == 1

    values: dict[str, list[Any]] = {}
    for start, stop, state in sorted(states, key=lambda shard_state: shard_state[0]):
        low, high = max(start, part.start), min(stop, part.stop)
        if low < high:
            for name, value in state.items():
                values.setdefault(name, []).append(
                    value[low - start:high - start] if is_per_parameter(value) else value)
    return {name: torch.cat(pieces) if is_per_parameter(pieces[0]) else pieces[0] for name, pieces in values.items()}


def promote_backup(backup: ShardBackup, ctx: StrategyContext) -> ShardOptimizer:
    """Restore a failed server's shard on this rank, and return its optimizer; later updates are lost."""
    ctx.parameters[backup.part] = backup.parameters
    optimizer = ctx.make_shard_optimizer(backup.part)
    optimizer.load_state_bytes(backup.optimizer_state)
    return optimizer


def next_alive(server: int, servers: Sequence[int], alive: Sequence[int]) -> int:
    """The next alive server after `server` in the ring of `servers`."""
    index = servers.index(server)
    return next(candidate for candidate in (*servers[index + 1:], *servers[:index + 1]) if candidate in alive)


class ShardBackups:
    """A server's backups in the ring of servers: it sends its shards to the next one, and holds the previous one's.

    Every push goes to all servers, so each reaches the update of a backup regardless of the others' progress.

    Args:
        assignments: all shards.
        owned: this server's shards.
        every: updates between two backups.

    Attributes:
        held: start of a shard of the previous server -> its latest backup; {} before the first one, and with a single
            server.
    """

    def __init__(self, ctx: StrategyContext, assignments: Sequence[ShardAssignment], owned: Sequence[OwnedShard],
                 every: int) -> None:
        servers, rank = ctx.servers, ctx.p2p.rank
        self._ctx, self._owned, self._every = ctx, owned, every
        self._next_server = next_alive(rank, servers, servers)
        self._previous_server = servers[servers.index(rank) - 1]
        self._previous_shard_count = sum(shard.server == self._previous_server for shard in assignments)
        self.held: dict[int, ShardBackup] = {}

    def exchange_if_due(self, update_count: int) -> None:
        if self._next_server == self._ctx.p2p.rank or update_count % self._every:
            return
        states = [shard.optimizer.state_bytes() for shard in self._owned]
        headers = np.array([(update_count, shard.part.start, shard.part.stop, state.size)
                            for shard, state in zip(self._owned, states, strict=True)], np.int64)
        received_headers = np.empty((self._previous_shard_count, _NUM_HEADER_FIELDS), np.int64)
        self._exchange([headers], [received_headers])
        backups = [
            ShardBackup(count, slice(start, stop), np.empty(stop - start, np.float32), np.empty(length, np.uint8))
            for count, start, stop, length in received_headers.tolist()]
        self._exchange([array for shard, state in zip(self._owned, states, strict=True)
                        for array in (self._ctx.parameters[shard.part], state)],
                       [buffer for backup in backups for buffer in (backup.parameters, backup.optimizer_state)])
        self.held = {backup.part.start: backup for backup in backups}

    def _exchange(self, arrays: Sequence[Any], buffers: Sequence[Any]) -> None:
        self._ctx.comm_thread.call(lambda: self._ctx.p2p.exchange(
            [(self._next_server, array) for array in arrays],
            [(self._previous_server, buffer) for buffer in buffers], Tag.SHARD_BACKUP))
