"""No compression: fp32 as it is."""

from __future__ import annotations

import numpy as np

from slurmdl.train.compressors.compressor import Bytes, FloatArray


class Plain:
    mixing = 0.5
    feedback = 1.0
    whole = True

    def size(self, length: int) -> int:
        return 4 * length

    def pack(self, vector: FloatArray, random: np.random.Generator) -> Bytes:
        return vector.copy().view(np.uint8)

    def unpack(self, packed: Bytes, out: FloatArray) -> None:
        out[:] = packed.view(np.float32)
