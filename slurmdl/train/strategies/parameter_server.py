"""Parameter servers: in step, within a bound of steps, or asynchronous."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.p2p import split_offsets
from slurmdl.train.strategies.shard_backup import (
    BACKUP_EVERY,
    OwnedShard,
    ShardAssignment,
    ShardBackups,
    assemble_shard,
    next_alive,
    promote_backup,
)
from slurmdl.train.strategies.strategy import FloatArray, ShardState, Strategy, StrategyContext


def make_parameter_server(ctx: StrategyContext) -> Strategy:
    """This rank's part. Workers in step need no bound: each server waits for all of them anyway."""
    serves = ctx.p2p.rank in ctx.servers
    if ctx.config.asynchronous or ctx.config.max_staleness:
        return AsyncPSServer(ctx) if serves else AsyncPSWorker(ctx)
    return SyncPSServer(ctx) if serves else PSWorker(ctx)


# MERGED: Parameter servers in step: workers push gradients, each server updates its shard, workers pull it back.

#: elements that are dealt out to servers at a time (4 MB)
SHARD_BLOCK = 1 << 20
#: from here on the first number of a worker's header is that of a checkpoint
CHECKPOINT_REQUEST = 2
#: in its place: the gradients that follow have overflowed, and are left out
SKIP_UPDATE = -1


def assign_shards(ctx: StrategyContext) -> list[slice]:
    """The part of the parameters that each server holds, in their order.

    Contiguous blocks are dealt out by the speed of the servers' links to the workers, as the plan's costs tell it;
    servers of one node share its link. Where nothing is known, all get as much.
    """
    nodes, zones = ctx.nodes, ctx.zones
    costs = [np.mean([ctx.costs.get("|".join(sorted((zones[server], zones[worker]))), np.nan)
                      for worker in ctx.workers]) for server in ctx.servers]
    if not ctx.costs or not np.all(np.isfinite(costs)):
        speed = np.ones(len(costs))
    else:
        beside = [sum(nodes[other] == nodes[server] for other in ctx.servers) for server in ctx.servers]
        speed = 1 / (np.maximum(costs, 1e-30) * beside)
    return split_by_speed(ctx.parameters.size, speed.tolist())


def split_by_speed(size: int, speeds: Sequence[float]) -> list[slice]:
    """Parts of `size` elements in proportion to some speeds, of whole blocks where each has one."""
    if len(set(speeds)) == 1:
        edge = split_offsets(size, len(speeds))
    else:
        share = np.cumsum(speeds) / sum(speeds)
        edge = [0, *np.rint(size * share).astype(int).tolist()]
    if size >= len(speeds) * SHARD_BLOCK:
        edge = [round(border / SHARD_BLOCK) * SHARD_BLOCK for border in edge[:-1]] + [size]
    return [slice(begin, end) for begin, end in pairwise(edge)]


def initial_assignment(ctx: StrategyContext) -> list[ShardAssignment]:
    """The shards of the parameters with their servers, in their order."""
    return [ShardAssignment(server, part) for server, part in zip(ctx.servers, assign_shards(ctx), strict=True)]


def reassign(assignments: Sequence[ShardAssignment], old_servers: Sequence[int],
             alive_servers: Sequence[int]) -> list[ShardAssignment]:
    """The same shards where of the servers `before` only `servers` are left: those of a lost one go to the next."""
    return [home if home.server in alive_servers else ShardAssignment(next_alive(home.server, old_servers, alive_servers), home.part)
            for home in assignments]


def traffic_locality(ctx: StrategyContext, assignments: Sequence[ShardAssignment]) -> tuple[float, float]:
    """Shares of the bytes between workers and servers that stay within nodes, and within leaf zones, 0 to 1."""
    node = zone = 0
    for home in assignments:
        server, size = home.server, home.part.stop - home.part.start
        for worker in ctx.workers:
            beside = ctx.nodes[server] == ctx.nodes[worker]
            node += beside * size
            zone += (beside or "" != ctx.zones[server] == ctx.zones[worker]) * size
    whole = max(1, ctx.parameters.size * len(ctx.workers))
    return node / whole, zone / whole


def mean_into(vectors: Sequence[FloatArray], out: FloatArray) -> None:
    """Write the mean of vectors into `out`, bit for bit as np.mean does, but without a copy of all of them."""
    out[:] = vectors[0]
    for vector in vectors[1:]:
        out += vector
    out /= np.float32(len(vectors))


