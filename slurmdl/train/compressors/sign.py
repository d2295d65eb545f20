"""One bit for each element."""

from __future__ import annotations

import numpy as np

from slurmdl.train.compressors.compressor import SCALE_BLOCK, ByteArray, FloatArray, num_blocks, to_blocks, to_fp16


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
