"""A tenth of the elements."""

from __future__ import annotations

import numpy as np

from slurmdl.train.compressors.compressor import BLOCK, Bytes, FloatArray, blocks, cut, halved


class TopK:
    """The KEPT elements of largest magnitude of each block, in 16 bits, each with its place in the block.

    Leaves at most 1 - KEPT / BLOCK of the vector's square, but for the rounding to 16 bits; what is left needs
    feeding back, though not in full (see sign).

    References
    ----------
    S. U. Stich, J.-B. Cordonnier, M. Jaggi: Sparsified SGD with memory. NeurIPS 2018. arXiv:1809.07599
    """

    mixing = 0.1
    feedback = 0.9
    whole = False
    KEPT = 26

    def size(self, length: int) -> int:
        return 3 * self.KEPT * blocks(length)

    def pack(self, vector: FloatArray, random: np.random.Generator) -> Bytes:
        found = cut(vector)
        places = np.argpartition(np.abs(found), BLOCK - self.KEPT, axis=1)[:, BLOCK - self.KEPT:]
        values = halved(np.take_along_axis(found, places, axis=1))
        return np.concatenate([values.reshape(-1).view(np.uint8), places.reshape(-1).astype(np.uint8)])

    def unpack(self, packed: Bytes, out: FloatArray) -> None:
        count = blocks(out.size)
        values = packed[:2 * self.KEPT * count].view(np.float16).reshape(count, self.KEPT)
        places = packed[2 * self.KEPT * count:].reshape(count, self.KEPT).astype(np.int64)
        found = np.zeros((count, BLOCK), np.float32)
        np.put_along_axis(found, places, values.astype(np.float32), axis=1)
        out[:] = found.reshape(-1)[:out.size]
