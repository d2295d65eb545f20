"""Error bounds of the compressors on arbitrary vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmdl.comm_layout import COMPRESSION_NAMES as NAMES
from slurmdl.comm_layout import SCALE_BLOCK
from slurmdl.train.compressors import COMPRESSORS, FloatArray

bounded = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def vectors(draw: st.DrawFn) -> FloatArray:
    """Vectors of any length, with blocks of very different magnitudes, and zeros."""
    length = draw(st.integers(0, 3 * SCALE_BLOCK + 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    magnitude = 10.0 ** random.uniform(draw(st.sampled_from([-9, -3, 0])), draw(st.sampled_from([1, 4])), 4)
    vector = random.standard_normal(length) * np.repeat(magnitude, SCALE_BLOCK)[:length]
    return np.where(random.random(length) < draw(st.sampled_from([0, 0.5, 1])), 0, vector).astype(np.float32)


def round_trip(name: str, vector: FloatArray, seed: int = 1) -> FloatArray:
    """Compress and decompress a vector; check the packed size."""
    before = vector.copy()
    packed = COMPRESSORS[name].compress(vector, np.random.default_rng(seed))
    assert np.array_equal(vector, before), "compress changed its input"
    assert (packed.dtype, packed.size) == (np.uint8, COMPRESSORS[name].packed_bytes(vector.size))
    assert not np.shares_memory(packed, vector)
    out = np.full_like(vector, np.nan)
    COMPRESSORS[name].decompress(packed, out)
    return out


def block_maximum(vector: FloatArray) -> FloatArray:
    """Shape (elements,): the largest magnitude in the block of each element."""
    return np.concatenate([np.full(len(block), np.abs(block).max(initial=0), np.float32) for block in np.split(
        vector, range(SCALE_BLOCK, max(vector.size, 1), SCALE_BLOCK))])


@bounded
@given(vectors())
def test_no_compression_is_exact(vector: FloatArray) -> None:
    assert np.array_equal(round_trip("none", vector), vector)


@bounded
@given(vectors())
def test_fp16_rounds_to_nearest(vector: FloatArray) -> None:
    clipped = np.clip(vector, -65504, 65504)
    assert (np.abs(round_trip("fp16", vector) - clipped) <= np.maximum(np.abs(clipped) * 2.0**-11, 2.0**-25)).all()


@bounded
@given(vectors(), st.sampled_from([("int8", 127), ("int4", 7)]))
def test_quantizer_error_is_below_block_scale(vector: FloatArray, quantizer: tuple[str, int]) -> None:
    name, max_level = quantizer
    scale = block_maximum(vector) / max_level
    # the scale is rounded up to 11 bits, or to the next multiple of 2^-24
    assert (np.abs(round_trip(name, vector) - vector) <= scale * (1 + 2.0**-10) * (1 + 1e-5) + 2.0**-24).all()
    assert (round_trip(name, np.zeros_like(vector)) == 0).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantizer_is_unbiased(name: str) -> None:
    vector = np.random.default_rng(2).standard_normal(SCALE_BLOCK).astype(np.float32)
    draws = np.mean([round_trip(name, vector, seed) for seed in range(400)], axis=0)
    scale = np.abs(vector).max() / (127 if name == "int8" else 7)
    # the standard deviation is at most scale / 2 for one draw, and scale / 40 for the mean of 400 draws
    assert np.abs(draws - vector).max() <= 5 * scale / 40
    assert abs((draws - vector).mean()) <= 5 * scale / 40 / SCALE_BLOCK**0.5
    assert np.array_equal(round_trip(name, vector, 7), round_trip(name, vector, 7))


@bounded
@given(vectors())
def test_sign_error_matches_formula(vector: FloatArray) -> None:
    out = round_trip("sign", vector)
    for block, result in zip(np.split(vector, range(SCALE_BLOCK, max(vector.size, 1), SCALE_BLOCK)),
                          np.split(out, range(SCALE_BLOCK, max(vector.size, 1), SCALE_BLOCK)), strict=True):
        if len(block):
            wide, mean = block.astype(np.float64), float(np.abs(block).mean())
            rounded = max(mean * 2.0**-11, 2.0**-25) + 1e-6 * mean
            expected = (wide**2).sum() - len(block) * mean**2
            assert ((wide - result)**2).sum() <= expected + len(block) * rounded**2 + 1e-5 * (wide**2).sum()
            assert (np.abs(result) == np.abs(result[0])).all()
            assert (result * block >= 0).all()


def test_compression_ratios() -> None:
    length = 100 * SCALE_BLOCK
    ratio = {name: 4 * length / compressor.packed_bytes(length) for name, compressor in COMPRESSORS.items()}
    assert ratio == pytest.approx({"none": 1, "fp16": 2, "int8": 3.97, "int4": 7.88, "sign": 30.1}, rel=0.01)


def test_compressors_match_option_values() -> None:
    assert tuple(COMPRESSORS) == NAMES
