"""Labeled samples: split into training and test samples, normalized, and partitioned among the workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import UsageError
from slurmdl.text import pluralize

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LabeledSamples:
    """Samples of a reader.

    Attributes:
        samples: images of shape (count, channels, height, width) or (count, features) and any type; or texts, as
            tokens of shape (count, length).
        labels: shape (count,), of images, or (count, length), of tokens; 0 to classes - 1.
        num_test: number of test samples, at the end; 0 if the set has none.
        normalize_per_pixel: whether to normalize each pixel instead of each channel.
        sections: shape (count,): the part of the text that a sample is from; None for images.
    """

    samples: npt.NDArray[Any]
    labels: IntArray
    classes: int
    num_test: int = 0
    normalize_per_pixel: bool = False
    sections: IntArray | None = None


@dataclass(frozen=True)
class LabeledDataset:
    """Training and test samples with labels.

    Attributes:
        train_x, test_x: shape (count, *shape): images as float32, normalized by the training images; or int64 tokens.
        train_y, test_y: int64 labels, 0 to classes - 1, shape (count,), or of tokens (count, *shape).
        dirichlet_alpha: label skew of the partitions, see `partition_indices`; None for none.
        train_sections: shape (count,): as LabeledSamples.sections, of the training samples.
    """

    train_x: FloatArray | IntArray
    train_y: IntArray
    test_x: FloatArray | IntArray
    test_y: IntArray
    classes: int
    dirichlet_alpha: float | None = None
    train_sections: IntArray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train_x.shape[1:]

    @property
    def is_text(self) -> bool:
        return self.train_sections is not None

    @property
    def _skewed_labels(self) -> IntArray:
        """What differs between workers if the partitions are skewed: labels of images, sections of a text."""
        return self.train_y if self.train_sections is None else self.train_sections

    def label_skew(self, worker_count: int, seed: int) -> float:
        """Mean total variation distance between a worker's label distribution and the overall one, 0 to below 1.

        0 if samples are assigned round-robin. A text has sections instead of labels.
        """
        if not self.dirichlet_alpha:
            return 0.0
        labels = self._skewed_labels
        partitions = [labels[indices] for indices in self._partitions(worker_count, seed)]
        counts = np.array([np.bincount(part, minlength=int(labels.max()) + 1) for part in partitions])
        overall = counts.sum(0) / counts.sum()
        return float(np.mean(np.abs(counts / counts.sum(1, keepdims=True) - overall).sum(1) / 2))

    def steps_per_epoch(self, worker_count: int, batch_size: int) -> int:
        """Whole batches in a worker's partition; UsageError if it is smaller than one batch."""
        size = len(self.train_y) // worker_count
        if size < batch_size:
            raise UsageError(f"train: --batch-size {batch_size}: each worker has only {pluralize(size, 'sample')} "
                             f"({len(self.train_y)} over {pluralize(worker_count, 'worker')})")
        return size // batch_size

    def batches(self, worker_rank: int, worker_count: int, batch_size: int, seed: int,
                completed_batches: int = 0) -> Iterator[tuple[FloatArray | IntArray, IntArray]]:
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
        return partition_indices(self._skewed_labels, worker_count, self.dirichlet_alpha, seed)


def split_and_normalize(labeled: LabeledSamples, seed: int, fold: tuple[int, int] | None = None,
                        dirichlet_alpha: float | None = None) -> LabeledDataset:
    """Split off the test samples, and normalize images by mean and deviation of the training images.

    `fold` (i, k) tests on the i-th of k random folds of all samples, i from 1; None on the set's own test samples, or
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
    samples, labels = labeled.samples, labeled.labels
    if labeled.sections is not None:
        return LabeledDataset(samples[train], labels[train], samples[test], labels[test], labeled.classes,
                              dirichlet_alpha, labeled.sections[train])
    images = samples.astype(np.float32)
    axes = (0,) if labeled.normalize_per_pixel or images.ndim == 2 else (0, 2, 3)
    mean = images[train].mean(axes, keepdims=True)
    deviation = images[train].std(axes, keepdims=True)
    deviation[deviation == 0] = 1  # constant pixels at the border
    images -= mean
    images /= deviation
    return LabeledDataset(images[train], labels[train], images[test], labels[test], labeled.classes, dirichlet_alpha)


def partition_indices(labels: IntArray, worker_count: int, dirichlet_alpha: float | None,
                      seed: int) -> list[IntArray]:
    """Indices of each worker's samples: disjoint partitions of equal size.

    Args:
        dirichlet_alpha: None assigns the samples round-robin. A number alpha draws each worker's label distribution
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
