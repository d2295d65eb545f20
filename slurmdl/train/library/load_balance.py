"""Load balancing: work in proportion to the measured speed of each worker."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library.context import RunState
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.library.sampling import (
    MAX_SHARE_FACTOR,
    BalanceRound,
    BatchSlice,
    GlobalBatches,
    LockstepSampler,
    SliceSampler,
    apportion,
)
from slurmdl.train.mixing.collectives import bruck_allgather
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import Strategy
from slurmdl.train.tags import Tag
from slurmdl.train.world import World

Numbers = npt.NDArray[np.float64]
Speeds = npt.NDArray[np.float32]

#: weight of the previous average in the moving average of a speed
EMA_DECAY = 0.8
MIN_STEPS_BETWEEN_CHANGES = 20
#: steps between two exchanges of speeds among synchronous workers
SPEED_EXCHANGE_EVERY = 5
#: minimum ratio of the slowest worker's step time to the optimum for a change of the shares
MIN_SPEEDUP = 1.03
#: maximum steps granted at a time, and maximum part of a worker's expected remaining steps
MAX_GRANT_STEPS, MAX_GRANT_SHARE = 8, 0.25
#: first entry of a grant
_GRANTED, _EPOCH_OVER, _RUN_OVER = range(3)
#: request of a worker that has finished
_NO_MORE = -1


class ThroughputEstimator:
    """Moving average of one worker's samples per second of computation; the plain mean of the first few steps.

    Attributes
    ----------
    value : 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.value, self._steps = 0.0, 0

    def measure(self, samples: int, seconds: float) -> None:
        if samples and seconds > 0:
            decay = min(EMA_DECAY, self._steps / (self._steps + 1))
            self.value = decay * self.value + (1 - decay) * samples / seconds
            self._steps += 1


class WorkShares:
    """Share of the work of each worker, a function of speeds that all workers know.

    Shares change only if the slowest worker's step takes more than MIN_SPEEDUP times the optimum, and at least
    MIN_STEPS_BETWEEN_CHANGES steps after the last change, so that noise does not change them. The first shares
    are slightly wrong because part of a step does not depend on the share; a second change corrects them.

    Attributes
    ----------
    values : entry i is the share of worker i, 1 on average.
    """

    def __init__(self, worker_count: int) -> None:
        self.values = (1.0,) * worker_count
        self._last_change = -MIN_STEPS_BETWEEN_CHANGES

    def update(self, speeds: Sequence[float], step: int) -> bool:
        """Process the speeds (all > 0) known at a step; return whether the shares have changed."""
        times = [share / speed for share, speed in zip(self.values, speeds, strict=True)]
        mean = fsum(speeds) / len(speeds)
        if step - self._last_change < MIN_STEPS_BETWEEN_CHANGES or max(times) * mean <= MIN_SPEEDUP:
            return False
        self.values, self._last_change = tuple(speed / mean for speed in speeds), step
        return True


def batch_sizes(global_batches: GlobalBatches, shares: Sequence[float]) -> list[int]:
    """Samples of each worker in a full step."""
    return apportion(global_batches.global_batch_size, shares, 1, MAX_SHARE_FACTOR * global_batches.batch_size)


class LoadBalancer:
    """Rounds of synchronous workers, computed alike on all.

    At the end of some rounds the workers exchange their speeds in the background; the speeds apply from the round
    after the next one, so sends never block. Shares change only after an exchange of models.

    Parameters
    ----------
    by_steps : see LockstepSampler.
    strategy : determines the exchange steps.
    rounds_ahead : rounds that may be assigned before a round is over, see DataSource.prefetch.
    gather_speeds : starts to exchange speeds.
    wait : waits for the exchanged speeds.
    """

    def __init__(self, global_batches: GlobalBatches, by_steps: bool, strategy: Strategy, rounds_ahead: int,
                 gather_speeds: Callable[[float], Future[Speeds]], wait: Callable[[Future[Speeds]], Speeds]) -> None:
        self._global_batches, self._by_steps, self._strategy = global_batches, by_steps, strategy
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
            if min(speeds) > 0 and self._shares.update(speeds, step) and not self._by_steps:
                sizes = batch_sizes(self._global_batches, self._shares.values)
                self._model_weights = tuple(size / self._global_batches.batch_size for size in sizes)


def even_rounds(worker_count: int) -> Callable[[int, int], BalanceRound]:
    """Make a function that returns rounds of one step with equal shares."""
    even = BalanceRound(1, (1.0,) * worker_count, (), False)
    return lambda step, max_steps: even


