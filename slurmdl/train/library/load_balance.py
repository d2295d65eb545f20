"""Load balancing: work in proportion to the measured speed of each worker, or granted on request."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.collectives import bruck_allgather
from slurmdl.train.library.context import Counters
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.library.sampling import (
    BalanceRound,
    BatchSlice,
    GlobalBatches,
    LockstepSampler,
    SliceSampler,
    WorkShares,
    even_rounds,
)
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.strategies import Strategy
from slurmdl.train.transports.transport import Tag
from slurmdl.train.world import World

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


Speeds = npt.NDArray[np.float32]

#: weight of the previous average in the moving average of a speed
EMA_DECAY = 0.8
#: steps between two exchanges of speeds among synchronous workers
SPEED_EXCHANGE_EVERY = 5


class ThroughputEstimator:
    """Moving average of a worker's samples per second of computation; 0 at first, plain mean of the first steps."""

    def __init__(self) -> None:
        self.value, self._steps = 0.0, 0

    def measure(self, samples: int, seconds: float) -> None:
        if samples and seconds > 0:
            decay = min(EMA_DECAY, self._steps / (self._steps + 1))
            self.value = decay * self.value + (1 - decay) * samples / seconds
            self._steps += 1


class LoadBalancer:
    """Rounds of synchronous workers, computed alike on all.

    At the end of some rounds the workers exchange their speeds in the background; the speeds apply from the round
    after the next one, so sends never block. Shares change only after an exchange of models.

    Args:
        rounds_ahead: rounds that may be assigned before a round is over, see DataSource.prefetch.
        gather_speeds: starts to exchange speeds; `wait` waits for them.
    """

    def __init__(self, global_batches: GlobalBatches, strategy: Strategy, rounds_ahead: int,
                 gather_speeds: Callable[[float], Future[Speeds]], wait: Callable[[Future[Speeds]], Speeds]) -> None:
        self._global_batches, self._strategy = global_batches, strategy
        self._rounds_ahead, self._gather_speeds, self._wait = rounds_ahead, gather_speeds, wait
        self._shares, self._model_weights = WorkShares(global_batches.worker_count), tuple[float, ...]()
        self._round_count, self._next_step = 0, 0
        #: rounds that end with an exchange of speeds, and the exchanges started so far, without those used already
        self._publishing_rounds: deque[int] = deque()
        self._pending_speeds: deque[Future[Speeds]] = deque()

    def next_round(self, step: int, max_steps: int) -> BalanceRound:
        """The round of at most `max_steps` steps that starts at a step of the run."""
        if step < self._next_step:  # rounds were assigned and not executed
            while len(self._publishing_rounds) > len(self._pending_speeds):
                self._publishing_rounds.pop()
        self._round_count += 1
        exchange = self._strategy.next_exchange
        if not step or exchange(step - 1) == step - 1:
            self._update_shares(step)
        length = min(max_steps, exchange(step) - step + 1)
        self._next_step = step + length
        publishes_speed = self._next_step // SPEED_EXCHANGE_EVERY > step // SPEED_EXCHANGE_EVERY
        if publishes_speed:
            self._publishing_rounds.append(self._round_count)
        return BalanceRound(length, self._shares.values, self._model_weights, publishes_speed)

    def publish_speed(self, speed: float) -> None:
        """Call at the end of a round with `publishes_speed`."""
        self._pending_speeds.append(self._gather_speeds(speed))

    def _update_shares(self, step: int) -> None:
        while self._publishing_rounds and self._publishing_rounds[0] + 1 < self._round_count - self._rounds_ahead:
            self._publishing_rounds.popleft()
            speeds = self._wait(self._pending_speeds.popleft()).tolist()
            if min(speeds) > 0 and self._shares.update(speeds, step):
                sizes = self._global_batches.worker_batch_sizes(self._shares.values)
                self._model_weights = tuple(size / self._global_batches.batch_size for size in sizes)


