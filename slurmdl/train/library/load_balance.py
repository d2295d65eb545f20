"""Work in proportion to measured speed: who takes which share, and when that changes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from math import fsum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.comm_thread import CommThread
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

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run


Speeds = npt.NDArray[np.float32]

#: what the average of a speed keeps of itself in each step
EMA_DECAY = 0.8
#: steps from one change of the shares to the next
MIN_STEPS_BETWEEN_CHANGES = 20
#: steps after which workers that go along with each other tell each other their speeds
SPEED_EXCHANGE_EVERY = 5
#: how many times as long as it could be the slowest worker's step is before the shares change
MIN_SPEEDUP = 1.03


class ThroughputEstimator:
    """Of one worker, in samples per second of computing alone: an exponential average over its steps, of the first
    few the mean.

    Attributes
    ----------
    value : 0 as long as nothing was measured.
    """

    def __init__(self) -> None:
        self.value, self._steps = 0.0, 0

    def measure(self, samples: int, seconds: float) -> None:
        if samples and seconds > 0:
            kept = min(EMA_DECAY, self._steps / (self._steps + 1))
            self.value = kept * self.value + (1 - kept) * samples / seconds
            self._steps += 1


class WorkShares:
    """Each worker's share of the work, from speeds that all who ask know alike.

    They follow the speeds only where the slowest worker's step takes more than GAIN times as long as with shares that
    are right, and not within EVERY steps of their last change: else noise would move them all the time. The part of
    a step that does not depend on its share makes the first ones a little wrong, which a second change mends.

    Attributes
    ----------
    values : entry i is that of worker i, 1 in the mean.
    """

    def __init__(self, worker_count: int) -> None:
        self.values = (1.0,) * worker_count
        self._last_change = -MIN_STEPS_BETWEEN_CHANGES

    def update(self, speeds: Sequence[float], step: int) -> bool:
        """Take in the speeds that are known in a step of the run, none of them 0; whether the shares have changed."""
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
    """Makes the rounds of workers that go along with each other, all alike.

    Now and then, at the end of a round, each tells the others its speed, while it goes on; what they have told
    counts from the round after the next one on, so that nobody waits for it. Shares change only where an exchange is
    over, so that all between two exchanges was done with the same ones.

    Parameters
    ----------
    by_steps : see deal.InRounds.
    strategy : says when workers exchange.
    later : rounds that may be dealt out before a round is over, see `loader.Source.ahead`.
    gather : begins to tell the others a speed, and to learn theirs.
    wait : for what they have told.
    """

    def __init__(self, global_batches: GlobalBatches, by_steps: bool, strategy: Strategy, rounds_ahead: int,
                 gather_speeds: Callable[[float], Future[Speeds]], wait: Callable[[Future[Speeds]], Speeds]) -> None:
        self._global_batches, self._by_steps, self._strategy = global_batches, by_steps, strategy
        self._rounds_ahead, self._gather_speeds, self._wait = rounds_ahead, gather_speeds, wait
        self._shares, self._model_weights = WorkShares(global_batches.worker_count), tuple[float, ...]()
        self._round_count, self._next_step = 0, 0
        #: rounds after which the workers tell, and what they have told so far, of what is not used yet
        self._publishing_rounds: deque[int] = deque()
        self._pending_speeds: deque[Future[Speeds]] = deque()

    def next_round(self, step: int, max_steps: int) -> BalanceRound:
        """The round that begins with a step of the run, of no more than so many steps."""
        if step < self._next_step:  # some were dealt that nobody made
            while len(self._publishing_rounds) > len(self._pending_speeds):
                self._publishing_rounds.pop()
        self._round_count += 1
        exchange = self._strategy.next_exchange
        if not step or exchange(step - 1) == step - 1:
            self._update_shares(step)
        length = min(max_steps, exchange(step) - step + 1)
        self._next_step = step + length
        tells = self._next_step // SPEED_EXCHANGE_EVERY > step // SPEED_EXCHANGE_EVERY
        if tells:
            self._publishing_rounds.append(self._round_count)
        return BalanceRound(length, self._shares.values, self._model_weights, tells)

    def publish_speed(self, speed: float) -> None:
        """At the end of a round that tells."""
        self._pending_speeds.append(self._gather_speeds(speed))

    def _update_shares(self, step: int) -> None:
        while self._publishing_rounds and self._publishing_rounds[0] + 1 < self._round_count - self._rounds_ahead:
            self._publishing_rounds.popleft()
            speeds = self._wait(self._pending_speeds.popleft()).tolist()
            if min(speeds) > 0 and self._shares.update(speeds, step) and not self._by_steps:
                sizes = batch_sizes(self._global_batches, self._shares.values)
                self._model_weights = tuple(size / self._global_batches.batch_size for size in sizes)


def even_rounds(worker_count: int) -> Callable[[int, int], BalanceRound]:
    """Makes rounds of one step in which all workers take as much."""
    one = BalanceRound(1, (1.0,) * worker_count, (), False)
    return lambda step, longest: one


# MERGED: Samples for workers that do not wait for each other: whoever needs some asks the first worker.

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


# MERGED: What one worker is dealt of the work, and how quick it is with it.

class WorkAssignment:
    """One worker's share.

    Attributes
    ----------
    hand : what the step that is under way was dealt; None between steps, and where a batch is none of `run.loader`.
    weights : entry i, how many models that of worker i stands for; () where all stand for as many.
    done : steps that the workers have made in the mean, where each makes as many as it can.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.current_slice: BatchSlice | None = None
        self.model_weights: tuple[float, ...] = ()
        self.global_step = 0
        self._throughput = ThroughputEstimator()
        self._balancer: LoadBalancer | None = None
        self._dynamic_sampler: DynamicSampler | None = None
        self._blocked_seconds = 0.0

    def make_sampler(self, global_batches: GlobalBatches, prefetch: int) -> SliceSampler:
        """What deals out to this worker.

        Parameters
        ----------
        ahead : batches that are fetched before they are asked for.
        """
        run, method = self._run, self._run.world.config
        worker, by_steps = run.worker_rank or 0, method.load_balance == "local-steps"
        if not run.is_load_balanced or run.is_server:
            return LockstepSampler(global_batches, worker, False, even_rounds(
                run.worker_count), lambda: run.global_step)
        if not run.attached or self._balancer or self._dynamic_sampler:
            raise TrainError(f"--load-balance {method.load_balance}: one run.loader() deals out all samples; valid: one, after "
                             "run.wrap()")
        courier, workers, messages = run.comm_thread, run.world.ranks_with_role("worker"), run.p2p
        if method.asynchronous:
            self._dynamic_sampler = DynamicSampler(
    messages,
    courier,
    workers,
    global_batches,
    by_steps,
     lambda: self._throughput.value)
            return self._dynamic_sampler
        self._balancer = LoadBalancer(
            global_batches, by_steps, run.strategy, 1 + prefetch + (method.max_staleness or 0),
            lambda speed: courier.submit(lambda: bruck_allgather(messages, workers, speed)), courier.wait)
        return LockstepSampler(global_batches, worker, by_steps, self._balancer.next_round, lambda: run.global_step)

    def start_fetch(self) -> None:
        """A batch is asked for; waiting for the communication thread meanwhile is no work."""
        self._blocked_seconds = self._run.comm_thread.blocked_seconds

    def end_fetch(self) -> None:
        self._blocked_seconds = self._run.comm_thread.blocked_seconds - self._blocked_seconds

    def begin_step(self, batch_slice: BatchSlice) -> None:
        """This is what the step to come was dealt."""
        self.current_slice, self.model_weights = batch_slice, batch_slice.model_weights

    def strategy_steps(self, step: int) -> Iterable[int]:
        """Steps of the strategy that end with step `step` of the optimizer."""
        return self.current_slice.steps if self._balancer and self.current_slice else (step,)

    def end_step(self, seconds: float) -> int:
        """The step is over; returns its samples.

        The others hear how quick this worker is.

        Parameters
        ----------
        seconds : that it took, without communication.
        """
        run, hand, self.current_slice = self._run, self.current_slice, None
        samples = hand.stop - hand.start if hand else run.batch_size
        self._throughput.measure(samples, seconds - self._blocked_seconds)
        self._blocked_seconds = 0.0
        if hand:
            self.global_step = hand.steps.stop
            if self._balancer and hand.publishes_speed:
                self._balancer.publish_speed(self._throughput.value)
        if self._dynamic_sampler and not run.world.transport.supports_comm_thread:
            self._dynamic_sampler.answer_requests()
        return samples

    def finish(self) -> None:
        if self._dynamic_sampler:
            self._dynamic_sampler.finish()
