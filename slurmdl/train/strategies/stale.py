"""Parameter servers that serve whoever comes: workers differ in their steps, by a bound or without one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slurmdl.train.strategies.servers import CHECKPOINT_REQUEST, SKIP_UPDATE, PSServerBase, PSWorker
from slurmdl.train.strategies.spares import BACKUP_EVERY, OwnedShard, ShardAssignment
from slurmdl.train.strategies.strategy import StrategyContext

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
