"""Half a byte for each element."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.train.compressors.compressor import Bytes, blocks
from slurmdl.train.compressors.levels import Levels


class Int4(Levels):
    most = 7

    def size(self, length: int) -> int:
        return 2 * blocks(length) + (length + 1) // 2

    def _bytes(self, levels: npt.NDArray[np.int8]) -> Bytes:
        # two levels in a byte, the first in its upper half, each moved to 1 .. 15
        moved = np.zeros(levels.size + levels.size % 2, np.uint8)
        moved[:levels.size] = levels + 8
        return moved[::2] << np.uint8(4) | moved[1::2]

    def _levels(self, packed: Bytes, length: int) -> npt.NDArray[np.int8]:
        moved = np.empty(2 * packed.size, np.int8)
        moved[::2], moved[1::2] = packed >> 4, packed & 15
        return moved[:length] - np.int8(8)
