"""Run SCRIPT.py or a module with ranks that average gradients as on GPUs, but on CPUs: by gloo instead of NCCL.

Each rank writes a line to stderr for each slice that it averages.
"""

import os
import runpy
import sys
from typing import Any

from slurmdl import comm_layout
from slurmdl.train.strategies.allreduce import DeviceMean
from slurmdl.train.transports.torch_distributed import TorchTransport

connect = TorchTransport.__init__


def connect_as_on_gpus(transport: TorchTransport, group: Any = None) -> None:
    connect(transport, group)
    transport.device_backends = {"cpu": "gloo"}  # also if this PyTorch has NCCL


TorchTransport.__init__ = connect_as_on_gpus  # type: ignore[method-assign]
comm_layout.MAX_BUCKET_ELEMENTS = 301  # several buckets in a small model
start = DeviceMean.start


def reported_start(mean: DeviceMean, part: slice) -> None:
    os.write(2, b"a slice is averaged\n")
    start(mean, part)


DeviceMean.start = reported_start  # type: ignore[method-assign]
program = sys.argv[1]
del sys.argv[0]
(runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
