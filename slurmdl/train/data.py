"""Data sets: read, split into training and test images, standardised, and dealt out to the workers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmdl.errors import UnavailableError, UsageError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Data:
    """Images and labels.

    Attributes
    ----------
    train_x, test_x : shape (images, features), float32, standardised by the training images.
    train_y, test_y : shape (images,), int64 labels, 0 to classes - 1.
    """

    train_x: FloatArray
    train_y: IntArray
    test_x: FloatArray
    test_y: IntArray
    classes: int

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

    def batches(self, worker: int, workers: int, batch: int, seed: int) -> Iterator[tuple[FloatArray, IntArray]]:
        """Endless batches of one worker's share (every `workers`-th image), shuffled anew in each epoch.

        All shares have the same size, so that all workers make the same number of steps in an epoch.
        """
        steps = self.steps_per_epoch(workers, batch)
        share = np.arange(worker, len(self.train_y) // workers * workers, workers)
        random = np.random.default_rng((seed, worker))
        while True:
            order = random.permutation(share)
            for step in range(steps):
                chosen = order[step * batch:(step + 1) * batch]
                yield self.train_x[chosen], self.train_y[chosen]


def digits(seed: int) -> Data:
    """Handwritten digits, 1,797 images of 8 x 8, of which 360 test; the copy that scikit-learn ships.

    The file is read directly: importing scikit-learn costs seconds of start-up on every rank.

    Raises
    ------
    UnavailableError : scikit-learn is not installed.

    References
    ----------
    E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits. UCI, 1998. doi:10.24432/C50P49
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError("the data set digits needs the package scikit-learn: pip install 'slurmdl[train]'")
    file = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if file.exists():
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    else:
        from sklearn.datasets import load_digits
        bunch = load_digits()
        table = np.column_stack([bunch.data, bunch.target]).astype(np.float32)
    return split(table[:, :-1], table[:, -1].astype(np.int64), test=360, seed=seed)


def split(images: FloatArray, labels: IntArray, test: int, seed: int) -> Data:
    """Take `test` random images aside and standardise all by the mean and deviation of the others."""
    order = np.random.default_rng(seed).permutation(len(labels))
    aside, kept = order[:test], order[test:]
    mean, deviation = images[kept].mean(0), images[kept].std(0)
    deviation[deviation == 0] = 1  # pixels that never change, at the border
    images = (images - mean) / deviation
    return Data(images[kept], labels[kept], images[aside], labels[aside], int(labels.max()) + 1)


#: name -> reader(seed)
DATA: dict[str, Callable[[int], Data]] = {"digits": digits}
