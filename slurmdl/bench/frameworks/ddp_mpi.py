"""DistributedDataParallel over PyTorch's MPI backend, which only builds from source have."""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks import TrainingSession, ddp
from slurmdl.train.transports.transport import Transport

STRATEGIES = ddp.STRATEGIES


def unavailable_reason() -> str:
    import torch.distributed as dist

    return ddp.unavailable_reason() or ("" if dist.is_mpi_available() else "this PyTorch is built without MPI")


def setup(transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession:
    return ddp.wrap_in_ddp(module, optimizer, ddp.init_process_group(transport, "mpi"))
