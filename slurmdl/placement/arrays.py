"""What numpy does in modules that take longer to load than nodes take to choose: numpy.ma, numpy.random."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_Number = TypeVar("_Number", bound=np.generic)

#: multipliers of SplitMix64 (Steele et al., Fast splittable pseudorandom number generators, 2014)
_GOLDEN_GAMMA, _MIX_MULTIPLIER_1, _MIX_MULTIPLIER_2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9,
                                                             0x94D049BB133111EB))


def run_starts(values: npt.NDArray[Any]) -> IntArray:
    """Where each run of equal values begins; shape (runs,)."""
    new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return np.flatnonzero(new)


def sorted_unique(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """The values that differ, ascending; shape (values,)."""
    ordered = np.sort(values, axis=None)
    return ordered[run_starts(ordered)]


def seeded_permutation(count: int, seed: int) -> IntArray:
    """The numbers below `count` in an order that the seed settles; 0 for their own."""
    if not seed:
        return np.arange(count)
    mixed = np.arange(count, dtype=np.uint64) * _GOLDEN_GAMMA + np.array(seed % 2**64, np.uint64) * _MIX_MULTIPLIER_2
    mixed = (mixed ^ mixed >> np.uint64(30)) * _MIX_MULTIPLIER_1
    mixed = (mixed ^ mixed >> np.uint64(27)) * _MIX_MULTIPLIER_2
    return np.argsort(mixed ^ mixed >> np.uint64(31), kind="stable")
