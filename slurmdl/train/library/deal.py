"""Which samples of an epoch each worker takes, and in which of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.messages import bounds

IntArray = npt.NDArray[np.int64]

#: no worker takes more than so many times what it would take if all took as much
MOST = 4


@dataclass(frozen=True)
class Hand:
    """What one worker takes in one of its steps.

    Attributes
    ----------
    start, stop : its places in the order of the epoch.
    cursor : samples of the epoch that are dealt to all workers when this is.
    steps : of the run that end with it, counted from 0 as in the mean over the workers.
    weight : of its gradients in a mean over all workers.
    weights : entry i is that of worker i's model in a mean of all, 1 in the mean; () where all weigh alike.
    tells : whether the workers tell each other their speeds after it.
    """

    start: int
    stop: int
    cursor: int
    steps: range
    weight: float = 1.0
    weights: tuple[float, ...] = ()
    tells: bool = False


class Hands(Protocol):
    """Deals out an epoch to one worker."""

    def deal(self, epoch: int, cursor: int, until: int | None) -> Iterator[Hand]:
        """From `cursor` on; up to the run's step `until`, where that comes before the epoch's end."""

    def over(self, until: int) -> bool:
        """At the end of an epoch: whether the run has come to step `until`."""


class Deal:
    """An order of the samples for each epoch, and how much of it all workers take together in a step.

    A step takes `batch` samples for each worker, but for the last one of an epoch, which takes what is left; where
    that would be less than one sample each, the step before takes it.

    Parameters
    ----------
    count : samples.
    batch : samples per worker and step, in the mean over the workers.
    shuffle : in an order drawn anew for each epoch from the seed, the same on all workers; else in the data's.

    Attributes
    ----------
    whole : samples of all workers in a step.
    steps : in an epoch.

    Raises
    ------
    TrainError : fewer samples than workers.
    """

    def __init__(self, count: int, workers: int, batch: int, shuffle: bool, seed: int) -> None:
        if batch < 1:
            raise TrainError(f"a batch of {batch} samples; valid: 1 or more")
        if count < workers:
            raise TrainError(f"{count} samples for {workers} workers; each needs at least one")
        self.count, self.workers, self.batch = count, workers, batch
        self.whole = workers * batch
        self._shuffle, self._seed = shuffle, seed
        self.steps = count // self.whole + (count % self.whole >= workers or count < self.whole)

    def order(self, epoch: int) -> IntArray:
        """Indices of the samples, in the order in which they are dealt."""
        if not self._shuffle:
            return np.arange(self.count)
        return np.random.default_rng((self._seed, epoch)).permutation(self.count)

    def total(self, cursor: int) -> int:
        """Samples of all workers in the step that begins when `cursor` samples of the epoch are dealt; 0 at its end.

        Where fewer are left than there are workers, as can be after a restart with more of them, it is at its end.
        """
        left = self.count - cursor
        return self.whole if left >= self.whole + self.workers else left if left >= self.workers else 0


def apportioned(total: int, weights: Sequence[float], least: int = 0, most: int | None = None) -> list[int]:
    """Whole numbers in proportion to weights, each within bounds, whose sum is `total`.

    Each gets what is its due or one more, so that the greatest share per weight is as small as can be: where weights
    are speeds, all are done soonest. The bounds must leave room for the sum.
    """
    high = total if most is None else most
    left, bound = dict(enumerate(weights)), dict[int, int]()
    while True:
        rest, whole = total - sum(bound.values()), fsum(left.values())
        ideal = {place: rest * weight / whole if whole else rest / len(left) for place, weight in left.items()}
        low = {place: least for place, its in ideal.items() if its < least}
        over = {place: high for place, its in ideal.items() if its > high}
        # of both kinds those give way that are farther out: the others may yet come within their bound
        out = low if fsum(least - ideal[its] for its in low) >= fsum(ideal[its] - high for its in over) else over
        if not out:
            break
        bound |= out
        left = {place: weight for place, weight in left.items() if place not in out}
        if not left:
            break
    counts = bound | {place: int(its) for place, its in ideal.items() if place not in bound}
    # one more for those who would be done with it first
    first = sorted(left, key=lambda place: (counts[place] >= ideal[place],
                                            (counts[place] + 1) / (left[place] or 1.0), place))
    for place in first[:total - sum(counts.values())]:
        counts[place] += 1
    return [counts[place] for place in range(len(weights))]


@dataclass(frozen=True)
class Round:
    """Steps up to an exchange, in which the workers' shares stay the same.

    Attributes
    ----------
    length : steps, in the mean over the workers.
    shares : entry i is that of worker i, 1 in the mean.
    weights, tells : see Hand; the last step of a round tells.
    """

    length: int
    shares: tuple[float, ...]
    weights: tuple[float, ...]
    tells: bool


class InRounds(Hands):
    """Deals out to workers that go along with each other: all know what each takes.

    Parameters
    ----------
    by_steps : whether shares are shares of the steps of a round, with batches alike; else of each step's samples.
    rounds : (step, longest) -> the round that begins with a step of the run.
    step : steps that the run has made.
    """

    def __init__(self, deal: Deal, worker: int, by_steps: bool, rounds: Callable[[int, int], Round],
                 step: Callable[[], int]) -> None:
        self._deal, self._worker, self._by_steps = deal, worker, by_steps
        self._rounds, self._step = rounds, step

    def deal(self, epoch: int, cursor: int, until: int | None) -> Iterator[Hand]:
        step = self._step()
        while self._deal.total(cursor) and step != until:
            turn = self._rounds(step, self._deal.steps if until is None else until - step)
            for hand in self._steps(turn, step, cursor) if self._by_steps else self._batches(turn, step, cursor):
                yield hand
            step, cursor = hand.steps.stop, hand.cursor

    def over(self, until: int) -> bool:
        return self._step() >= until

    def _totals(self, turn: Round, cursor: int) -> list[int]:
        """Samples of all workers in each step of a round, as far as the epoch goes."""
        totals: list[int] = []
        while len(totals) < turn.length and self._deal.total(cursor):
            totals.append(self._deal.total(cursor))
            cursor += totals[-1]
        return totals

    def _batches(self, turn: Round, step: int, cursor: int) -> Iterator[Hand]:
        count, totals = self._deal.workers, self._totals(turn, cursor)
        for number, total in enumerate(totals):
            edges = self._edges(total, turn.shares)
            start, stop = cursor + edges[self._worker], cursor + edges[self._worker + 1]
            cursor += total
            yield Hand(start, stop, cursor, range(step + number, step + number + 1), (stop - start) * count / total,
                       turn.weights, turn.tells and number == len(totals) - 1)

    def _edges(self, total: int, shares: tuple[float, ...]) -> list[int]:
        """Where the workers' samples of a step begin, and end."""
        count = len(shares)
        if len(set(shares)) == 1:
            return bounds(total, count)
        return _sums(apportioned(total, shares, 1, -(-MOST * total // count)))

    def _steps(self, turn: Round, step: int, cursor: int) -> Iterator[Hand]:
        worker, totals = self._worker, self._totals(turn, cursor)
        length = len(totals)
        counts = apportioned(length * len(turn.shares), turn.shares, 1, MOST * length)
        edges = _sums(apportioned(sum(totals), counts))
        own, mine = counts[worker], edges[worker + 1] - edges[worker]
        for number in range(own):
            steps = range(step + length * number // own, step + length * (number + 1) // own)
            start, stop = (cursor + edges[worker] + mine * each // own for each in (number, number + 1))
            yield Hand(start, stop, cursor + sum(totals[:steps.stop - step]), steps,
                       tells=turn.tells and number == own - 1)


def _sums(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]
