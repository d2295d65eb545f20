"""Whole numbers of few bits times a scale for each block, rounded at random so that the mean is right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.train.compressors.compressor import BLOCK, LARGEST, Bytes, FloatArray, blocks, cut, halved


class Levels:
    """Base of int8 and int4: the error of an element is below the scale of its block, its mean 0.

    The scale is the block's largest magnitude over `most`, rounded up to 16 bits.

    References
    ----------
    D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic: QSGD: communication-efficient SGD via gradient
    quantization and encoding. NeurIPS 2017. arXiv:1610.02132
    """

    mixing = 0.5
    feedback = 1.0
    whole = False
    #: the largest level; levels go from -most to most
    most = 127

    def size(self, length: int) -> int:
        return 2 * blocks(length) + length

    def pack(self, vector: FloatArray, random: np.random.Generator) -> Bytes:
        found = cut(vector)
        wanted = np.abs(found).max(axis=1, initial=0) / np.float32(self.most)
        scale = halved(wanted)
        low = (scale < wanted) & (wanted < LARGEST)
        scale[low] = np.nextafter(scale[low], np.float16(np.inf))
        found /= np.where(scale > 0, scale, 1).astype(np.float32)[:, None]
        found += random.random(found.shape, np.float32)
        np.clip(np.floor(found, out=found), -self.most, self.most, out=found)
        levels = found.reshape(-1)[:vector.size].astype(np.int8)
        return np.concatenate([scale.view(np.uint8), self._bytes(levels)])

    def unpack(self, packed: Bytes, out: FloatArray) -> None:
        count = blocks(out.size)
        scale = packed[:2 * count].view(np.float16).astype(np.float32)
        out[:] = self._levels(packed[2 * count:], out.size)
        out *= np.repeat(scale, BLOCK)[:out.size]

    def _bytes(self, levels: npt.NDArray[np.int8]) -> Bytes:
        return levels.view(np.uint8)

    def _levels(self, packed: Bytes, length: int) -> npt.NDArray[np.int8]:
        return packed.view(np.int8)