class PSWorker(Strategy):
    """Sends each server its shard of the gradients and receives that shard of the parameters.

    Before the gradients goes a header: 1, or SKIPS, and the numbers of the worker's optimizer, whose schedules so
    reach the servers, or 0 where the worker has made its last step, or CALL and a number where the servers are to
    make that checkpoint with the workers.

    Parameters
    ----------
    homes : the shards; None for those of all servers of the setting.
    """

    updates_locally = False
    averages_gradients = identical_at_end = survives_rank_failure = True
    tag = 0

    def __init__(self, ctx: StrategyContext, assignments: Sequence[ShardAssignment] | None = None) -> None:
        super().__init__(ctx)
        self._assignments = assignments or initial_assignment(ctx)
        self.ps_locality = traffic_locality(ctx, self._assignments)
        self._header = np.zeros(1 + ctx.hyperparameters().size)
        self._header_sends = [(server, self._header) for server in ctx.servers]
        self._gradient_sends = [(home.server, ctx.gradients[home.part]) for home in self._assignments]
        self._parameter_receives = [(home.server, ctx.parameters[home.part]) for home in self._assignments]

    def shrink(self, ctx: StrategyContext) -> Strategy:
        return type(self)(ctx, reassign(self._assignments, self._ctx.servers, ctx.servers))

    def before_optimizer_step(self, step: int, skip_update: bool = False) -> None:
        self._header[0], self._header[1:] = SKIP_UPDATE if skip_update else 1, self._ctx.hyperparameters()
        if not skip_update:
            self._ctx.device_copies.copy_gradients_to_host(slice(None))()
        self._ctx.comm_thread.call(
    lambda: self._ctx.p2p.exchange(
        self._header_sends +
        self._gradient_sends,
        self._parameter_receives,
         self.tag))
        self.exchanges += 1

    def quiesce(self, checkpoint_number: int) -> None:
        self._header[0] = CHECKPOINT_REQUEST + checkpoint_number
        self._ctx.comm_thread.call(lambda: self._ctx.p2p.exchange(self._header_sends, [], self.tag))

    def finish(self) -> None:
        self._header[0] = 0
        self._ctx.comm_thread.call(lambda: self._ctx.p2p.exchange(self._header_sends, []))


class PSServerBase(Strategy):
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

    updates_locally = False
    identical_at_end = survives_rank_failure = True

    def __init__(self, ctx: StrategyContext, assignments: Sequence[ShardAssignment] | None = None,
                 owned: Sequence[OwnedShard] | None = None) -> None:
        super().__init__(ctx)
        self._assignments = assignments or initial_assignment(ctx)
        mine = [home.part for home in self._assignments if home.server == ctx.p2p.rank]
        self._owned = owned or [OwnedShard(part, ctx.make_shard_optimizer(part)) for part in mine]
        self.ps_locality = traffic_locality(ctx, self._assignments)
        self.backups = ShardBackups(ctx, self._assignments, self._owned, self._backup_interval())

    def _backup_interval(self) -> int:
        """Updates from one copy of the shards on another server to the next."""
        return BACKUP_EVERY

    def _receive_buffers(self) -> list[FloatArray]:
        """Memory for what a worker pushes or pulls."""
        return [self._ctx.parameters[shard.part].copy() for shard in self._owned]

    def shrink(self, ctx: StrategyContext) -> Strategy:
        homes = reassign(self._assignments, self._ctx.servers, ctx.servers)
        kept = {shard.part.start: shard for shard in self._owned}
        own = [kept.get(home.part.start) or self._recover_shard(home, ctx)
               for home in homes if home.server == ctx.p2p.rank]
        return type(self)(ctx, homes, own)

    def _recover_shard(self, assignment: ShardAssignment, ctx: StrategyContext) -> OwnedShard:
        spare = self.backups.held.get(assignment.part.start)
        if spare is None:
            lost = next(its.server for its in self._assignments if its.part == assignment.part)
            raise TrainError(f"no copy of the shard of rank {lost} on {ctx.nodes[lost]}, which is lost; a server "
                             f"gives the next one a copy every {BACKUP_EVERY} steps")
        return OwnedShard(assignment.part, promote_backup(spare, ctx))

    @property
    def owned_slices(self) -> list[slice]:
        """The parts of the parameters that it holds."""
        return [shard.part for shard in self._owned]

    def shard_states(self) -> dict[str, list[ShardState]]:
        """The shards, and what their optimizers remember."""
        import torch

        return {"shard": [(part.start, part.stop, {"parameters": torch.from_numpy(self._ctx.parameters[part])})
                          for part in self.owned_slices],
                "optimizer": [piece for shard in self._owned for piece in shard.optimizer.shard_states()]}

    def load_shard_states(self, shards: Sequence[ShardState], optimizer_states: Sequence[ShardState]) -> None:
        """Take up shards of servers that may have been others, and what their optimizers remember."""
        for shard in self._owned:
            self._ctx.parameters[shard.part] = assemble_shard(shards, shard.part)["parameters"].numpy()
            shard.optimizer.load_shard_states(optimizer_states)


