"""Whole numbers of few bits times a scale for each block, rounded at random so that the mean is right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.train.compressors.compressor import (
    FP16_MAX,
    SCALE_BLOCK,
    ByteArray,
    FloatArray,
    num_blocks,
    to_blocks,
    to_fp16,
)


class StochasticQuantizer:
    """Base of int8 and int4: the error of an element is below the scale of its block, its mean 0.

    The scale is the block's largest magnitude over `most`, rounded up to 16 bits.

    References
    ----------
    D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic: QSGD: communication-efficient SGD via gradient
    quantization and encoding. NeurIPS 2017. arXiv:1610.02132
    """

    consensus_step_size = 0.5
    feedback_decay = 1.0
    applies_to_models = False
    #: the largest level; levels go from -most to most
    max_level = 127

    def packed_bytes(self, length: int) -> int:
        return 2 * num_blocks(length) + length

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        found = to_blocks(vector)
        wanted = np.abs(found).max(axis=1, initial=0) / np.float32(self.max_level)
        scale = to_fp16(wanted)
        low = (scale < wanted) & (wanted < FP16_MAX)
        scale[low] = np.nextafter(scale[low], np.float16(np.inf))
        found /= np.where(scale > 0, scale, 1).astype(np.float32)[:, None]
        found += rng.random(found.shape, np.float32)
        np.clip(np.floor(found, out=found), -self.max_level, self.max_level, out=found)
        levels = found.reshape(-1)[:vector.size].astype(np.int8)
        return np.concatenate([scale.view(np.uint8), self._pack_levels(levels)])

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        count = num_blocks(out.size)
        scale = packed[:2 * count].view(np.float16).astype(np.float32)
        out[:] = self._unpack_levels(packed[2 * count:], out.size)
        out *= np.repeat(scale, SCALE_BLOCK)[:out.size]

    def _pack_levels(self, levels: npt.NDArray[np.int8]) -> ByteArray:
        return levels.view(np.uint8)

    def _unpack_levels(self, packed: ByteArray, length: int) -> npt.NDArray[np.int8]:
        return packed.view(np.int8)
