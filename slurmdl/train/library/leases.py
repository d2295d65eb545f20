"""Samples for workers that do not wait for each other: whoever needs some asks the first worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.courier import CommThread
from slurmdl.train.library.balance import WorkShares, batch_sizes
from slurmdl.train.library.deal import BatchSlice, GlobalBatches, SliceSampler
from slurmdl.train.messages import MeteredP2P

Numbers = npt.NDArray[np.float64]

#: of messages that ask, and of those that answer
_REQUEST_TAG, _GRANT_TAG = 5, 6
#: steps that a worker gets at a time at most, and the part at most of what it is yet expected to make until the end
MAX_GRANT_STEPS, MAX_GRANT_SHARE = 8, 0.25
#: what an answer begins with
_GRANTED, _EPOCH_OVER, _RUN_OVER = range(3)
#: what a worker asks that needs no more
_NO_MORE = -1


class GuidedScheduler:
    """Deals out an epoch, and then the next, to whoever asks.

    So each worker makes as many steps as its speed lets it make. What it gets at a time becomes less towards the end
    of the run, and it gets nothing any more once the others would be through with the rest before it: so all end at
    about the same time.

    Parameters
    ----------
    by_steps : whether all batches are alike; else they are in proportion to speed.

    References
    ----------
    C. D. Polychronopoulos, D. J. Kuck: Guided self-scheduling: a practical scheduling scheme for parallel
    supercomputers. IEEE Trans. Computers C-36 (1987). doi:10.1109/TC.1987.5009495
    """

    def __init__(self, global_batches: GlobalBatches, by_steps: bool) -> None:
        self._global_batches, self._by_steps = global_batches, by_steps
        self._epoch = self._cursor = 0
        self._speeds = [0.0] * global_batches.worker_count
        self._active_workers = set(range(global_batches.worker_count))
        self._shares, self._batch_sizes = WorkShares(
    global_batches.worker_count), [
        global_batches.batch_size] * global_batches.worker_count

    def grant(self, worker: int, epoch: int, cursor: int, until: float, speed: float) -> Numbers:
        """What a worker gets.

        Parameters
        ----------
        epoch : that the worker is in; the first one to be in a new one begins it, at `cursor`.
        until : steps of the run; infinite for no end.
        speed : of the worker, 0 where it is not known yet.

        Returns
        -------
        shape (4 + workers,): whether there is something, and why not; start and stop in the epoch's order; steps that
        it is for; and the batches of all workers.
        """
        deal, sizes = self._global_batches, self._batch_sizes
        self._epoch, self._cursor = max((epoch, cursor), (self._epoch, self._cursor))
        self._speeds[worker] = speed
        speeds = self._known_speeds()
        if not self._by_steps and self._shares.update(speeds, global_step_at(deal, self._epoch, self._cursor)):
            sizes = self._batch_sizes = batch_sizes(deal, self._shares.values)
        found = np.array([_GRANTED, self._cursor, self._cursor, 0, *sizes], np.float64)
        rest = self._samples_left(until)
        if rest <= 0 or self._would_finish_last(worker, rest, speeds):
            found[0] = _RUN_OVER
            self._active_workers.discard(worker)
        elif epoch < self._epoch or self._cursor == deal.num_samples:
            found[0] = _EPOCH_OVER
        else:
            share = MAX_GRANT_SHARE * rest * speeds[worker] / fsum(speeds) / sizes[worker]
            samples = int(min(deal.num_samples - self._cursor, rest,
                          max(1, int(min(MAX_GRANT_STEPS, share))) * sizes[worker]))
            self._cursor += samples
            # the last samples of an epoch need not fill their batches
            found[2:4] = self._cursor, max(1, round(samples / sizes[worker]))
        return found

    def _known_speeds(self) -> list[float]:
        """The workers' speeds; those not known yet are as the others' mean."""
        known = [speed for speed in self._speeds if speed]
        return [speed or (fsum(known) / len(known) if known else 1.0) for speed in self._speeds]

    def _samples_left(self, until: float) -> float:
        """Samples that are left until so many steps of the run."""
        if until == math.inf:
            return until
        deal = self._global_batches
        epochs, steps = divmod(until, deal.steps_per_epoch)
        return (epochs - self._epoch) * deal.num_samples + steps * deal.global_batch_size - self._cursor

    def _would_finish_last(self, worker: int, samples_left: float, speeds: Sequence[float]) -> bool:
        """Whether those who go on make all the rest, and the quickest a step more, while this one makes a step."""
        going = self._active_workers | {worker}
        takes = {its: self._batch_sizes[its] / speeds[its] for its in going}
        return takes[worker] > samples_left / fsum(speeds[its] for its in going) + min(takes.values())


def global_step_at(global_batches: GlobalBatches, epoch: int, cursor: int) -> int:
    """Steps that the workers have made in the mean when so much is dealt."""
    return epoch * global_batches.steps_per_epoch + cursor // global_batches.global_batch_size


class DynamicSampler(SliceSampler):
    """One worker's side; the first worker's also answers the others, in its communication thread.

    A worker asks for the next samples as soon as it has some, so that the answer is there when it needs it.

    Parameters
    ----------
    speed : of this worker now.
    """

    def __init__(self, p2p: MeteredP2P, comm_thread: CommThread, workers: Sequence[int], global_batches: GlobalBatches, by_steps: bool,
                 speed: Callable[[], float]) -> None:
        self._p2p, self._comm_thread, self._workers = p2p, comm_thread, workers
        self._global_batches, self._by_steps, self._speed = global_batches, by_steps, speed
        self._worker_rank = workers.index(p2p.rank)
        self._scheduler = GuidedScheduler(global_batches, by_steps) if self._worker_rank == 0 else None
        #: what this worker asks and is answered, and what is under way of it
        self._request_buffer, self._grant_buffer = np.empty(4), np.empty(4 + len(workers))
        self._pending_request: list[Any] = []
        self._exhausted = False
        #: worker -> the last answer to it, on its way; and how many need no more
        self._pending_grants: dict[int, tuple[Any, Numbers]] = {}
        self._finished_count = 0
        if self._scheduler:
            comm_thread.add_poller(self._answer_one)

    def slices(self, epoch: int, cursor: int, until: int | None) -> Iterator[BatchSlice]:
        if self._pending_request:  # in an epoch that was broken off
            self._receive_grant()
        self._request(epoch, cursor, until)
        while True:
            kind, start, stop, steps, *sizes = (int(number) for number in self._receive_grant())
            if kind != _GRANTED:
                self._exhausted = kind == _RUN_OVER
                return
            self._request(epoch, cursor, until)
            batch = self._global_batches.batch_size
            weights = () if self._by_steps else tuple(size / batch for size in sizes)
            for number in range(steps):
                begin, end = (start + (stop - start) * each // steps for each in (number, number + 1))
                made = global_step_at(self._global_batches, epoch, end)
                yield BatchSlice(begin, end, end, range(made, made), (end - begin) / batch, weights)

    def exhausted(self, until: int) -> bool:
        return self._exhausted

    def answer_requests(self) -> None:
        """Answer those who have asked, after each step, where no thread does it meanwhile."""
        if self._scheduler:
            self._comm_thread.call(self._answer_all)

    def finish(self) -> None:
        """This worker needs no more; the first one answers the others until they need no more, either."""
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
        first, messages = self._workers[0], self._p2p
        return [messages.isend(first, self._request_buffer, _REQUEST_TAG),
                               messages.transport.irecv(first, self._grant_buffer, _GRANT_TAG)]

    def _receive_grant(self) -> Numbers:
        if self._scheduler:
            self._grant_buffer = self._comm_thread.call(lambda: self._grant(0, self._request_buffer))
        else:
            self._comm_thread.call(self._wait_for_grant)
            self._pending_request = []
        return self._grant_buffer

    def _wait_for_grant(self) -> None:
        with self._p2p.timing_wait():
            self._p2p.transport.waitall(self._pending_request)

    def _answer_all(self) -> None:
        while self._answer_one():
            pass

    def _answer_one(self) -> bool:
        """Answer one who has asked; an errand, or between errands."""
        transport = self._p2p.transport
        peer = transport.iprobe(_REQUEST_TAG)
        if peer is None:
            return False
        worker, asks = self._workers.index(peer), np.empty_like(self._request_buffer)
        transport.waitall([transport.irecv(peer, asks, _REQUEST_TAG)])
        answer = self._grant(worker, asks)
        # the answer before this one was there, or the worker would not have asked
        self._pending_grants[worker] = self._p2p.isend(peer, answer, _GRANT_TAG), answer
        self._finished_count += asks[0] == _NO_MORE
        return True

    def _grant(self, worker: int, request: Numbers) -> Numbers:
        assert self._scheduler
        epoch, cursor, until, speed = request.tolist()
        return self._scheduler.grant(worker, int(epoch), int(cursor), until, speed)

    def _answer_until_done(self) -> None:
        transport = self._p2p.transport
        while self._finished_count < len(self._workers) - 1:
            transport.wait_any_or_message([], _REQUEST_TAG)
            self._answer_one()
        transport.waitall([request for request, _ in self._pending_grants.values()])
