"""Guided scheduling: samples are granted to asynchronous workers on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library.sampling import BatchSlice, GlobalBatches, SliceSampler
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.transports.transport import Tag

Numbers = npt.NDArray[np.float64]

#: maximum steps granted at a time, and maximum part of a worker's expected remaining steps
MAX_GRANT_STEPS, MAX_GRANT_SHARE = 8, 0.25
#: first entry of a grant
_GRANTED, _EPOCH_OVER, _RUN_OVER = range(3)
#: request of a worker that has finished
_NO_MORE = -1


class GuidedScheduler:
    """Grants the samples of each epoch to asynchronous workers on request.

    Each worker makes as many steps, with equal batches, as its speed permits. Grants become smaller toward the end of
    the run, and a worker that would finish last gets none, so all workers finish at about the same time.

    Reference: C. D. Polychronopoulos, D. J. Kuck: Guided self-scheduling: a practical scheduling scheme for parallel
    supercomputers. IEEE Trans. Computers C-36 (1987). doi:10.1109/TC.1987.5009495
    """

    def __init__(self, global_batches: GlobalBatches) -> None:
        worker_count = global_batches.worker_count
        self._global_batches = global_batches
        self._epoch = self._cursor = 0
        self._speeds = [0.0] * worker_count
        self._active_workers = set(range(worker_count))

    def grant(self, worker: int, epoch: int, cursor: int, until: float, speed: float) -> Numbers:
        """Grant samples to a worker.

        Returns shape (4,): kind of the grant; start and stop in the epoch's order; and number of steps.

        Args:
            epoch, cursor: the worker's epoch; the first worker in a new epoch starts it at `cursor`.
            until: steps of the run; may be infinite.
            speed: of the worker, 0 if unknown.
        """
        batches = self._global_batches
        self._epoch, self._cursor = max((epoch, cursor), (self._epoch, self._cursor))
        self._speeds[worker] = speed
        speeds = self._known_speeds()
        grant = np.array([_GRANTED, self._cursor, self._cursor, 0], np.float64)
        left = self._samples_left(until)
        if left <= 0 or self._would_finish_last(worker, left, speeds):
            grant[0] = _RUN_OVER
            self._active_workers.discard(worker)
        elif epoch < self._epoch or self._cursor == batches.num_samples:
            grant[0] = _EPOCH_OVER
        else:
            max_steps = MAX_GRANT_SHARE * left * speeds[worker] / fsum(speeds) / batches.batch_size
            samples = int(min(batches.num_samples - self._cursor, left,
                              max(1, int(min(MAX_GRANT_STEPS, max_steps))) * batches.batch_size))
            self._cursor += samples
            # the last batches of an epoch may be smaller
            grant[2:4] = self._cursor, max(1, round(samples / batches.batch_size))
        return grant

    def _known_speeds(self) -> list[float]:
        """Speeds of all workers; unknown ones are the mean of the others."""
        known = [speed for speed in self._speeds if speed]
        return [speed or (fsum(known) / len(known) if known else 1.0) for speed in self._speeds]

    def _samples_left(self, until: float) -> float:
        """Samples remaining up to a number of steps."""
        if until == math.inf:
            return until
        batches = self._global_batches
        epochs, steps = divmod(until, batches.steps_per_epoch)
        return (epochs - self._epoch) * batches.num_samples + steps * batches.global_batch_size - self._cursor

    def _would_finish_last(self, worker: int, samples_left: float, speeds: Sequence[float]) -> bool:
        """Whether the others could finish the rest and another step of the fastest within one step of this worker."""
        active = self._active_workers | {worker}
        step_seconds = {other: self._global_batches.batch_size / speeds[other] for other in active}
        return step_seconds[worker] > samples_left / fsum(speeds[other] for other in active) \
            + min(step_seconds.values())


class DynamicSampler(SliceSampler):
    """Worker side of GuidedScheduler; the first worker also answers the others, in its communication thread.

    A worker requests the next samples as soon as it receives some, to hide the latency; `speed` returns its speed.
    """

    def __init__(self, p2p: MeteredP2P, comm_thread: CommThread, workers: Sequence[int],
                 global_batches: GlobalBatches, speed: Callable[[], float]) -> None:
        self._p2p, self._comm_thread, self._workers = p2p, comm_thread, workers
        self._global_batches, self._speed = global_batches, speed
        self._scheduler = GuidedScheduler(global_batches) if p2p.rank == workers[0] else None
        self._request_buffer, self._grant_buffer = np.empty(4), np.empty(4)
        self._pending_request: list[Any] = []
        self._exhausted = False
        #: worker -> its last grant in flight
        self._pending_grants: dict[int, tuple[Any, Numbers]] = {}
        self._finished_count = 0
        if self._scheduler:
            comm_thread.add_poller(self._answer_one)

    def slices(self, epoch: int, cursor: int, until: int | None) -> Iterator[BatchSlice]:
        if self._pending_request:  # of an abandoned epoch
            self._receive_grant()
        self._request(epoch, cursor, until)
        while True:
            kind, start, stop, steps = (int(number) for number in self._receive_grant())
            if kind != _GRANTED:
                self._exhausted = kind == _RUN_OVER
                return
            self._request(epoch, cursor, until)
            for number in range(steps):
                begin, end = (start + (stop - start) * each // steps for each in (number, number + 1))
                yield BatchSlice(begin, end, end, self._global_batches.step_at(epoch, end),
                                 (end - begin) / self._global_batches.batch_size)

    def exhausted(self, until: int) -> bool:
        return self._exhausted

    def answer_requests(self) -> None:
        """Answer pending requests; called after each step if there is no communication thread."""
        while self._scheduler and self._comm_thread.call(self._answer_one):
            pass

    def finish(self) -> None:
        """End this worker's requests; the first worker answers the others until all have ended."""
        if self._scheduler:
            self._comm_thread.call(self._answer_until_done)
            self._comm_thread.remove_poller(self._answer_one)
        else:
            if self._pending_request:
                self._receive_grant()
            self._request(_NO_MORE, 0, None)
            self._receive_grant()

    def _request(self, epoch: int, cursor: int, until: int | None) -> None:
        self._request_buffer[:] = epoch, cursor, math.inf if until is None else until, self._speed()
        if not self._scheduler:
            self._pending_request = self._comm_thread.call(self._send_request)

    def _send_request(self) -> list[Any]:
        first, p2p = self._workers[0], self._p2p
        return [p2p.isend(first, self._request_buffer, Tag.WORK_REQUEST),
                p2p.transport.irecv(first, self._grant_buffer, Tag.WORK_GRANT)]

    def _receive_grant(self) -> Numbers:
        if self._scheduler:
            self._grant_buffer = self._comm_thread.call(lambda: self._grant(0, self._request_buffer))
        else:
            self._comm_thread.call(lambda: self._p2p.wait_first_chunk(self._pending_request))
            self._pending_request = []
        return self._grant_buffer

    def _answer_one(self) -> bool:
        """Answer one pending request, if any; a comm op or poller."""
        transport = self._p2p.transport
        peer = transport.iprobe(Tag.WORK_REQUEST)
        if peer is None:
            return False
        worker, request = self._workers.index(peer), np.empty_like(self._request_buffer)
        transport.waitall([transport.irecv(peer, request, Tag.WORK_REQUEST)])
        grant = self._grant(worker, request)
        # the worker has received its previous grant, or it would not have sent a request
        self._pending_grants[worker] = self._p2p.isend(peer, grant, Tag.WORK_GRANT), grant
        self._finished_count += request[0] == _NO_MORE
        return True

    def _grant(self, worker: int, request: Numbers) -> Numbers:
        assert self._scheduler
        epoch, cursor, until, speed = request.tolist()
        return self._scheduler.grant(worker, int(epoch), int(cursor), until, speed)

    def _answer_until_done(self) -> None:
        transport = self._p2p.transport
        while self._finished_count < len(self._workers) - 1:
            transport.wait_any_or_message([], Tag.WORK_REQUEST)
            self._answer_one()
        transport.waitall([request for request, _ in self._pending_grants.values()])
