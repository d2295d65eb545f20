"""No compression: fp32 as it is."""

from __future__ import annotations

import numpy as np

from slurmdl.train.compressors.compressor import ByteArray, FloatArray


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
