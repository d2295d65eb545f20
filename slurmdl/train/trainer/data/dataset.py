"""Images with labels: split into training and test images, standardised, and dealt out to the workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import UsageError
from slurmdl.train.trainer.data.partition import label_skew, partition_indices

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LabeledImages:
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
    num_test: int = 0
    normalize_per_pixel: bool = False


@dataclass(frozen=True)
class ImageDataset:
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
    dirichlet_alpha: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return self.train_x.shape[1:]

    def label_skew(self, worker_count: int, seed: int) -> float:
        """How much the labels of the workers' shares differ, 0 to 1: see shares.difference."""
        return label_skew(self.train_y, partition_indices(self.train_y, worker_count, self.dirichlet_alpha, seed))

    def steps_per_epoch(self, worker_count: int, batch_size: int) -> int:
        """Whole batches in one worker's share.

        Raises
        ------
        UsageError : a share is smaller than one batch.
        """
        share = len(self.train_y) // worker_count
        if share < batch_size:
            raise UsageError(f"train: --batch {batch_size}: a worker's share of the data has only {share} images "
                             f"({len(self.train_y)} over {worker_count} workers)")
        return share // batch_size

    def batches(self, worker_rank: int, worker_count: int, batch_size: int, seed: int,
                completed_batches: int = 0) -> Iterator[tuple[FloatArray, IntArray]]:
        """Endless batches of one worker's share, shuffled anew in each epoch; without the first `done` of them.

        All shares have the same size, so that all workers make the same number of steps in an epoch.
        """
        steps = self.steps_per_epoch(worker_count, batch_size)
        share = partition_indices(self.train_y, worker_count, self.dirichlet_alpha, seed)[worker_rank]
        random = np.random.default_rng((seed, worker_rank))
        for _ in range(completed_batches // steps):
            random.permutation(share)
        for first in chain([completed_batches % steps], repeat(0)):
            order = random.permutation(share)
            for step in range(first, steps):
                chosen = order[step * batch_size:(step + 1) * batch_size]
                yield self.train_x[chosen], self.train_y[chosen]


def split_and_normalize(labeled: LabeledImages, seed: int,
                        fold: tuple[int, int] | None = None, dirichlet_alpha: float | None = None) -> ImageDataset:
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
    count = len(labeled.labels)
    if fold or not labeled.num_test:
        part, parts = fold or (1, 5)
        order = np.random.default_rng(seed).permutation(count)
        # as evenly as can be, the larger folds first
        edges = -(-count * np.arange(parts + 1) // parts)
        aside = order[edges[part - 1]:edges[part]]
        kept = np.concatenate([order[:edges[part - 1]], order[edges[part]:]])
    else:
        kept, aside = np.arange(count - labeled.num_test), np.arange(count - labeled.num_test, count)
    images = labeled.images.astype(np.float32)
    axes = (0,) if labeled.normalize_per_pixel or images.ndim == 2 else (0, 2, 3)
    mean = images[kept].mean(axes, keepdims=True)
    deviation = images[kept].std(axes, keepdims=True)
    deviation[deviation == 0] = 1  # pixels that never change, at the border
    images -= mean
    images /= deviation
    return ImageDataset(images[kept], labeled.labels[kept], images[aside],
                        labeled.labels[aside], labeled.classes, dirichlet_alpha)
