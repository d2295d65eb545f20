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
