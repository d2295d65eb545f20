"""Labeled images: split into training and test images, normalized, and partitioned among the workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import UsageError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LabeledImages:
    """Images of a reader.

    Attributes:
        images: shape (count, channels, height, width) or (count, features), of any type.
        labels: shape (count,), 0 to classes - 1.
        num_test: number of test images, at the end; 0 if the set has none.
        normalize_per_pixel: whether to normalize each pixel instead of each channel.
    """

    images: npt.NDArray[Any]
    labels: IntArray
    classes: int
    num_test: int = 0
    normalize_per_pixel: bool = False


@dataclass(frozen=True)
class ImageDataset:
    """Training and test images with labels.

    Attributes:
        train_x, test_x: shape (count, *shape), float32, normalized by the training images.
        train_y, test_y: shape (count,), int64 labels, 0 to classes - 1.
        dirichlet_alpha: label skew of the partitions, see `partition_indices`; None for none.
    """

    train_x: FloatArray
    train_y: IntArray
    test_x: FloatArray
    test_y: IntArray
    classes: int
    dirichlet_alpha: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train_x.shape[1:]

    def label_skew(self, worker_count: int, seed: int) -> float:
        """Mean total variation distance between a worker's label distribution and the overall one, 0 to below 1.

        0 if images are assigned round-robin.
        """
        if not self.dirichlet_alpha:
            return 0.0
        partitions = [self.train_y[indices] for indices in self._partitions(worker_count, seed)]
        counts = np.array([np.bincount(labels, minlength=int(self.train_y.max()) + 1) for labels in partitions])
        overall = counts.sum(0) / counts.sum()
        return float(np.mean(np.abs(counts / counts.sum(1, keepdims=True) - overall).sum(1) / 2))

    def steps_per_epoch(self, worker_count: int, batch_size: int) -> int:
        """Whole batches in a worker's partition; UsageError if it is smaller than one batch."""
        size = len(self.train_y) // worker_count
        if size < batch_size:
            raise UsageError(f"train: --batch-size {batch_size}: each worker has only {size} images "
                             f"({len(self.train_y)} over {worker_count} workers)")
        return size // batch_size

    def batches(self, worker_rank: int, worker_count: int, batch_size: int, seed: int,
                completed_batches: int = 0) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield endless batches of a worker's partition, shuffled in each epoch, after the completed ones.

        All partitions have the same size, so all workers make the same number of steps per epoch.
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
        return partition_indices(self.train_y, worker_count, self.dirichlet_alpha, seed)


def split_and_normalize(labeled: LabeledImages, seed: int, fold: tuple[int, int] | None = None,
                        dirichlet_alpha: float | None = None) -> ImageDataset:
    """Split off the test images, and normalize all images by mean and deviation of the training images.

    `fold` (i, k) tests on the i-th of k random folds of all images, i from 1; None on the set's own test images, or
    else on a random fifth.
    """
    count = len(labeled.labels)
    if fold or not labeled.num_test:
        index, folds = fold or (1, 5)
        order = np.random.default_rng(seed).permutation(count)
        # fold sizes differ by one at most, larger folds first
        begin, end = -(-count * np.arange(index - 1, index + 1) // folds)
        train, test = np.delete(order, np.s_[begin:end]), order[begin:end]
    else:
        train, test = np.split(np.arange(count), [count - labeled.num_test])
    images = labeled.images.astype(np.float32)
    axes = (0,) if labeled.normalize_per_pixel or images.ndim == 2 else (0, 2, 3)
    mean = images[train].mean(axes, keepdims=True)
    deviation = images[train].std(axes, keepdims=True)
    deviation[deviation == 0] = 1  # constant pixels at the border
    images -= mean
    images /= deviation
    return ImageDataset(images[train], labeled.labels[train], images[test], labeled.labels[test], labeled.classes,
                        dirichlet_alpha)


def partition_indices(labels: IntArray, worker_count: int, dirichlet_alpha: float | None,
                      seed: int) -> list[IntArray]:
    """Indices of each worker's images: disjoint partitions of equal size.

    Args:
        dirichlet_alpha: None assigns the images round-robin. A number alpha draws each worker's label distribution
            from a Dirichlet distribution, with parameter alpha for each label if all are equally frequent; a smaller
            alpha gives a worker fewer labels. If a label is exhausted, the others replace it.

    Reference: T. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data distribution for federated visual
    classification. 2019. arXiv:1909.06335
    """
    size = len(labels) // worker_count
    if dirichlet_alpha is None:
        return [np.arange(worker, size * worker_count, worker_count) for worker in range(worker_count)]
    random = np.random.default_rng((seed, 1))
    remaining = [random.permutation(np.flatnonzero(labels == label)) for label in range(int(labels.max()) + 1)]
    frequency = np.bincount(labels) / len(labels)
    partitions = []
    for _ in range(worker_count):
        available = np.array([len(indices) for indices in remaining])
        counts = np.zeros(len(remaining), np.int64)
        # a label may have frequency 0; a tiny parameter never draws it
        preference = random.dirichlet(np.maximum(dirichlet_alpha * len(remaining) * frequency, 1e-9))
        while counts.sum() < size:
            weights = np.where(available > counts, np.maximum(preference, 1e-12), 0)
            counts += random.multinomial(size - counts.sum(), weights / weights.sum())
            counts = np.minimum(counts, available)
        partitions.append(np.concatenate([indices[:count] for indices, count in zip(remaining, counts, strict=True)]))
        remaining = [indices[count:] for indices, count in zip(remaining, counts, strict=True)]
    return partitions