class SyncPSServer(PSServerBase):
    """Updates its shard with the mean of what all workers push, in step with them; those that skip are left out.

    Equal, all together, to one process on the workers' batches together.

    References
    ----------
    M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI 2014.
    """

    averages_gradients = True

    def __init__(self, ctx: StrategyContext, assignments: Sequence[ShardAssignment] | None = None,
                 owned: Sequence[OwnedShard] | None = None) -> None:
        super().__init__(ctx, assignments, owned)
        self._pushed_gradients = {worker: self._receive_buffers() for worker in ctx.workers}
        self._headers = {worker: np.ones(1 + ctx.hyperparameters().size) for worker in ctx.workers}

    def serve_step(self, step: int) -> bool:
        its = self._ctx
        its.comm_thread.call(lambda: its.p2p.exchange([], list(self._headers.items())))
        word = int(next(iter(self._headers.values()))[0])
        if word >= CHECKPOINT_REQUEST:
            self.requested_checkpoint = word - CHECKPOINT_REQUEST
            return True
        for worker in [worker for worker, header in self._headers.items() if not header[0]]:
            del self._headers[worker], self._pushed_gradients[worker]
        if not self._headers:
            return False
        its.comm_thread.call(lambda: its.p2p.exchange(
            [], [(worker, room) for worker, rooms in self._pushed_gradients.items() for room in rooms]))
        numbers = next(iter(self._headers.values()))[1:]
        pushed = [rooms for worker, rooms in self._pushed_gradients.items() if self._headers[worker]
                                                                          [0] != SKIP_UPDATE]
        for index, shard in enumerate(self._owned if pushed else ()):
            mean_into([rooms[index] for rooms in pushed], its.gradients[shard.part])
            shard.optimizer(numbers)
        its.comm_thread.call(lambda: its.p2p.exchange(
            [(worker, its.parameters[shard.part]) for worker in self._pushed_gradients for shard in self._owned], []))
        self.backups.exchange_if_due(step + 1)
        return True


# MERGED: Parameter servers that serve whoever comes: workers differ in their steps, by a bound or without one.

#: of messages between workers and servers
_ASYNC_PS_TAG = 1


class AsyncPSWorker(PSWorker):
    """As Worker, but it is answered as soon as it may go on, and with the last model when all have ended."""

    averages_gradients = lockstep = False
    identical_at_end = True
    tag = _ASYNC_PS_TAG

    def finish(self) -> None:
        self._header[0] = 0
        self._ctx.comm_thread.call(
    lambda: self._ctx.p2p.exchange(
        self._header_sends,
        self._parameter_receives,
         _ASYNC_PS_TAG))


