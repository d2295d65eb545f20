"""Assignment of an epoch's samples to workers and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.comm_layout import split_offsets
from slurmdl.errors import TrainError
from slurmdl.text import pluralize

IntArray = npt.NDArray[np.int64]

#: maximum work of one worker, relative to an equal share
MAX_SHARE_FACTOR = 4
MIN_STEPS_BETWEEN_CHANGES = 20
#: minimum ratio of the slowest worker's step time to the optimum for a change of the shares
MIN_SPEEDUP = 1.03


@dataclass(frozen=True)
class BatchSlice:
    """Samples of one worker in one of its steps.

    Attributes:
        start, stop: range in the epoch's order.
        cursor: samples of the epoch assigned to all workers up to this slice.
        end_step: run steps up to its end, as the mean over the workers.
        gradient_weight: weight of its gradients in a mean over all workers, or those of its island.
        model_weights: entry i is the weight of worker i's model in a mean, 1 on average; () if all are equal.
        publishes_speed: whether the workers exchange their speeds after it.
    """

    start: int
    stop: int
    cursor: int
    end_step: int
    gradient_weight: float = 1.0
    model_weights: tuple[float, ...] = ()
    publishes_speed: bool = False


class SliceSampler(Protocol):
    """Assigns slices of an epoch to one worker."""

    def slices(self, epoch: int, cursor: int, until: int | None) -> Iterator[BatchSlice]:
        """Slices from `cursor` to the end of the epoch or to the run's step `until`."""

    def exhausted(self, until: int) -> bool:
        """At the end of an epoch: whether the run has reached step `until`."""


class GlobalBatches:
    """Order of the samples of each epoch, and their number in each step of all workers together.

    A step has `batch_size` samples per worker, as the mean over the workers, and `global_batch_size` in total, except
    the last step of an epoch, which has the remainder. If that is less than one sample per worker, the previous step
    includes it. With `shuffle` each epoch has a random order derived from the seed, the same on all workers.
    """

    def __init__(self, num_samples: int, worker_count: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise TrainError(f"a batch of {batch_size} samples; expected 1 or more")
        if num_samples < worker_count:
            raise TrainError(f"{pluralize(num_samples, 'sample')} for {pluralize(worker_count, 'worker')}; each "
                             "needs at least one")
        self.num_samples, self.worker_count, self.batch_size = num_samples, worker_count, batch_size
        self.global_batch_size = worker_count * batch_size
        self._shuffle, self._seed = shuffle, seed
        self.steps_per_epoch = num_samples // self.global_batch_size + (
            num_samples % self.global_batch_size >= worker_count or num_samples < self.global_batch_size)

    def order(self, epoch: int) -> IntArray:
        """Sample indices in the order of an epoch."""
        if not self._shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_samples)

    def size_at(self, cursor: int) -> int:
        """Samples of all workers in the step that starts at `cursor`; 0 at the end of the epoch.

        The epoch is over if fewer samples than workers remain, which is possible after a restart with more workers.
        """
        left = self.num_samples - cursor
        if left >= self.global_batch_size + self.worker_count:
            return self.global_batch_size
        return left if left >= self.worker_count else 0

    def step_at(self, epoch: int, cursor: int) -> int:
        """Mean number of steps of the workers at a cursor."""
        return epoch * self.steps_per_epoch + cursor // self.global_batch_size

    def worker_batch_sizes(self, shares: Sequence[float]) -> list[int]:
        """Samples of each worker in a full step."""
        return apportion(self.global_batch_size, shares, 1, MAX_SHARE_FACTOR * self.batch_size)


def apportion(total: int, weights: Sequence[float], minimum: int = 0, maximum: int | None = None) -> list[int]:
    """Split `total` into integers proportional to weights, each within bounds.

    Each is rounded up or down so that the largest share per weight is minimal: if weights are speeds, the finish time
    is minimal. The bounds must permit the total.
    """
    upper = total if maximum is None else maximum
    unbound, bound = dict(enumerate(weights)), dict[int, int]()
    while unbound:
        left, weight_sum = total - sum(bound.values()), fsum(unbound.values())
        ideal = {index: left * weight / weight_sum if weight_sum else left / len(unbound)
                 for index, weight in unbound.items()}
        below = {index: minimum for index, value in ideal.items() if value < minimum}
        above = {index: upper for index, value in ideal.items() if value > upper}
        # bind the side that violates its bound more: the other side may return within its bound
        violating = below if fsum(minimum - ideal[index] for index in below) >= \
            fsum(ideal[index] - upper for index in above) else above
        if not violating:
            break
        bound |= violating
        unbound = {index: weight for index, weight in unbound.items() if index not in violating}
    counts = bound | {index: int(ideal[index]) for index in unbound}
    # round up those who would finish first
    order = sorted(unbound, key=lambda index: (counts[index] >= ideal[index],
                                               (counts[index] + 1) / (unbound[index] or 1.0), index))
    for index in order[:total - sum(counts.values())]:
        counts[index] += 1
    return [counts[index] for index in range(len(weights))]


