"""Parameter servers, synchronous or asynchronous; their shards, and backups of them on other servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.comm_layout import split_by_speed
from slurmdl.errors import TrainError
from slurmdl.train.p2p import Arrays
from slurmdl.train.strategies.strategy import FloatArray, ShardOptimizer, ShardState, Strategy, StrategyContext
from slurmdl.train.transports.transport import Tag

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


#: header[0] from this value on: request of checkpoint header[0] - CHECKPOINT_REQUEST
CHECKPOINT_REQUEST = 2
#: header[0]: the gradients that follow have overflowed, and are ignored
SKIP_UPDATE = -1


def make_parameter_server(ctx: StrategyContext) -> Strategy:
    """Make this rank's worker or server."""
    serves = ctx.p2p.rank in ctx.servers
    if ctx.config.asynchronous:
        return AsyncPSServer(ctx) if serves else AsyncPSWorker(ctx)
    return SyncPSServer(ctx) if serves else PSWorker(ctx)


def assign_shards(ctx: StrategyContext) -> list[slice]:
    """The slice of the parameters of each server, in order.

    Contiguous blocks, in proportion to the speed of the servers' links to the workers by the plan's costs; servers of
    one node share its link. Equal sizes if costs are unknown.
    """
    nodes, zones = ctx.nodes, ctx.zones
    costs = [np.mean([ctx.costs.get("|".join(sorted((zones[server], zones[worker]))), np.nan)
                      for worker in ctx.workers]) for server in ctx.servers]
    if not ctx.costs or not np.all(np.isfinite(costs)):
        speed = np.ones(len(costs))
    else:
        servers_on_node = [sum(nodes[other] == nodes[server] for other in ctx.servers) for server in ctx.servers]
        speed = 1 / (np.maximum(costs, 1e-30) * servers_on_node)
    return split_by_speed(ctx.parameters.size, speed.tolist())


def initial_assignment(ctx: StrategyContext) -> list[ShardAssignment]:
    """All shards with their servers, in order."""
    return [ShardAssignment(server, part) for server, part in zip(ctx.servers, assign_shards(ctx), strict=True)]


def reassign(assignments: Sequence[ShardAssignment], old_servers: Sequence[int],
             alive_servers: Sequence[int]) -> list[ShardAssignment]:
    """Assign the shards of failed servers to the next alive ones in the ring."""
    return [shard if shard.server in alive_servers
            else ShardAssignment(next_alive(shard.server, old_servers, alive_servers), shard.part)
            for shard in assignments]


def traffic_locality(ctx: StrategyContext, assignments: Sequence[ShardAssignment]) -> tuple[float, float]:
    """Shares of the bytes between workers and servers within nodes, and within leaf zones, 0 to 1."""
    node_bytes = zone_bytes = 0
    for shard in assignments:
        server, size = shard.server, shard.part.stop - shard.part.start
        for worker in ctx.workers:
            same_node = ctx.nodes[server] == ctx.nodes[worker]
            node_bytes += same_node * size
            zone_bytes += (same_node or "" != ctx.zones[server] == ctx.zones[worker]) * size
    total = max(1, ctx.parameters.size * len(ctx.workers))
    return node_bytes / total, zone_bytes / total


def mean_into(vectors: Sequence[FloatArray], out: FloatArray) -> None:
    """Write the mean of vectors into `out`, bitwise as np.mean, but without a stacked copy."""
    out[:] = vectors[0]
    for vector in vectors[1:]:
        out += vector
    out /= np.float32(len(vectors))


