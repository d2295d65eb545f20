"""How vectors are made shorter on the way.

A new compressor is one file here, one line in COMPRESSORS, and its name in method.COMPRESSORS.
"""

from __future__ import annotations

from slurmdl.train.compressors.compressor import Compressor
from slurmdl.train.compressors.fp16 import Fp16
from slurmdl.train.compressors.int4 import Int4
from slurmdl.train.compressors.int8 import Int8
from slurmdl.train.compressors.none import NoCompression
from slurmdl.train.compressors.sign import Sign
from slurmdl.train.compressors.topk import TopK

__all__ = ["COMPRESSORS", "Compressor"]

COMPRESSORS: dict[str, Compressor] = {"none": NoCompression(), "fp16": Fp16(), "int8": Int8(), "int4": Int4(), "sign": Sign(),
                                      "topk": TopK()}