class WorkShares:
    """Share of the work of each worker, a function of speeds that all workers know.

    Shares change only if the slowest worker's step takes more than MIN_SPEEDUP times the optimum, and at least
    MIN_STEPS_BETWEEN_CHANGES steps after the last change, so that noise does not change them. The first shares
    are slightly wrong because part of a step does not depend on the share; a second change corrects them. Entry i of
    `values` is the share of worker i, 1 on average.
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


@dataclass(frozen=True)
class BalanceRound:
    """Steps up to an exchange, with constant shares of the workers.

    Attributes:
        length: steps, as the mean over the workers.
        shares: entry i is the share of worker i, 1 on average.
        model_weights, publishes_speed: see BatchSlice; speeds are published after the last step.
    """

    length: int
    shares: tuple[float, ...]
    model_weights: tuple[float, ...]
    publishes_speed: bool


def even_rounds(worker_count: int) -> Callable[[int, int], BalanceRound]:
    """Make a function that returns rounds of one step with equal shares."""
    even = BalanceRound(1, (1.0,) * worker_count, (), False)
    return lambda step, max_steps: even


class LockstepSampler(SliceSampler):
    """Sampler for synchronous workers: each worker computes the slices of all.

    Args:
        next_round: (step, max_steps) -> the round that starts at a step of the run.
        averaged_workers: returns the workers over which this worker's gradients are averaged; () for all.
    """

    def __init__(self, global_batches: GlobalBatches, worker: int, next_round: Callable[[int, int], BalanceRound],
                 global_step: Callable[[], int], averaged_workers: Callable[[], Sequence[int]] = tuple) -> None:
        self._global_batches, self._worker = global_batches, worker
        self._next_round, self._global_step, self._averaged_workers = next_round, global_step, averaged_workers

    def slices(self, epoch: int, cursor: int, until: int | None) -> Iterator[BatchSlice]:
        step = self._global_step()
        while self._global_batches.size_at(cursor) and step != until:
            max_steps = self._global_batches.steps_per_epoch if until is None else until - step
            for batch_slice in self._round_slices(self._next_round(step, max_steps), step, cursor):
                yield batch_slice
            step, cursor = batch_slice.end_step, batch_slice.cursor

    def exhausted(self, until: int) -> bool:
        return self._global_step() >= until

    def _step_sizes(self, balance_round: BalanceRound, cursor: int) -> list[int]:
        """Samples of all workers in each step of a round, up to the end of the epoch."""
        totals: list[int] = []
        while len(totals) < balance_round.length and self._global_batches.size_at(cursor):
            totals.append(self._global_batches.size_at(cursor))
            cursor += totals[-1]
        return totals

    def _round_slices(self, balance_round: BalanceRound, step: int, cursor: int) -> Iterator[BatchSlice]:
        totals = self._step_sizes(balance_round, cursor)
        averaged = self._averaged_workers() or range(self._global_batches.worker_count)
        for number, total in enumerate(totals):
            edges = self._edges(total, balance_round.shares)
            start, stop = cursor + edges[self._worker], cursor + edges[self._worker + 1]
            cursor += total
            samples = sum(edges[worker + 1] - edges[worker] for worker in averaged)
            yield BatchSlice(start, stop, cursor, step + number + 1,
                             (stop - start) * len(averaged) / samples, balance_round.model_weights,
                             balance_round.publishes_speed and number == len(totals) - 1)

    def _edges(self, total: int, shares: tuple[float, ...]) -> list[int]:
        """Boundaries between the workers' samples of a step."""
        count = len(shares)
        if len(set(shares)) == 1:
            return split_offsets(total, count)
        counts = apportion(total, shares, 1, -(-MAX_SHARE_FACTOR * total // count))
        return list(accumulate(counts, initial=0))
