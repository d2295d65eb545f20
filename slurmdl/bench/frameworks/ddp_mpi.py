"""DistributedDataParallel over PyTorch's own MPI backend, which a build from source has on a machine with MPI."""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks import ddp
from slurmdl.bench.frameworks.framework import Training
from slurmdl.train.transports.transport import Transport

STRATEGIES = ddp.STRATEGIES


def missing() -> str:
    import torch.distributed as dist

    return ddp.missing() or ("" if dist.is_mpi_available() else "this PyTorch is built without MPI")


def start(transport: Transport, strategy: str, module: Any, optimizer: Any) -> Training:
    return ddp.train(module, optimizer, ddp.join(transport, "mpi"))
