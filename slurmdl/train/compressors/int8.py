"""A byte for each element."""

from __future__ import annotations

from slurmdl.train.compressors.levels import StochasticQuantizer


class Int8(StochasticQuantizer):
    max_level = 127
