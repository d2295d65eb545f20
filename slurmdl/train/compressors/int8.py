"""A byte for each element."""

from __future__ import annotations

from slurmdl.train.compressors.levels import Levels


class Int8(Levels):
    most = 127
