"""A tenth of the elements."""

from __future__ import annotations

import numpy as np

from slurmdl.train.compressors.compressor import SCALE_BLOCK, ByteArray, FloatArray, num_blocks, to_blocks, to_fp16


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
