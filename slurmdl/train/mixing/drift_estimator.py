"""How far a model has moved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.train.stateful import Stateful

FloatArray = npt.NDArray[np.float32]

#: coordinates that are looked at
MAX_COORDINATES = 4096


class DriftEstimator(Stateful):
    """How far a model has moved since it was last marked, estimated on SAMPLES coordinates.

    Parameters
    ----------
    parameters : shape (D,), the model, which changes in place.
    sizes : elements of each of its tensors.
    """

    state_fields = ("_since",)

    def __init__(self, parameters: FloatArray, sizes: Sequence[int]) -> None:
        self._parameters = parameters
        self._indices, self._multiplicity = sample_coordinates(sizes)
        self.reset()

    def reset(self) -> None:
        """Count from the model as it is now."""
        self._reference = self._parameters[self._indices]

    def relative_drift(self) -> float:
        """|x - s| / |s|, x the model now and s the one that was marked."""
        here = self._parameters[self._indices].astype(np.float64)
        moved = float(np.dot(self._multiplicity, (here - self._reference) ** 2)) ** 0.5
        norm = float(np.dot(self._multiplicity, self._reference.astype(np.float64) ** 2)) ** 0.5
        return moved / norm if norm else math.inf if moved else 0.0


def sample_coordinates(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
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
        count = min(size, max(1, round(MAX_COORDINATES * size / whole))) if whole > MAX_COORDINATES else size
        places.append(start + (2 * np.arange(count) + 1) * size // (2 * max(count, 1)))
        stands_for.append(np.full(count, size / max(count, 1)))
        start += size
    return np.concatenate(places), np.concatenate(stands_for)
