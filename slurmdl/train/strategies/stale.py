"""Parameter servers that serve whoever comes: workers differ in their steps, by a bound or without one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slurmdl.train.strategies.servers import CALL, SKIPS, Holder, Worker
from slurmdl.train.strategies.spares import EVERY, Home, Shard
from slurmdl.train.strategies.strategy import Setting

#: of messages between workers and servers
_TAG = 1


class StaleWorker(Worker):
    """As Worker, but it is answered as soon as it may go on, and with the last model when all have ended."""

    in_step = meets = False
    alike = True
    tag = _TAG

    def finish(self) -> None:
        self._header[0] = 0
        self._its.courier.do(lambda: self._its.messages.exchange(self._heads, self._pull, _TAG))


class StaleServer(Holder):
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

    meets = False
    kept: tuple[str, ...] = ("_made",)

    def __init__(self, setting: Setting, homes: Sequence[Home] | None = None,
                 own: Sequence[Shard] | None = None) -> None:
        super().__init__(setting, homes, own)
        method = setting.method
        self._bound = math.inf if method.asynchronous else method.staleness or 0
        workers = setting.workers
        #: steps of each worker that has not ended, and updates before it has pulled
        self._steps, self._pulled = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
        self._headers = {worker: np.zeros(1 + setting.numbers().size) for worker in workers}
        #: what each worker has pushed, and what is sent to it
        self._pushed = {worker: self._rooms() for worker in workers}
        self._theirs = {worker: self._rooms() for worker in workers}
        self._arriving: dict[int, list[Any]] = {}
        self._leaving: dict[int, list[Any]] = {}
        self._waiting: list[int] = []
        self._made = 0
        #: workers that wait for a checkpoint, and its number
        self._paused: set[int] = set()
        self._call = 0

    def state(self) -> dict[str, Any]:
        # by the workers' order: another allocation may give them other ranks
        return {**super().state(), "steps": list(self._steps.values()), "pulled": list(self._pulled.values())}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._steps = dict(zip(self._steps, state["steps"], strict=True))
        self._pulled = dict(zip(self._pulled, state["pulled"], strict=True))

    def _copied(self) -> int:
        return EVERY * len(self._its.workers)

    def serve(self, number: int) -> bool:
        courier = self._its.courier
        worker = courier.do(self._gradient)
        if worker is None and self._steps:
            self.called = self._call
            self._paused.clear()
            return True
        if worker is None:
            courier.do(self._part)
            return False
        self._apply(worker)
        self.spares.after(self._made)
        courier.do(self._answer)
        return True

    def _gradient(self) -> int | None:
        """The next worker whose gradient is there; None where all have ended, or wait for a checkpoint."""
        transport = self._its.messages.transport
        while True:
            for worker, requests in self._arriving.items():
                if transport.test(requests):
                    del self._arriving[worker]
                    return worker
            comes = transport.probe(_TAG)
            if comes is not None:
                self._greet(comes)
            elif self._paused == self._steps.keys():
                return None
            else:
                transport.first([requests[-1] for requests in self._arriving.values()], _TAG)

    def _greet(self, worker: int) -> None:
        """Read a worker's header, and expect its gradient or none any more."""
        transport, header = self._its.messages.transport, self._headers[worker]
        transport.wait([transport.receive(worker, header, _TAG)])
        if header[0] >= CALL:
            # the others shall not wait for it, or they would never come to the checkpoint
            self._call = int(header[0]) - CALL
            self._paused.add(worker)
            self._answer()
        elif header[0]:
            self._arriving[worker] = [transport.receive(worker, room, _TAG) for room in self._pushed[worker]]
        else:
            del self._steps[worker]
            self._answer()

    def _apply(self, worker: int) -> None:
        if self._headers[worker][0] != SKIPS:
            self._update(worker)
        # all servers count alike, whatever the order in which pushes come
        self._made += 1
        self._steps[worker] += 1
        self._waiting.append(worker)

    def _update(self, worker: int) -> None:
        its, numbers = self._its, self._headers[worker][1:].copy()
        numbers[list(its.rates)] /= 1 + self._made - self._pulled[worker]
        for shard, gradient in zip(self._own, self._pushed[worker], strict=True):
            its.gradients[shard.part] = gradient
            shard.update(numbers)

    def _answer(self) -> None:
        """Send the shard to those who may go on."""
        slowest = min((made for worker, made in self._steps.items() if worker not in self._paused), default=0)
        for worker in [its for its in self._waiting if self._steps[its] - slowest <= self._bound]:
            self._waiting.remove(worker)
            self._send(worker)

    def _send(self, worker: int) -> None:
        # what it pulled before has arrived, or it would not have pushed
        self._its.messages.transport.wait(self._leaving.pop(worker, []))
        for shard, theirs in zip(self._own, self._theirs[worker], strict=True):
            theirs[:] = self._its.parameters[shard.part]
        self._pulled[worker] = self._made
        self._leaving[worker] = [self._its.messages.send(worker, theirs, _TAG) for theirs in self._theirs[worker]]

    def _part(self) -> None:
        """All workers get the last model."""
        for worker in self._its.workers:
            self._send(worker)
        self._its.messages.transport.wait([request for requests in self._leaving.values() for request in requests])
