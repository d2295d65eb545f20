"""Labeled images: split into training and test images, normalized, and partitioned among the workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import UsageError
from slurmdl.train.trainer.data import partition

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LabeledImages:
    """Result of a reader.

    Attributes
    ----------
    images : shape (count, channels, height, width) or (count, features), of any type.
    labels : shape (count,), 0 to classes - 1.
    num_test : number of test images, at the end; 0 if the set has none.
    normalize_per_pixel : whether to normalize each pixel instead of each channel.
    """

    images: npt.NDArray[Any]
    labels: IntArray
    classes: int
    num_test: int = 0
    normalize_per_pixel: bool = False


@dataclass(frozen=True)
class ImageDataset:
    """Training and test images with labels.

    Attributes
    ----------
    train_x, test_x : shape (count, *shape), float32, normalized by the training images.
    train_y, test_y : shape (count,), int64 labels, 0 to classes - 1.
    dirichlet_alpha : label skew of the partitions, see `partition`; None for none.
    """

    train_x: FloatArray
    train_y: IntArray
    test_x: FloatArray
    test_y: IntArray
    classes: int
    dirichlet_alpha: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image."""
        return self.train_x.shape[1:]

    def label_skew(self, worker_count: int, seed: int) -> float:
        """Label skew of the workers' partitions, see `partition.label_skew`."""
        return partition.label_skew(self.train_y, self._partitions(worker_count, seed))

    def steps_per_epoch(self, worker_count: int, batch_size: int) -> int:
        """Whole batches in a worker's partition.

        Raises
        ------
        UsageError : a partition is smaller than one batch.
        """
        size = len(self.train_y) // worker_count
        if size < batch_size:
            raise UsageError(f"train: --batch-size {batch_size}: each worker has only {size} images "
                             f"({len(self.train_y)} over {worker_count} workers)")
        return size // batch_size

    def batches(self, worker_rank: int, worker_count: int, batch_size: int, seed: int,
                completed_batches: int = 0) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield endless batches of a worker's partition, shuffled in each epoch, after the completed ones.

        All partitions have the same size, so all workers make equally many steps per epoch.
        """
        steps = self.steps_per_epoch(worker_count, batch_size)
        own = self._partitions(worker_count, seed)[worker_rank]
        random = np.random.default_rng((seed, worker_rank))
        for _ in range(completed_batches // steps):
            random.permutation(own)
        for first in chain([completed_batches % steps], repeat(0)):
            order = random.permutation(own)
            for step in range(first, steps):
                indices = order[step * batch_size:(step + 1) * batch_size]
                yield self.train_x[indices], self.train_y[indices]

    def _partitions(self, worker_count: int, seed: int) -> list[IntArray]:
        return partition.partition_indices(self.train_y, worker_count, self.dirichlet_alpha, seed)


def split_and_normalize(labeled: LabeledImages, seed: int, fold: tuple[int, int] | None = None,
                        dirichlet_alpha: float | None = None) -> ImageDataset:
    """Split off the test images, and normalize all images by mean and deviation of the training images.

    Parameters
    ----------
    fold : (i, k) to test on the i-th of k random folds of all images, i from 1. None for the set's own test images,
        or else a random fifth.
    """
    count = len(labeled.labels)
    if fold or not labeled.num_test:
        index, folds = fold or (1, 5)
        order = np.random.default_rng(seed).permutation(count)
        # fold sizes differ by one at most, larger folds first
        offsets = -(-count * np.arange(folds + 1) // folds)
        test = order[offsets[index - 1]:offsets[index]]
        train = np.concatenate([order[:offsets[index - 1]], order[offsets[index]:]])
    else:
        train, test = np.arange(count - labeled.num_test), np.arange(count - labeled.num_test, count)
    images = labeled.images.astype(np.float32)
    axes = (0,) if labeled.normalize_per_pixel or images.ndim == 2 else (0, 2, 3)
    mean = images[train].mean(axes, keepdims=True)
    deviation = images[train].std(axes, keepdims=True)
    deviation[deviation == 0] = 1  # constant pixels at the border
    images -= mean
    images /= deviation
    return ImageDataset(images[train], labeled.labels[train], images[test], labeled.labels[test], labeled.classes,
                        dirichlet_alpha)
