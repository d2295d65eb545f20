"""Work in proportion to measured speed: who takes which share, and when that changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import fsum

import numpy as np
import numpy.typing as npt

from slurmdl.train.library.deal import MOST, Deal, Round, apportioned
from slurmdl.train.strategies import Strategy

Speeds = npt.NDArray[np.float32]

#: what the average of a speed keeps of itself in each step
KEPT = 0.8
#: steps from one change of the shares to the next
EVERY = 20
#: steps after which workers that go along with each other tell each other their speeds
TELLING = 5
#: how many times as long as it could be the slowest worker's step is before the shares change
GAIN = 1.03


class Speed:
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
            kept = min(KEPT, self._steps / (self._steps + 1))
            self.value = kept * self.value + (1 - kept) * samples / seconds
            self._steps += 1


class Shares:
    """Each worker's share of the work, from speeds that all who ask know alike.

    They follow the speeds only where the slowest worker's step takes more than GAIN times as long as with shares that
    are right, and not within EVERY steps of their last change: else noise would move them all the time. The part of
    a step that does not depend on its share makes the first ones a little wrong, which a second change mends.

    Attributes
    ----------
    values : entry i is that of worker i, 1 in the mean.
    """

    def __init__(self, workers: int) -> None:
        self.values = (1.0,) * workers
        self._changed = -EVERY

    def follow(self, speeds: Sequence[float], step: int) -> bool:
        """Take in the speeds that are known in a step of the run, none of them 0; whether the shares have changed."""
        times = [share / speed for share, speed in zip(self.values, speeds, strict=True)]
        mean = fsum(speeds) / len(speeds)
        if step - self._changed < EVERY or max(times) * mean <= GAIN:
            return False
        self.values, self._changed = tuple(speed / mean for speed in speeds), step
        return True


def batches(deal: Deal, shares: Sequence[float]) -> list[int]:
    """Samples of each worker in a full step."""
    return apportioned(deal.whole, shares, 1, MOST * deal.batch)


class Balance:
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

    def __init__(self, deal: Deal, by_steps: bool, strategy: Strategy, later: int,
                 gather: Callable[[float], Future[Speeds]], wait: Callable[[Future[Speeds]], Speeds]) -> None:
        self._deal, self._by_steps, self._strategy = deal, by_steps, strategy
        self._later, self._gather, self._wait = later, gather, wait
        self._shares, self._weights = Shares(deal.workers), tuple[float, ...]()
        self._rounds, self._next = 0, 0
        #: rounds after which the workers tell, and what they have told so far, of what is not used yet
        self._tells: deque[int] = deque()
        self._told: deque[Future[Speeds]] = deque()

    def round(self, step: int, longest: int) -> Round:
        """The round that begins with a step of the run, of no more than so many steps."""
        if step < self._next:  # some were dealt that nobody made
            while len(self._tells) > len(self._told):
                self._tells.pop()
        self._rounds += 1
        exchange = self._strategy.next_exchange
        if not step or exchange(step - 1) == step - 1:
            self._follow(step)
        length = min(longest, exchange(step) - step + 1)
        self._next = step + length
        tells = self._next // TELLING > step // TELLING
        if tells:
            self._tells.append(self._rounds)
        return Round(length, self._shares.values, self._weights, tells)

    def tell(self, speed: float) -> None:
        """At the end of a round that tells."""
        self._told.append(self._gather(speed))

    def _follow(self, step: int) -> None:
        while self._tells and self._tells[0] + 1 < self._rounds - self._later:
            self._tells.popleft()
            speeds = self._wait(self._told.popleft()).tolist()
            if min(speeds) > 0 and self._shares.follow(speeds, step) and not self._by_steps:
                sizes = batches(self._deal, self._shares.values)
                self._weights = tuple(size / self._deal.batch for size in sizes)


def alike(workers: int) -> Callable[[int, int], Round]:
    """Makes rounds of one step in which all workers take as much."""
    one = Round(1, (1.0,) * workers, (), False)
    return lambda step, longest: one