class GuidedScheduler:
    """Grants the samples of each epoch to asynchronous workers on request.

    Each worker makes as many steps as its speed permits. Grants become smaller toward the end of the run, and a
    worker that would finish last gets none, so all workers finish at about the same time.

    Parameters
    ----------
    by_steps : whether all batches are equal; else they are proportional to speed.

    References
    ----------
    C. D. Polychronopoulos, D. J. Kuck: Guided self-scheduling: a practical scheduling scheme for parallel
    supercomputers. IEEE Trans. Computers C-36 (1987). doi:10.1109/TC.1987.5009495
    """

    def __init__(self, global_batches: GlobalBatches, by_steps: bool) -> None:
        worker_count = global_batches.worker_count
        self._global_batches, self._by_steps = global_batches, by_steps
        self._epoch = self._cursor = 0
        self._speeds = [0.0] * worker_count
        self._active_workers = set(range(worker_count))
        self._shares, self._batch_sizes = WorkShares(worker_count), [global_batches.batch_size] * worker_count

    def grant(self, worker: int, epoch: int, cursor: int, until: float, speed: float) -> Numbers:
        """Grant samples to a worker.

        Parameters
        ----------
        epoch, cursor : the worker's epoch; the first worker in a new epoch starts it at `cursor`.
        until : steps of the run; may be infinite.
        speed : of the worker, 0 if unknown.

        Returns
        -------
        shape (4 + workers,): kind of the grant; start and stop in the epoch's order; number of steps; and the batch
        sizes of all workers.
        """
        batches, sizes = self._global_batches, self._batch_sizes
        self._epoch, self._cursor = max((epoch, cursor), (self._epoch, self._cursor))
        self._speeds[worker] = speed
        speeds = self._known_speeds()
        if not self._by_steps and self._shares.update(speeds, global_step_at(batches, self._epoch, self._cursor)):
            sizes = self._batch_sizes = batch_sizes(batches, self._shares.values)
        grant = np.array([_GRANTED, self._cursor, self._cursor, 0, *sizes], np.float64)
        left = self._samples_left(until)
        if left <= 0 or self._would_finish_last(worker, left, speeds):
            grant[0] = _RUN_OVER
            self._active_workers.discard(worker)
        elif epoch < self._epoch or self._cursor == batches.num_samples:
            grant[0] = _EPOCH_OVER
        else:
            max_steps = MAX_GRANT_SHARE * left * speeds[worker] / fsum(speeds) / sizes[worker]
            samples = int(min(batches.num_samples - self._cursor, left,
                              max(1, int(min(MAX_GRANT_STEPS, max_steps))) * sizes[worker]))
            self._cursor += samples
            # the last batches of an epoch may be smaller
            grant[2:4] = self._cursor, max(1, round(samples / sizes[worker]))
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
        step_seconds = {other: self._batch_sizes[other] / speeds[other] for other in active}
        return step_seconds[worker] > samples_left / fsum(speeds[other] for other in active) \
            + min(step_seconds.values())


def global_step_at(global_batches: GlobalBatches, epoch: int, cursor: int) -> int:
    """Mean number of steps of the workers at a cursor."""
    return epoch * global_batches.steps_per_epoch + cursor // global_batches.global_batch_size


