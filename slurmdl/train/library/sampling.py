"""Which samples of an epoch each worker takes, and in which of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.p2p import split_offsets

IntArray = npt.NDArray[np.int64]

#: no worker takes more than so many times what it would take if all took as much
MAX_SHARE_FACTOR = 4


@dataclass(frozen=True)
class BatchSlice:
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
    gradient_weight: float = 1.0
    model_weights: tuple[float, ...] = ()
    publishes_speed: bool = False


class SliceSampler(Protocol):
    """Deals out an epoch to one worker."""

    def slices(self, epoch: int, cursor: int, until: int | None) -> Iterator[BatchSlice]:
        """From `cursor` on; up to the run's step `until`, where that comes before the epoch's end."""

    def exhausted(self, until: int) -> bool:
        """At the end of an epoch: whether the run has come to step `until`."""


class GlobalBatches:
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

    def __init__(self, num_samples: int, worker_count: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise TrainError(f"a batch of {batch_size} samples; valid: 1 or more")
        if num_samples < worker_count:
            raise TrainError(f"{num_samples} samples for {worker_count} workers; each needs at least one")
        self.num_samples, self.worker_count, self.batch_size = num_samples, worker_count, batch_size
        self.global_batch_size = worker_count * batch_size
        self._shuffle, self._seed = shuffle, seed
        self.steps_per_epoch = num_samples // self.global_batch_size + \
            (num_samples % self.global_batch_size >= worker_count or num_samples < self.global_batch_size)

    def order(self, epoch: int) -> IntArray:
        """Indices of the samples, in the order in which they are dealt."""
        if not self._shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_samples)

    def size_at(self, cursor: int) -> int:
        """Samples of all workers in the step that begins when `cursor` samples of the epoch are dealt; 0 at its end.

        Where fewer are left than there are workers, as can be after a restart with more of them, it is at its end.
        """
        left = self.num_samples - cursor
        return self.global_batch_size if left >= self.global_batch_size + \
            self.worker_count else left if left >= self.worker_count else 0


def apportion(total: int, weights: Sequence[float], minimum: int = 0, maximum: int | None = None) -> list[int]:
    """Whole numbers in proportion to weights, each within bounds, whose sum is `total`.

    Each gets what is its due or one more, so that the greatest share per weight is as small as can be: where weights
    are speeds, all are done soonest. The bounds must leave room for the sum.
    """
    high = total if maximum is None else maximum
    left, bound = dict(enumerate(weights)), dict[int, int]()
    while True:
        rest, whole = total - sum(bound.values()), fsum(left.values())
        ideal = {place: rest * weight / whole if whole else rest / len(left) for place, weight in left.items()}
        low = {place: minimum for place, its in ideal.items() if its < minimum}
        over = {place: high for place, its in ideal.items() if its > high}
        # of both kinds those give way that are farther out: the others may yet come within their bound
        out = low if fsum(minimum - ideal[its] for its in low) >= fsum(ideal[its] - high for its in over) else over
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
class BalanceRound:
    """Steps up to an exchange, in which the workers' shares stay the same.

    Attributes
    ----------
    length : steps, in the mean over the workers.
    shares : entry i is that of worker i, 1 in the mean.
    weights, tells : see Hand; the last step of a round tells.
    """

    length: int
    shares: tuple[float, ...]
    model_weights: tuple[float, ...]
    publishes_speed: bool


class LockstepSampler(SliceSampler):
    """Deals out to workers that go along with each other: all know what each takes.

    Parameters
    ----------
    by_steps : whether shares are shares of the steps of a round, with batches alike; else of each step's samples.
    rounds : (step, longest) -> the round that begins with a step of the run.
    step : steps that the run has made.
    """

    def __init__(self, global_batches: GlobalBatches, worker: int, by_steps: bool, next_round: Callable[[int, int], BalanceRound],
                 global_step: Callable[[], int]) -> None:
        self._global_batches, self._worker, self._by_steps = global_batches, worker, by_steps
        self._next_round, self._global_step = next_round, global_step

    def slices(self, epoch: int, cursor: int, until: int | None) -> Iterator[BatchSlice]:
        step = self._global_step()
        while self._global_batches.size_at(cursor) and step != until:
            turn = self._next_round(step, self._global_batches.steps_per_epoch if until is None else until - step)
            for hand in self._step_slices(
                turn, step, cursor) if self._by_steps else self._batch_slices(turn, step, cursor):
                yield hand
            step, cursor = hand.steps.stop, hand.cursor

    def exhausted(self, until: int) -> bool:
        return self._global_step() >= until

    def _step_sizes(self, balance_round: BalanceRound, cursor: int) -> list[int]:
        """Samples of all workers in each step of a round, as far as the epoch goes."""
        totals: list[int] = []
        while len(totals) < balance_round.length and self._global_batches.size_at(cursor):
            totals.append(self._global_batches.size_at(cursor))
            cursor += totals[-1]
        return totals

    def _batch_slices(self, balance_round: BalanceRound, step: int, cursor: int) -> Iterator[BatchSlice]:
        count, totals = self._global_batches.worker_count, self._step_sizes(balance_round, cursor)
        for number, total in enumerate(totals):
            edges = self._edges(total, balance_round.shares)
            start, stop = cursor + edges[self._worker], cursor + edges[self._worker + 1]
            cursor += total
            yield BatchSlice(start, stop, cursor, range(step + number, step + number + 1), (stop - start) * count / total,
                       balance_round.model_weights, balance_round.publishes_speed and number == len(totals) - 1)

    def _edges(self, total: int, shares: tuple[float, ...]) -> list[int]:
        """Where the workers' samples of a step begin, and end."""
        count = len(shares)
        if len(set(shares)) == 1:
            return split_offsets(total, count)
        return _offsets(apportion(total, shares, 1, -(-MAX_SHARE_FACTOR * total // count)))

    def _step_slices(self, balance_round: BalanceRound, step: int, cursor: int) -> Iterator[BatchSlice]:
        worker, totals = self._worker, self._step_sizes(balance_round, cursor)
        length = len(totals)
        counts = apportion(length * len(balance_round.shares), balance_round.shares, 1, MAX_SHARE_FACTOR * length)
        edges = _offsets(apportion(sum(totals), counts))
        own, mine = counts[worker], edges[worker + 1] - edges[worker]
        for number in range(own):
            steps = range(step + length * number // own, step + length * (number + 1) // own)
            start, stop = (cursor + edges[worker] + mine * each // own for each in (number, number + 1))
            yield BatchSlice(start, stop, cursor + sum(totals[:steps.stop - step]), steps,
                       publishes_speed=balance_round.publishes_speed and number == own - 1)


def _offsets(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]
