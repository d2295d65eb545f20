"""Array types and small array functions; numpy.ma and numpy.random take longer to import than a placement."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)

# constants of SplitMix64 (Steele et al., Fast splittable pseudorandom number generators, 2014)
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_MANTISSA_BITS = 30  # significant bits of compared values; the rest is rounding noise


def run_starts(values: npt.NDArray[Any]) -> IntArray:
    """First index of each run of equal values; shape (runs,)."""
    new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return np.flatnonzero(new)


def sorted_unique(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """Distinct values, ascending; shape (values,)."""
    ordered = np.sort(values, axis=None)
    return ordered[run_starts(ordered)]


def seeded_permutation(count: int, seed: int) -> IntArray:
    """Permutation of 0 to `count` - 1 that depends on the seed only; the identity for seed 0."""
    if not seed:
        return np.arange(count)
    mixed = np.arange(count, dtype=np.uint64) * _GOLDEN_GAMMA + np.array(seed % 2**64, np.uint64) * _MIX_MULTIPLIER_2
    mixed = (mixed ^ mixed >> np.uint64(30)) * _MIX_MULTIPLIER_1
    mixed = (mixed ^ mixed >> np.uint64(27)) * _MIX_MULTIPLIER_2
    return np.argsort(mixed ^ mixed >> np.uint64(31), kind="stable")


def new_indices(kept: IntArray, count: int) -> IntArray:
    """Position in `kept` of each old index below `count`, -1 if absent and for index -1; shape (count + 1,)."""
    positions = np.full(count + 1, -1, np.int64)
    positions[kept] = np.arange(len(kept))
    return positions


def round_mantissa(values: FloatArray) -> FloatArray:
    """Values without rounding noise."""
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(fraction * 2.0**_MANTISSA_BITS), exponent - _MANTISSA_BITS))


def transfer_seconds(byte_count: float, bandwidth: FloatArray) -> FloatArray:
    """Seconds that the bytes take at each bandwidth; infinite for bandwidth 0."""
    return np.asarray(np.divide(byte_count, bandwidth, out=np.full(len(bandwidth), np.inf), where=bandwidth > 0))