class PSWorker(Strategy):
    """Sends each server its shard of the gradients, and receives its shard of the parameters.

    A header precedes the gradients: 1 or SKIP_UPDATE, and the hyperparameters of the worker's optimizer, so that
    schedules reach the servers. The first value is 0 after the worker's last step, and CHECKPOINT_REQUEST plus the
    checkpoint's number if the servers must write a checkpoint.

    Args:
        assignments: the shards; None for those of all servers of the context.
    """

    updates_locally = False
    averages_gradients = identical_at_end = survives_rank_failure = True
    tag = Tag.STEP

    def __init__(self, ctx: StrategyContext, assignments: Sequence[ShardAssignment] | None = None) -> None:
        super().__init__(ctx)
        self._assignments = assignments or initial_assignment(ctx)
        self.ps_locality = traffic_locality(ctx, self._assignments)
        self._header = np.zeros(1 + ctx.hyperparameters().size)
        self._header_sends = [(server, self._header) for server in ctx.servers]
        self._gradient_sends = [(shard.server, ctx.gradients[shard.part]) for shard in self._assignments]
        self._parameter_receives = [(shard.server, ctx.parameters[shard.part]) for shard in self._assignments]

    def without_failed_ranks(self, ctx: StrategyContext) -> Strategy:
        return type(self)(ctx, reassign(self._assignments, self._ctx.servers, ctx.servers))

    def finish_gradients(self, step: int, skip_update: bool = False) -> None:
        self._header[1:] = self._ctx.hyperparameters()
        if not skip_update:
            self._ctx.device_copies.copy_gradients_to_host(slice(None))()
        self._exchange(SKIP_UPDATE if skip_update else 1, self._gradient_sends, self._parameter_receives)
        self.exchanges += 1

    def drain(self, checkpoint_number: int) -> None:
        self._exchange(CHECKPOINT_REQUEST + checkpoint_number)

    def finish(self) -> None:
        self._exchange(0)

    def _exchange(self, code: int, sends: Arrays = (), receives: Arrays = ()) -> None:
        """Send all servers a header with this first value, and exchange the arrays."""
        self._header[0] = code
        self._ctx.comm_thread.call(
            lambda: self._ctx.p2p.exchange([*self._header_sends, *sends], receives, self.tag))


class PSServerBase(Strategy):
    """A server's shards of the parameters with their optimizers: one, or more after failures of other servers.

    Args:
        assignments: all shards; None for those of all servers of the context.
        owned: this server's shards; None to start with the current parameters.

    Attributes:
        backups: of other servers' shards.
    """

    updates_locally = False
    identical_at_end = survives_rank_failure = True

    def __init__(self, ctx: StrategyContext, assignments: Sequence[ShardAssignment] | None = None,
                 owned: Sequence[OwnedShard] | None = None) -> None:
        super().__init__(ctx)
        self._assignments = assignments or initial_assignment(ctx)
        self._owned = owned or [OwnedShard(shard.part, ctx.make_shard_optimizer(shard.part))
                                for shard in self._assignments if shard.server == ctx.p2p.rank]
        self.ps_locality = traffic_locality(ctx, self._assignments)
        updates_per_step = 1 if self.lockstep else len(ctx.workers)
        self.backups = ShardBackups(ctx, self._assignments, self._owned, BACKUP_EVERY * updates_per_step)
        self._headers = {worker: np.ones(1 + ctx.hyperparameters().size) for worker in ctx.workers}
        self._pushed_gradients = {worker: self._make_buffers() for worker in ctx.workers}

    def _make_buffers(self) -> list[FloatArray]:
        """Buffers for a worker's gradients or parameters."""
        return [self._ctx.parameters[shard.part].copy() for shard in self._owned]

    def without_failed_ranks(self, ctx: StrategyContext) -> Strategy:
        assignments = reassign(self._assignments, self._ctx.servers, ctx.servers)
        owned_by_start = {shard.part.start: shard for shard in self._owned}
        owned = [owned_by_start.get(shard.part.start) or self._recover_shard(shard, ctx)
                 for shard in assignments if shard.server == ctx.p2p.rank]
        return type(self)(ctx, assignments, owned)

    def _recover_shard(self, assignment: ShardAssignment, ctx: StrategyContext) -> OwnedShard:
        backup = self.backups.held.get(assignment.part.start)
        if backup is None:
            failed = next(shard.server for shard in self._assignments if shard.part == assignment.part)
            raise TrainError(f"no backup of the shard of failed rank {failed} on {ctx.nodes[failed]}; servers make "
                             f"backups every {BACKUP_EVERY} steps")
        return OwnedShard(assignment.part, promote_backup(backup, ctx))

    @property
    def owned_slices(self) -> list[slice]:
        return [shard.part for shard in self._owned]

    def shard_states(self) -> dict[str, list[ShardState]]:
        import torch

        return {"shard": [(part.start, part.stop, {"parameters": torch.from_numpy(self._ctx.parameters[part])})
                          for part in self.owned_slices],
                "optimizer": [state for shard in self._owned for state in shard.optimizer.shard_states()]}

    def load_shard_states(self, shards: Sequence[ShardState], optimizer_states: Sequence[ShardState]) -> None:
        """Restore the shards from states of possibly other servers."""
        for shard in self._owned:
            state = assemble_shard(shards, shard.part)
            self._ctx.parameters[shard.part] = state["parameters"].numpy()
            shard.optimizer.load_shard_states(optimizer_states)


