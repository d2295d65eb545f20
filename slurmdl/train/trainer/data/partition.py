"""Partition of the training images among the workers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def partition_indices(labels: IntArray, worker_count: int, dirichlet_alpha: float | None,
                      seed: int) -> list[IntArray]:
    """Indices of each worker's images: disjoint partitions of equal size.

    Parameters
    ----------
    dirichlet_alpha : None assigns the images round-robin. A number alpha draws each worker's label distribution from
        a Dirichlet distribution, with parameter alpha for each label if all are equally frequent; a smaller alpha
        gives a worker fewer labels. If a label is exhausted, the others replace it.

    References
    ----------
    T. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data distribution for federated visual
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


def label_skew(labels: IntArray, partitions: list[IntArray]) -> float:
    """Mean total variation distance between a worker's label distribution and the overall one, 0 to below 1."""
    count = int(labels.max()) + 1
    overall = np.bincount(labels[np.concatenate(partitions)], minlength=count) / sum(map(len, partitions))
    distributions = [np.bincount(labels[indices], minlength=count) / len(indices) for indices in partitions]
    return float(np.mean([np.abs(distribution - overall).sum() / 2 for distribution in distributions]))
