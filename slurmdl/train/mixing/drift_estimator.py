"""Drift of a model from a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.train.stateful import Stateful

#: sampled coordinates
MAX_COORDINATES = 4096


class DriftEstimator(Stateful):
    """Drift of a model since the last reset, estimated on MAX_COORDINATES coordinates.

    Args:
        parameters: shape (D,), the model, which changes in place.
        sizes: elements of each of its tensors.
    """

    state_fields = ("_reference",)

    def __init__(self, parameters: npt.NDArray[np.float32], sizes: Sequence[int]) -> None:
        self._parameters = parameters
        self._indices, self._multiplicity = sample_coordinates(sizes)
        self.reset()

    def reset(self) -> None:
        """Make the current model the reference."""
        self._reference = self._parameters[self._indices]

    def relative_drift(self) -> float:
        """|x - s| / |s|, x the model and s the reference."""
        current = self._parameters[self._indices].astype(np.float64)
        drift = float(np.dot(self._multiplicity, (current - self._reference) ** 2)) ** 0.5
        norm = float(np.dot(self._multiplicity, self._reference.astype(np.float64) ** 2)) ** 0.5
        return drift / norm if norm else math.inf if drift else 0.0


def sample_coordinates(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Sample evenly spaced coordinates of tensors of these sizes, consecutive in a flat vector.

    Return them, and the number of elements that each represents, both of shape (samples,): in proportion to the
    tensor's size, at least one, or all elements if they are at most MAX_COORDINATES.
    """
    total = sum(sizes)
    indices, multiplicity = [np.empty(0, np.int64)], [np.empty(0)]
    start = 0
    for size in sizes:
        count = min(size, max(1, round(MAX_COORDINATES * size / total))) if total > MAX_COORDINATES else size
        indices.append(start + (2 * np.arange(count) + 1) * size // (2 * max(count, 1)))
        multiplicity.append(np.full(count, size / max(count, 1)))
        start += size
    return np.concatenate(indices), np.concatenate(multiplicity)
