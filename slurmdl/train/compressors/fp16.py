"""Half the bytes: IEEE 754 numbers of 16 bits, rounded to nearest."""

from __future__ import annotations

import numpy as np

from slurmdl.train.compressors.compressor import Bytes, FloatArray, halved


class Half:
    """Relative error 2^-11 at most; below 2^-14 an absolute one of 2^-25; beyond 65,504 the number is cut off."""

    mixing = 0.5
    feedback = 1.0
    whole = True

    def size(self, length: int) -> int:
        return 2 * length

    def pack(self, vector: FloatArray, random: np.random.Generator) -> Bytes:
        return halved(vector).view(np.uint8)

    def unpack(self, packed: Bytes, out: FloatArray) -> None:
        out[:] = packed.view(np.float16)
