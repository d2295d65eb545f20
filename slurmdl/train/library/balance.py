"""Work in proportion to measured speed: who takes which share, and when that changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import fsum

import numpy as np
import numpy.typing as npt

from slurmdl.train.library.deal import MAX_SHARE_FACTOR, BalanceRound, GlobalBatches, apportion
from slurmdl.train.strategies import Strategy

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