class SyncPSServer(PSServerBase):
    """Updates its shard with the mean gradient of all workers, except those that skip the update.

    Equivalent to one process with the workers' batches.

    Reference: M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.
    """

    averages_gradients = True

    def serve_step(self, step: int) -> bool:
        ctx, headers, pushed = self._ctx, self._headers, self._pushed_gradients
        ctx.comm_thread.call(lambda: ctx.p2p.exchange([], list(headers.items())))
        code = int(next(iter(headers.values()))[0])
        if code >= CHECKPOINT_REQUEST:
            self.requested_checkpoint = code - CHECKPOINT_REQUEST
            return True
        for worker in [worker for worker, header in headers.items() if not header[0]]:
            del headers[worker], pushed[worker]
        if not headers:
            return False
        ctx.comm_thread.call(lambda: ctx.p2p.exchange(
            [], [(worker, buffer) for worker, buffers in pushed.items() for buffer in buffers]))
        hyperparameters = next(iter(headers.values()))[1:]
        valid = [buffers for worker, buffers in pushed.items() if headers[worker][0] != SKIP_UPDATE]
        for index, shard in enumerate(self._owned if valid else ()):
            mean_into([buffers[index] for buffers in valid], ctx.gradients[shard.part])
            shard.optimizer(hyperparameters)
        ctx.comm_thread.call(lambda: ctx.p2p.exchange(
            [(worker, ctx.parameters[shard.part]) for worker in pushed for shard in self._owned], []))
        self.backups.exchange_if_due(step + 1)
        return True


class AsyncPSWorker(PSWorker):
    """Like PSWorker, but the reply comes as soon as the worker may continue; at the end it is the final model."""

    averages_gradients = lockstep = False
    tag = Tag.ASYNC_PS

    def finish(self) -> None:
        self._exchange(0, receives=self._parameter_receives)


