"""What every compressor offers, and the blocks that most of them cut vectors into."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

#: elements that share a scale
BLOCK = 256
#: largest finite number of 16 bits
LARGEST = np.float32(65504)


class Compressor(Protocol):
    """Turns a vector of fp32 into fewer bytes, and these into a vector near it.

    Attributes
    ----------
    mixing : the largest share of a difference between compressed models that an edge of gossip takes in (gamma of
        CHOCO-SGD, Koloskova et al. 2019, arXiv:1902.00340): the coarser the compressor, the smaller.
    feedback : the share of what was left out that is put into the next vector.
    whole : whether a model itself may go through it, and not only a difference of models.
    """

    mixing: float
    feedback: float
    whole: bool

    def size(self, length: int) -> int:
        """Bytes of a packed vector of so many elements."""

    def pack(self, vector: FloatArray, random: np.random.Generator) -> Bytes:
        """The bytes of a contiguous vector, an array of their own; of shape (size(length),)."""

    def unpack(self, packed: Bytes, out: FloatArray) -> None:
        """Fill `out`, as long as the vector was, with what the bytes say."""


def blocks(length: int) -> int:
    """How many blocks a vector of so many elements has."""
    return -(-length // BLOCK)


def cut(vector: FloatArray) -> FloatArray:
    """The vector as blocks, shape (blocks, BLOCK); the last one is filled up with zeros."""
    whole = np.zeros(blocks(vector.size) * BLOCK, np.float32)
    whole[:vector.size] = vector
    return whole.reshape(-1, BLOCK)


def halved(numbers: FloatArray) -> npt.NDArray[np.float16]:
    """The numbers in 16 bits; those beyond its range become the largest of it."""
    return np.clip(numbers, -LARGEST, LARGEST).astype(np.float16)
