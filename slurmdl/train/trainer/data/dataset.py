"""Images with labels: split into training and test images, standardised, and dealt out to the workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import UsageError
from slurmdl.train.trainer.data.shares import difference, shares

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Labelled:
    """What a reader finds.

    Attributes
    ----------
    images : shape (count, channels, height, width) or (count, features), of any type.
    labels : shape (count,), 0 to classes - 1.
    test : so many images at the end are meant for the test; 0 where nothing is said.
    pixelwise : whether each pixel has a mean and a deviation of its own, not each channel.
    """

    images: npt.NDArray[Any]
    labels: IntArray
    classes: int
    test: int = 0
    pixelwise: bool = False


@dataclass(frozen=True)
class Data:
    """Images and labels.

    Attributes
    ----------
    train_x, test_x : shape (count, *shape), float32, standardised by the training images.
    train_y, test_y : shape (count,), int64 labels, 0 to classes - 1.
    skew : parameter of the Dirichlet distribution of labels over the workers; None where all have alike.
    """

    train_x: FloatArray
    train_y: IntArray
    test_x: FloatArray
    test_y: IntArray
    classes: int
    skew: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return self.train_x.shape[1:]

    def label_skew(self, workers: int, seed: int) -> float:
        """How much the labels of the workers' shares differ, 0 to 1: see shares.difference."""
        return difference(self.train_y, shares(self.train_y, workers, self.skew, seed))

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        """Whole batches in one worker's share.

        Raises
        ------
        UsageError : a share is smaller than one batch.
        """
        share = len(self.train_y) // workers
        if share < batch:
            raise UsageError(f"train: --batch {batch}: a worker's share of the data has only {share} images "
                             f"({len(self.train_y)} over {workers} workers)")
        return share // batch

    def batches(self, worker: int, workers: int, batch: int, seed: int,
                done: int = 0) -> Iterator[tuple[FloatArray, IntArray]]:
        """Endless batches of one worker's share, shuffled anew in each epoch; without the first `done` of them.

        All shares have the same size, so that all workers make the same number of steps in an epoch.
        """
        steps = self.steps_per_epoch(workers, batch)
        share = shares(self.train_y, workers, self.skew, seed)[worker]
        random = np.random.default_rng((seed, worker))
        for _ in range(done // steps):
            random.permutation(share)
        for first in chain([done % steps], repeat(0)):
            order = random.permutation(share)
            for step in range(first, steps):
                chosen = order[step * batch:(step + 1) * batch]
                yield self.train_x[chosen], self.train_y[chosen]


def divide(found: Labelled, seed: int, fold: tuple[int, int] | None = None, skew: float | None = None) -> Data:
    """Take test images aside, and standardise all by the mean and deviation of the others.

    Parameters
    ----------
    fold : (i, k) takes the i-th of k random folds of all images, from 1 on, as the test images. Without it they are
        those that the set has for it, else a random fifth.

    References
    ----------
    skew: T. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data distribution for federated visual
    classification. 2019. arXiv:1909.06335
    """
    count = len(found.labels)
    if fold or not found.test:
        part, parts = fold or (1, 5)
        order = np.random.default_rng(seed).permutation(count)
        # as evenly as can be, the larger folds first
        edges = -(-count * np.arange(parts + 1) // parts)
        aside = order[edges[part - 1]:edges[part]]
        kept = np.concatenate([order[:edges[part - 1]], order[edges[part]:]])
    else:
        kept, aside = np.arange(count - found.test), np.arange(count - found.test, count)
    images = found.images.astype(np.float32)
    axes = (0,) if found.pixelwise or images.ndim == 2 else (0, 2, 3)
    mean = images[kept].mean(axes, keepdims=True)
    deviation = images[kept].std(axes, keepdims=True)
    deviation[deviation == 0] = 1  # pixels that never change, at the border
    images -= mean
    images /= deviation
    return Data(images[kept], found.labels[kept], images[aside], found.labels[aside], found.classes, skew)
