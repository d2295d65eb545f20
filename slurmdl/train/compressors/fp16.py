"""Half the bytes: IEEE 754 numbers of 16 bits, rounded to nearest."""

from __future__ import annotations

import numpy as np

from slurmdl.train.compressors.compressor import ByteArray, FloatArray, to_fp16


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