class AsyncPSServer(PSServerBase):
    """Updates its shard with each gradient as it comes, and answers the worker as soon as it may go on.

    A worker that has made c steps may begin the next one where c is not more than `staleness` above the steps of the
    slowest that has not ended; asynchronous, it always may. Meanwhile others have made tau updates since the worker
    pulled: its gradient goes into the optimizer with the learning rates eta / (1 + tau), so that n workers move the
    model about as far as the mean of their gradients would.

    References
    ----------
    Q. Ho et al.: More effective distributed ML via a stale synchronous parallel parameter server. NIPS 2013.
    W. Zhang, S. Gupta, X. Lian, J. Liu: Staleness-aware async-SGD for distributed deep learning. IJCAI 2016.
    arXiv:1511.05950
    """

    lockstep = False
    state_fields: tuple[str, ...] = ("_made",)

    def __init__(self, ctx: StrategyContext, assignments: Sequence[ShardAssignment] | None = None,
                 owned: Sequence[OwnedShard] | None = None) -> None:
        super().__init__(ctx, assignments, owned)
        method = ctx.config
        self._max_staleness = math.inf if method.asynchronous else method.max_staleness or 0
        workers = ctx.workers
        #: steps of each worker that has not ended, and updates before it has pulled
        self._worker_steps, self._pulled_at = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
        self._headers = {worker: np.zeros(1 + ctx.hyperparameters().size) for worker in workers}
        #: what each worker has pushed, and what is sent to it
        self._pushed_gradients = {worker: self._receive_buffers() for worker in workers}
        self._pulled_parameters = {worker: self._receive_buffers() for worker in workers}
        self._receives: dict[int, list[Any]] = {}
        self._sends: dict[int, list[Any]] = {}
        self._waiting_workers: list[int] = []
        self._updates = 0
        #: workers that wait for a checkpoint, and its number
        self._waiting_for_checkpoint: set[int] = set()
        self._checkpoint_number = 0

    def state_dict(self) -> dict[str, Any]:
        # by the workers' order: another allocation may give them other ranks
        return {**super().state_dict(), "steps": list(self._worker_steps.values()),
                        "pulled": list(self._pulled_at.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._worker_steps = dict(zip(self._worker_steps, state["steps"], strict=True))
        self._pulled_at = dict(zip(self._pulled_at, state["pulled"], strict=True))

    def _backup_interval(self) -> int:
        return BACKUP_EVERY * len(self._ctx.workers)

    def serve_step(self, step: int) -> bool:
        courier = self._ctx.comm_thread
        worker = courier.call(self._next_gradient)
        if worker is None and self._worker_steps:
            self.requested_checkpoint = self._checkpoint_number
            self._waiting_for_checkpoint.clear()
            return True
        if worker is None:
            courier.call(self._send_final)
            return False
        self._apply_gradient(worker)
        self.backups.exchange_if_due(self._updates)
        courier.call(self._reply_allowed)
        return True

    def _next_gradient(self) -> int | None:
        """The next worker whose gradient is there; None where all have ended, or wait for a checkpoint."""
        transport = self._ctx.p2p.transport
        while True:
            for worker, requests in self._receives.items():
                if transport.testall(requests):
                    del self._receives[worker]
                    return worker
            comes = transport.iprobe(_ASYNC_PS_TAG)
            if comes is not None:
                self._read_header(comes)
            elif self._waiting_for_checkpoint == self._worker_steps.keys():
                return None
            else:
                transport.wait_any_or_message([requests[-1] for requests in self._receives.values()], _ASYNC_PS_TAG)

    def _read_header(self, worker: int) -> None:
        """Read a worker's header, and expect its gradient or none any more."""
        transport, header = self._ctx.p2p.transport, self._headers[worker]
        transport.waitall([transport.irecv(worker, header, _ASYNC_PS_TAG)])
        if header[0] >= CHECKPOINT_REQUEST:
            # the others shall not wait for it, or they would never come to the checkpoint
            self._checkpoint_number = int(header[0]) - CHECKPOINT_REQUEST
            self._waiting_for_checkpoint.add(worker)
            self._reply_allowed()
        elif header[0]:
            self._receives[worker] = [transport.irecv(worker, room, _ASYNC_PS_TAG)
                                                      for room in self._pushed_gradients[worker]]
        else:
            del self._worker_steps[worker]
            self._reply_allowed()

    def _apply_gradient(self, worker: int) -> None:
        if self._headers[worker][0] != SKIP_UPDATE:
            self._update_shards(worker)
        # all servers count alike, whatever the order in which pushes come
        self._updates += 1
        self._worker_steps[worker] += 1
        self._waiting_workers.append(worker)

    def _update_shards(self, worker: int) -> None:
        its, numbers = self._ctx, self._headers[worker][1:].copy()
        numbers[list(its.lr_indices)] /= 1 + self._updates - self._pulled_at[worker]
        for shard, gradient in zip(self._owned, self._pushed_gradients[worker], strict=True):
            its.gradients[shard.part] = gradient
            shard.optimizer(numbers)

    def _reply_allowed(self) -> None:
        """Send the shard to those who may go on."""
        slowest = min((made for worker, made in self._worker_steps.items()
                      if worker not in self._waiting_for_checkpoint), default=0)
        for worker in [its for its in self._waiting_workers if self._worker_steps[its] - \
            slowest <= self._max_staleness]:
            self._waiting_workers.remove(worker)
            self._send_parameters(worker)

    def _send_parameters(self, worker: int) -> None:
        # what it pulled before has arrived, or it would not have pushed
        self._ctx.p2p.transport.waitall(self._sends.pop(worker, []))
        for shard, theirs in zip(self._owned, self._pulled_parameters[worker], strict=True):
            theirs[:] = self._ctx.parameters[shard.part]
        self._pulled_at[worker] = self._updates
        self._sends[worker] = [self._ctx.p2p.isend(worker, theirs, _ASYNC_PS_TAG)
                                                   for theirs in self._pulled_parameters[worker]]

    def _send_final(self) -> None:
        """All workers get the last model."""
        for worker in self._ctx.workers:
            self._send_parameters(worker)
        self._ctx.p2p.transport.waitall([request for requests in self._sends.values() for request in requests])