class DynamicSampler(SliceSampler):
    """Worker side of GuidedScheduler; the first worker also answers the others, in its communication thread.

    A worker requests the next samples as soon as it receives some, to hide the latency.

    Parameters
    ----------
    speed : returns the current speed of this worker.
    """

    def __init__(self, p2p: MeteredP2P, comm_thread: CommThread, workers: Sequence[int],
                 global_batches: GlobalBatches, by_steps: bool, speed: Callable[[], float]) -> None:
        self._p2p, self._comm_thread, self._workers = p2p, comm_thread, workers
        self._global_batches, self._by_steps, self._speed = global_batches, by_steps, speed
        self._worker_rank = workers.index(p2p.rank)
        self._scheduler = GuidedScheduler(global_batches, by_steps) if self._worker_rank == 0 else None
        self._request_buffer, self._grant_buffer = np.empty(4), np.empty(4 + len(workers))
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
            kind, start, stop, steps, *sizes = (int(number) for number in self._receive_grant())
            if kind != _GRANTED:
                self._exhausted = kind == _RUN_OVER
                return
            self._request(epoch, cursor, until)
            batch_size = self._global_batches.batch_size
            weights = () if self._by_steps else tuple(size / batch_size for size in sizes)
            for number in range(steps):
                begin, end = (start + (stop - start) * each // steps for each in (number, number + 1))
                step = global_step_at(self._global_batches, epoch, end)
                yield BatchSlice(begin, end, end, range(step, step), (end - begin) / batch_size, weights)

    def exhausted(self, until: int) -> bool:
        return self._exhausted

    def answer_requests(self) -> None:
        """Answer pending requests; called after each step if there is no communication thread."""
        if self._scheduler:
            self._comm_thread.call(self._answer_all)

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


class WorkAssignment:
    """One worker's assigned work and its measured speed.

    Attributes
    ----------
    current_slice : samples of the current step; None between steps, and for batches from other sources than a Loader.
    model_weights : entry i is the weight of worker i's model; () if all are equal.
    """

    def __init__(self, world: World, p2p: MeteredP2P, state: RunState) -> None:
        self._world, self._p2p, self._state = world, p2p, state
        self.current_slice: BatchSlice | None = None
        self.model_weights: tuple[float, ...] = ()
        self._comm_thread: CommThread | None = None
        self._recovery: FailureRecovery | None = None
        self._throughput = ThroughputEstimator()
        self._balancer: LoadBalancer | None = None
        self._dynamic_sampler: DynamicSampler | None = None
        self._assigned_step = 0
        self._blocked_seconds = 0.0

    def bind(self, comm_thread: CommThread, recovery: FailureRecovery) -> None:
        """Connect to a run that has a model; needed for load balancing."""
        self._comm_thread, self._recovery = comm_thread, recovery

    @property
    def global_step(self) -> int:
        """Mean number of steps of the workers; differs from the local step if workers make different numbers."""
        config = self._world.config
        steps_differ = config.load_balance == "local-steps" or (self._world.is_load_balanced and config.asynchronous)
        return self._assigned_step if steps_differ else self._state.step

    def make_sampler(self, global_batches: GlobalBatches, prefetch: int) -> SliceSampler:
        """Make the sampler of this worker.

        Parameters
        ----------
        prefetch : batches that are fetched ahead.
        """
        world, config = self._world, self._world.config
        worker, by_steps = world.worker_rank or 0, config.load_balance == "local-steps"
        if not world.is_load_balanced or world.is_server:
            return LockstepSampler(global_batches, worker, False, even_rounds(world.worker_count),
                                   lambda: self.global_step)
        comm_thread, workers, p2p = self._comm_thread, world.ranks_with_role("worker"), self._p2p
        if comm_thread is None or self._recovery is None or self._balancer or self._dynamic_sampler:
            raise TrainError(f"--load-balance {config.load_balance}: requires one run.loader() for all samples, "
                             "after run.wrap()")
        if config.asynchronous:
            self._dynamic_sampler = DynamicSampler(p2p, comm_thread, workers, global_batches, by_steps,
                                                   lambda: self._throughput.value)
            return self._dynamic_sampler
        self._balancer = LoadBalancer(
            global_batches, by_steps, self._recovery.strategy, 1 + prefetch + (config.max_staleness or 0),
            lambda speed: comm_thread.submit(lambda: bruck_allgather(p2p, workers, speed)), comm_thread.wait)
        return LockstepSampler(global_batches, worker, by_steps, self._balancer.next_round, lambda: self.global_step)

    def start_fetch(self) -> None:
        """Call before a batch is fetched; blocked time while fetching does not count as work."""
        if self._comm_thread:
            self._blocked_seconds = self._comm_thread.blocked_seconds

    def end_fetch(self) -> None:
        if self._comm_thread:
            self._blocked_seconds = self._comm_thread.blocked_seconds - self._blocked_seconds

    def begin_step(self, batch_slice: BatchSlice) -> None:
        self.current_slice, self.model_weights = batch_slice, batch_slice.model_weights

    def strategy_steps(self, step: int) -> Iterable[int]:
        """Steps of the strategy that end with a step of the optimizer."""
        return self.current_slice.steps if self._balancer and self.current_slice else (step,)

    def end_step(self, seconds: float) -> int:
        """End the current step, publish the speed if due, and return the number of samples.

        Parameters
        ----------
        seconds : duration without communication.
        """
        batch_slice, self.current_slice = self.current_slice, None
        samples = batch_slice.stop - batch_slice.start if batch_slice else self._state.batch_size
        self._throughput.measure(samples, seconds - self._blocked_seconds)
        self._blocked_seconds = 0.0
        if batch_slice:
            self._assigned_step = batch_slice.steps.stop
            if self._balancer and batch_slice.publishes_speed:
                self._balancer.publish_speed(self._throughput.value)
        if self._dynamic_sampler and not self._world.transport.supports_comm_thread:
            self._dynamic_sampler.answer_requests()
        return samples

    def finish(self) -> None:
        if self._dynamic_sampler:
            self._dynamic_sampler.finish()
