"""Which images are whose."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def partition_indices(labels: IntArray, worker_count: int,
                      dirichlet_alpha: float | None, seed: int) -> list[IntArray]:
    """Indices of each worker's images; all shares have the same size, and no image is in two.

    Parameters
    ----------
    skew : None deals the images out one by one. A number alpha draws, for each worker, the shares of the labels from
        a Dirichlet distribution, alpha each where all labels are equally frequent; the smaller alpha, the fewer
        labels has a worker. Where a label runs out, the others stand in.

    References
    ----------
    T. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data distribution for federated visual
    classification. 2019. arXiv:1909.06335
    """
    size = len(labels) // worker_count
    if dirichlet_alpha is None:
        return [np.arange(worker, size * worker_count, worker_count) for worker in range(worker_count)]
    random = np.random.default_rng((seed, 1))
    stock = [random.permutation(np.flatnonzero(labels == label)) for label in range(int(labels.max()) + 1)]
    frequency = np.bincount(labels) / len(labels)
    found = []
    for _ in range(worker_count):
        left = np.array([len(its) for its in stock])
        wanted = np.zeros(len(stock), np.int64)
        # a label may have frequency 0; a tiny parameter instead never draws it
        liking = random.dirichlet(np.maximum(dirichlet_alpha * len(stock) * frequency, 1e-9))
        while wanted.sum() < size:
            some = np.where(left > wanted, np.maximum(liking, 1e-12), 0)
            more = random.multinomial(size - wanted.sum(), some / some.sum())
            wanted = np.minimum(wanted + more, left)
        found.append(np.concatenate([its[:count] for its, count in zip(stock, wanted, strict=True)]))
        stock = [its[count:] for its, count in zip(stock, wanted, strict=True)]
    return found


def label_skew(labels: IntArray, partitions: list[IntArray]) -> float:
    """How much the workers' labels differ, from 0 (all have the same) to below 1: what part of its images a worker
    would have to swap for others to have each label as often as all together, in the mean over the workers.

    This is the total variation distance between the distribution of a worker's labels and that of all.
    """
    count = int(labels.max()) + 1
    whole = np.bincount(labels[np.concatenate(partitions)], minlength=count) / sum(map(len, partitions))
    each = [np.bincount(labels[share], minlength=count) / len(share) for share in partitions]
    return float(np.mean([np.abs(its - whole).sum() / 2 for its in each]))
