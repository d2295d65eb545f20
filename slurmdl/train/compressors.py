"""Compressors of float32 vectors. A new one is one class in COMPRESSORS, and its size in comm_layout.packed_bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from slurmdl import comm_layout
from slurmdl.comm_layout import SCALE_BLOCK

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

#: largest finite float16
FP16_MAX = np.float32(65504)


class Compressor(ABC):
    """Lossy compression of a float32 vector.

    Attributes:
        name: of the compression, a key of COMPRESSORS.
        consensus_step_size: largest share of a difference between compressed models that a gossip edge mixes in
            (gamma of CHOCO-SGD, Koloskova et al. 2019, arXiv:1902.00340); smaller for coarser compressors.
        feedback_decay: share of the compression error that is added to the next vector.
        applies_to_models: whether it compresses models, and not only their differences.
    """

    name: str
    consensus_step_size = 0.5
    feedback_decay = 1.0
    applies_to_models = False

    def packed_bytes(self, length: int) -> int:
        """Bytes of a compressed vector of `length` elements."""
        return comm_layout.packed_bytes(self.name, length)

    @abstractmethod
    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        """Compress a contiguous vector into a new array of shape (packed_bytes(length),)."""

    @abstractmethod
    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        """Decompress into `out`, of the length of the vector."""


def num_blocks(length: int) -> int:
    """Number of scale blocks of a vector."""
    return -(-length // SCALE_BLOCK)


def to_blocks(vector: FloatArray) -> FloatArray:
    """Copy the vector into shape (blocks, SCALE_BLOCK), padded with zeros."""
    padded = np.zeros(num_blocks(vector.size) * SCALE_BLOCK, np.float32)
    padded[:vector.size] = vector
    return padded.reshape(-1, SCALE_BLOCK)


def _block_sizes(length: int) -> FloatArray:
    """Elements of each block, without padding."""
    sizes = np.full(num_blocks(length), SCALE_BLOCK, np.float32)
    sizes[-1:] = length - SCALE_BLOCK * (len(sizes) - 1)
    return sizes


def to_fp16(values: FloatArray) -> npt.NDArray[np.float16]:
    """Convert to float16, clipped to its range."""
    return np.clip(values, -FP16_MAX, FP16_MAX).astype(np.float16)


def _unpack_scales(packed: ByteArray, length: int) -> tuple[FloatArray, ByteArray]:
    """Scale of each of `length` elements, and the bytes after the float16 scales of the blocks."""
    scale_bytes = 2 * num_blocks(length)
    block_scales = packed[:scale_bytes].view(np.float16).astype(np.float32)
    return np.repeat(block_scales, SCALE_BLOCK)[:length], packed[scale_bytes:]


class NoCompression(Compressor):
    """float32 without change."""

    name = "none"
    applies_to_models = True

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        return vector.copy().view(np.uint8)

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        out[:] = packed.view(np.float32)


class Fp16(Compressor):
    """float16: relative error at most 2^-11, below 2^-14 absolute error 2^-25; clipped at 65,504."""

    name = "fp16"
    applies_to_models = True

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        return to_fp16(vector).view(np.uint8)

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        out[:] = packed.view(np.float16)


class Int8(Compressor):
    """Integers times a scale per block, rounded stochastically: unbiased, with errors below the scale.

    The scale is the block's largest magnitude over `max_level`, rounded up to float16.

    Reference: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic: QSGD: communication-efficient SGD via gradient
    quantization and encoding. NeurIPS 2017. arXiv:1610.02132
    """

    name = "int8"
    #: levels are -max_level to max_level
    max_level = 127

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        blocks = to_blocks(vector)
        exact_scale = np.abs(blocks).max(axis=1, initial=0) / np.float32(self.max_level)
        scale = to_fp16(exact_scale)
        rounded_down = (scale < exact_scale) & (exact_scale < FP16_MAX)
        scale[rounded_down] = np.nextafter(scale[rounded_down], np.float16(np.inf))
        blocks /= np.where(scale > 0, scale, 1).astype(np.float32)[:, None]
        blocks += rng.random(blocks.shape, np.float32)
        np.clip(np.floor(blocks, out=blocks), -self.max_level, self.max_level, out=blocks)
        levels = blocks.reshape(-1)[:vector.size].astype(np.int8)
        return np.concatenate([scale.view(np.uint8), self._pack_levels(levels)])

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        scales, levels = _unpack_scales(packed, out.size)
        np.multiply(self._unpack_levels(levels, out.size), scales, out=out)

    def _pack_levels(self, levels: npt.NDArray[np.int8]) -> ByteArray:
        return levels.view(np.uint8)

    def _unpack_levels(self, packed: ByteArray, length: int) -> npt.NDArray[np.int8]:
        return packed.view(np.int8)


class Int4(Int8):
    """As Int8, with fewer levels: level + 8 in half a byte, of pairs the first in the upper half."""

    name = "int4"
    max_level = 7

    def _pack_levels(self, levels: npt.NDArray[np.int8]) -> ByteArray:
        shifted = np.zeros(levels.size + levels.size % 2, np.uint8)
        shifted[:levels.size] = levels + 8
        return shifted[::2] << np.uint8(4) | shifted[1::2]

    def _unpack_levels(self, packed: ByteArray, length: int) -> npt.NDArray[np.int8]:
        shifted = np.empty(2 * packed.size, np.int8)
        shifted[::2], shifted[1::2] = packed >> 4, packed & 15
        return shifted[:length] - np.int8(8)


class Sign(Compressor):
    """Sign of each element times the mean magnitude of its block.

    For a block v of d elements the error is |v|_2^2 - |v|_1^2 / d, apart from the rounding of the scale, so it needs
    error feedback. Full feedback, by workers and shard owners, oscillates with outer momentum; decay 0.9 does not.

    Reference: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi: Error feedback fixes SignSGD and other gradient
    compression schemes. ICML 2019. arXiv:1901.09847
    """

    name = "sign"
    consensus_step_size = 0.3
    feedback_decay = 0.9

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        scale = to_fp16(np.abs(to_blocks(vector)).sum(axis=1) / _block_sizes(vector.size))
        return np.concatenate([scale.view(np.uint8), np.packbits(vector >= 0)])

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        scales, signs = _unpack_scales(packed, out.size)
        out[:] = np.where(np.unpackbits(signs, count=out.size), scales, -scales)


COMPRESSORS: dict[str, Compressor] = {compressor.name: compressor for compressor in (
    NoCompression(), Fp16(), Int8(), Int4(), Sign())}
