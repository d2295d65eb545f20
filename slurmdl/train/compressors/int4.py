"""Half a byte for each element."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.train.compressors.compressor import ByteArray, num_blocks
from slurmdl.train.compressors.levels import StochasticQuantizer


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