class SampleAssignment:
    """One worker's assigned work and its measured speed.

    Attributes:
        current_slice: samples of the current step; None between steps, and for batches that no Loader made.
        model_weights: entry i is the weight of worker i's model; () if all are equal.
    """

    def __init__(self, world: World, p2p: MeteredP2P, state: Counters) -> None:
        self._world, self._p2p, self._state = world, p2p, state
        self.current_slice: BatchSlice | None = None
        self.model_weights: tuple[float, ...] = ()
        self._comm_thread: CommThread
        self._recovery: FailureRecovery | None = None
        self._throughput = ThroughputEstimator()
        self._balancer: LoadBalancer | None = None
        self._dynamic_sampler: DynamicSampler | None = None
        self._assigned_step = 0
        self._blocked_seconds = 0.0
        #: of the batches of the current step, several if gradients are accumulated
        self._samples = 0

    def bind(self, comm_thread: CommThread, recovery: FailureRecovery) -> None:
        """Connect to a run that has a model; needed for load balancing."""
        self._comm_thread, self._recovery = comm_thread, recovery

    @property
    def global_step(self) -> int:
        """Mean number of steps of the workers; differs from the local step if workers make different numbers."""
        config = self._world.config
        return self._assigned_step if config.load_balance and config.asynchronous else self._state.step

    def make_sampler(self, global_batches: GlobalBatches, prefetch: int) -> SliceSampler:
        """Make the sampler of this worker; `prefetch` batches are fetched ahead."""
        world, config = self._world, self._world.config
        worker = world.worker_rank or 0
        if not config.load_balance or world.is_server:
            return LockstepSampler(global_batches, worker, even_rounds(world.worker_count),
                                   lambda: self.global_step, self._averaged_workers)
        if self._recovery is None or self._balancer or self._dynamic_sampler:
            raise TrainError("--load-balance: requires one run.loader() for all samples, after run.wrap()")
        comm_thread, workers, p2p = self._comm_thread, world.ranks_with_role("worker"), self._p2p
        if config.asynchronous:
            self._dynamic_sampler = DynamicSampler(p2p, comm_thread, workers, global_batches,
                                                   lambda: self._throughput.value)
            return self._dynamic_sampler
        self._balancer = LoadBalancer(
            global_batches, self._recovery.strategy, 1 + prefetch,
            lambda speed: comm_thread.submit(lambda: bruck_allgather(p2p, workers, speed)), comm_thread.wait)
        return LockstepSampler(global_batches, worker, self._balancer.next_round, lambda: self.global_step,
                               self._averaged_workers)

    def _averaged_workers(self) -> Sequence[int]:
        """The workers of this worker's island; () without islands, or before the run has a model."""
        workers = self._world.ranks_with_role("worker")
        groups = self._recovery.strategy.replica_groups if self._recovery else []
        return [workers.index(rank) for group in groups if self._p2p.rank in group for rank in group]

    def start_fetch(self) -> None:
        """Call before a batch is fetched; blocked time while fetching does not count as work."""
        self._blocked_seconds = self._comm_thread.blocked_seconds

    def end_fetch(self) -> None:
        self._blocked_seconds = self._comm_thread.blocked_seconds - self._blocked_seconds

    def begin_step(self, batch_slice: BatchSlice) -> None:
        self.current_slice, self.model_weights = batch_slice, batch_slice.model_weights
        self._samples += batch_slice.stop - batch_slice.start

    def end_step(self, seconds: float) -> int:
        """End the current step of a duration without communication; return the number of its samples."""
        batch_slice, self.current_slice = self.current_slice, None
        samples, self._samples = self._samples if batch_slice else self._state.batch_size, 0
        self._throughput.measure(samples, seconds - self._blocked_seconds)
        self._blocked_seconds = 0.0
        if batch_slice:
            self._assigned_step = batch_slice.end_step
            if self._balancer and batch_slice.publishes_speed:
                self._balancer.publish_speed(self._throughput.value)
        if self._dynamic_sampler and not self._world.transport.supports_comm_thread:
            self._dynamic_sampler.answer_requests()
        return samples

    def finish(self) -> None:
        if self._dynamic_sampler:
            self._dynamic_sampler.finish()
