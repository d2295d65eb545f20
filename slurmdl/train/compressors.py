"""What every compressor offers, and the blocks that most of them cut vectors into."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

#: elements that share a scale
SCALE_BLOCK = 256
#: largest finite number of 16 bits
FP16_MAX = np.float32(65504)


class Compressor(Protocol):
    """Turns a vector of fp32 into fewer bytes, and these into a vector near it.

    Attributes
    ----------
    mixing : the largest share of a difference between compressed models that an edge of gossip takes in (gamma of
        CHOCO-SGD, Koloskova et al. 2019, arXiv:1902.00340): the coarser the compressor, the smaller.
    feedback : the share of what was left out that is put into the next vector.
    whole : whether a model itself may go through it, and not only a difference of models.
    """

    consensus_step_size: float
    feedback_decay: float
    applies_to_models: bool

    def packed_bytes(self, length: int) -> int:
        """Bytes of a packed vector of so many elements."""

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        """The bytes of a contiguous vector, an array of their own; of shape (size(length),)."""

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        """Fill `out`, as long as the vector was, with what the bytes say."""


def num_blocks(length: int) -> int:
    """How many blocks a vector of so many elements has."""
    return -(-length // SCALE_BLOCK)


def to_blocks(vector: FloatArray) -> FloatArray:
    """The vector as blocks, shape (blocks, BLOCK); the last one is filled up with zeros."""
    whole = np.zeros(num_blocks(vector.size) * SCALE_BLOCK, np.float32)
    whole[:vector.size] = vector
    return whole.reshape(-1, SCALE_BLOCK)


def to_fp16(values: FloatArray) -> npt.NDArray[np.float16]:
    """The numbers in 16 bits; those beyond its range become the largest of it."""
    return np.clip(values, -FP16_MAX, FP16_MAX).astype(np.float16)


# MERGED: Half the bytes: IEEE 754 numbers of 16 bits, rounded to nearest.

class Fp16:
    """Relative error 2^-11 at most; below 2^-14 an absolute one of 2^-25; beyond 65,504 the number is cut off."""

    consensus_step_size = 0.5
    feedback_decay = 1.0
    applies_to_models = True

    def packed_bytes(self, length: int) -> int:
        return 2 * length

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        return to_fp16(vector).view(np.uint8)

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        out[:] = packed.view(np.float16)


# MERGED: Half a byte for each element.

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


class Int4(StochasticQuantizer):
    max_level = 7

    def packed_bytes(self, length: int) -> int:
        return 2 * num_blocks(length) + (length + 1) // 2

    def _pack_levels(self, levels: npt.NDArray[np.int8]) -> ByteArray:
        # two levels in a byte, the first in its upper half, each moved to 1 .. 15
        moved = np.zeros(levels.size + levels.size % 2, np.uint8)
        moved[:levels.size] = levels + 8
        return moved[::2] << np.uint8(4) | moved[1::2]

    def _unpack_levels(self, packed: ByteArray, length: int) -> npt.NDArray[np.int8]:
        moved = np.empty(2 * packed.size, np.int8)
        moved[::2], moved[1::2] = packed >> 4, packed & 15
        return moved[:length] - np.int8(8)


# MERGED: A byte for each element.

class Int8(StochasticQuantizer):
    max_level = 127


# MERGED: Whole numbers of few bits times a scale for each block, rounded at random so that the mean is right.



# MERGED: No compression: fp32 as it is.

class NoCompression:
    consensus_step_size = 0.5
    feedback_decay = 1.0
    applies_to_models = True

    def packed_bytes(self, length: int) -> int:
        return 4 * length

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        return vector.copy().view(np.uint8)

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        out[:] = packed.view(np.float32)


# MERGED: One bit for each element.

class Sign:
    """The sign of each element times the mean magnitude of its block.

    Of a block v of d elements it takes away |v|_1^2 / d of the square |v|_2^2, but for the rounding of the scale to
    16 bits; what is left needs feeding back. Fed back in full, by the workers and by those who make the mean, it
    swings ever further where the common model has momentum; nine tenths of it do not.

    References
    ----------
    S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi: Error feedback fixes SignSGD and other gradient compression
    schemes. ICML 2019. arXiv:1901.09847
    """

    consensus_step_size = 0.3
    feedback_decay = 0.9
    applies_to_models = False

    def packed_bytes(self, length: int) -> int:
        return 2 * num_blocks(length) + (length + 7) // 8

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        found = to_blocks(vector)
        filled = np.full(len(found), SCALE_BLOCK, np.float32)
        filled[-1:] = vector.size - SCALE_BLOCK * (len(found) - 1)
        scale = to_fp16(np.abs(found).sum(axis=1) / filled)
        return np.concatenate([scale.view(np.uint8), np.packbits(vector >= 0)])

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        count = num_blocks(out.size)
        scale = packed[:2 * count].view(np.float16).astype(np.float32)
        out[:] = np.unpackbits(packed[2 * count:], count=out.size)
        out *= 2
        out -= 1
        out *= np.repeat(scale, SCALE_BLOCK)[:out.size]


# MERGED: A tenth of the elements.

class TopK:
    """The KEPT elements of largest magnitude of each block, in 16 bits, each with its place in the block.

    Leaves at most 1 - KEPT / BLOCK of the vector's square, but for the rounding to 16 bits; what is left needs
    feeding back, though not in full (see sign).

    References
    ----------
    S. U. Stich, J.-B. Cordonnier, M. Jaggi: Sparsified SGD with memory. NeurIPS 2018. arXiv:1809.07599
    """

    consensus_step_size = 0.1
    feedback_decay = 0.9
    applies_to_models = False
    K = 26

    def packed_bytes(self, length: int) -> int:
        return 3 * self.K * num_blocks(length)

    def compress(self, vector: FloatArray, rng: np.random.Generator) -> ByteArray:
        found = to_blocks(vector)
        places = np.argpartition(np.abs(found), SCALE_BLOCK - self.K, axis=1)[:, SCALE_BLOCK - self.K:]
        values = to_fp16(np.take_along_axis(found, places, axis=1))
        return np.concatenate([values.reshape(-1).view(np.uint8), places.reshape(-1).astype(np.uint8)])

    def decompress(self, packed: ByteArray, out: FloatArray) -> None:
        count = num_blocks(out.size)
        values = packed[:2 * self.K * count].view(np.float16).reshape(count, self.K)
        places = packed[2 * self.K * count:].reshape(count, self.K).astype(np.int64)
        found = np.zeros((count, SCALE_BLOCK), np.float32)
        np.put_along_axis(found, places, values.astype(np.float32), axis=1)
        out[:] = found.reshape(-1)[:out.size]


# MERGED: How vectors are made shorter on the way.

__all__ = ["COMPRESSORS", "Compressor"]

COMPRESSORS: dict[str, Compressor] = {"none": NoCompression(), "fp16": Fp16(), "int8": Int8(), "int4": Int4(), "sign": Sign(),
                                      "topk": TopK()}
