"""How far a model has moved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.train.kept import Kept

FloatArray = npt.NDArray[np.float32]

#: coordinates that are looked at
SAMPLES = 4096


class Moved(Kept):
    """How far a model has moved since it was last marked, estimated on SAMPLES coordinates.

    Parameters
    ----------
    parameters : shape (D,), the model, which changes in place.
    sizes : elements of each of its tensors.
    """

    kept = ("_since",)

    def __init__(self, parameters: FloatArray, sizes: Sequence[int]) -> None:
        self._parameters = parameters
        self._at, self._stands_for = sample(sizes)
        self.mark()

    def mark(self) -> None:
        """Count from the model as it is now."""
        self._since = self._parameters[self._at]

    def far(self) -> float:
        """|x - s| / |s|, x the model now and s the one that was marked."""
        here = self._parameters[self._at].astype(np.float64)
        moved = float(np.dot(self._stands_for, (here - self._since) ** 2)) ** 0.5
        norm = float(np.dot(self._stands_for, self._since.astype(np.float64) ** 2)) ** 0.5
        return moved / norm if norm else math.inf if moved else 0.0


def sample(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Coordinates of all tensors, evenly spaced, and how many each of them stands for.

    Parameters
    ----------
    sizes : elements of each tensor, one after the other in a flat vector.

    Returns
    -------
    both of shape (samples,): of each tensor its share of SAMPLES, one at least, or all where there are fewer.
    """
    whole = sum(sizes)
    places, stands_for = [np.empty(0, np.int64)], [np.empty(0)]
    start = 0
    for size in sizes:
        count = min(size, max(1, round(SAMPLES * size / whole))) if whole > SAMPLES else size
        places.append(start + (2 * np.arange(count) + 1) * size // (2 * max(count, 1)))
        stands_for.append(np.full(count, size / max(count, 1)))
        start += size
    return np.concatenate(places), np.concatenate(stands_for)