class AsyncPSServer(PSServerBase):
    """Updates its shard with each gradient on arrival, and replies with the new shard.

    After tau updates by other workers since a worker pulled, its gradient is applied with learning rates eta /
    (1 + tau), so that n workers move the model about as far as their mean gradient.

    Reference: W. Zhang, S. Gupta, X. Lian, J. Liu: Staleness-aware async-SGD for distributed deep learning. IJCAI
    2016. arXiv:1511.05950
    """

    lockstep = False
    state_fields: tuple[str, ...] = ("_updates",)

    def __init__(self, ctx: StrategyContext, assignments: Sequence[ShardAssignment] | None = None,
                 owned: Sequence[OwnedShard] | None = None) -> None:
        super().__init__(ctx, assignments, owned)
        self._active_workers = set(ctx.workers)
        #: worker -> number of updates when it last pulled
        self._pulled_at = dict.fromkeys(ctx.workers, 0)
        self._pulled_parameters = {worker: self._make_buffers() for worker in ctx.workers}
        self._receives: dict[int, list[Any]] = {}
        self._sends: dict[int, list[Any]] = {}
        self._updates = 0
        #: workers that wait for a checkpoint, and its number
        self._waiting_for_checkpoint: set[int] = set()
        self._checkpoint_number = 0

    def state_dict(self) -> dict[str, Any]:
        # in the order of the workers, whose ranks may differ in another allocation
        return {**super().state_dict(), "pulled_at": list(self._pulled_at.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._pulled_at = dict(zip(self._pulled_at, state["pulled_at"], strict=True))

    def serve_step(self, step: int) -> bool:
        comm_thread = self._ctx.comm_thread
        worker = comm_thread.call(self._next_gradient)
        if worker is not None:
            self._apply_gradient(worker)
            self.backups.exchange_if_due(self._updates)
            comm_thread.call(lambda: self._send_parameters(worker))
        elif self._active_workers:
            self.requested_checkpoint = self._checkpoint_number
            self._waiting_for_checkpoint.clear()
        else:
            comm_thread.call(self._send_final)
            return False
        return True

    def _next_gradient(self) -> int | None:
        """Wait for a worker's gradient; None if all workers have ended or wait for a checkpoint."""
        transport = self._ctx.p2p.transport
        while True:
            for worker, requests in self._receives.items():
                if transport.testall(requests):
                    del self._receives[worker]
                    return worker
            sender = transport.iprobe(Tag.ASYNC_PS)
            if sender is not None:
                self._read_header(sender)
            elif self._waiting_for_checkpoint == self._active_workers:
                return None
            else:
                transport.wait_any_or_message([requests[-1] for requests in self._receives.values()], Tag.ASYNC_PS)

    def _read_header(self, worker: int) -> None:
        """Receive a worker's header, and start to receive its gradient if one follows."""
        transport, header = self._ctx.p2p.transport, self._headers[worker]
        transport.waitall([transport.irecv(worker, header, Tag.ASYNC_PS)])
        if header[0] >= CHECKPOINT_REQUEST:
            self._checkpoint_number = int(header[0]) - CHECKPOINT_REQUEST
            self._waiting_for_checkpoint.add(worker)
        elif header[0]:
            self._receives[worker] = [transport.irecv(worker, buffer, Tag.ASYNC_PS)
                                      for buffer in self._pushed_gradients[worker]]
        else:
            self._active_workers.remove(worker)

    def _apply_gradient(self, worker: int) -> None:
        ctx, hyperparameters = self._ctx, self._headers[worker][1:].copy()
        hyperparameters[list(ctx.lr_indices)] /= 1 + self._updates - self._pulled_at[worker]
        skips = self._headers[worker][0] == SKIP_UPDATE
        for shard, gradient in () if skips else zip(self._owned, self._pushed_gradients[worker], strict=True):
            ctx.gradients[shard.part] = gradient
            shard.optimizer(hyperparameters)
        # equal on all servers, whatever the order of pushes
        self._updates += 1

    def _send_parameters(self, worker: int) -> None:
        # complete: the worker has received them before it pushed
        self._ctx.p2p.transport.waitall(self._sends.pop(worker, []))
        buffers = self._pulled_parameters[worker]
        for shard, buffer in zip(self._owned, buffers, strict=True):
            buffer[:] = self._ctx.parameters[shard.part]
        self._pulled_at[worker] = self._updates
        self._sends[worker] = [self._ctx.p2p.isend(worker, buffer, Tag.ASYNC_PS) for buffer in buffers]

    def _send_final(self) -> None:
        for worker in self._ctx.workers:
            self._send_parameters(worker)
        self._ctx.p2p.transport.waitall([request for requests in self._sends.values() for request in requests])
