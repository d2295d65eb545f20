"""PyTorch's DistributedDataParallel: NCCL where every rank has a GPU, gloo elsewhere."""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks.framework import Training, rendezvous
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("allreduce",)


def missing() -> str:
    import torch.distributed as dist

    return "" if dist.is_available() else "this PyTorch has no torch.distributed"


def start(transport: Transport, strategy: str, module: Any, optimizer: Any) -> Training:
    return train(module, optimizer, join(transport))


def train(module: Any, optimizer: Any, close: Any) -> Training:
    """Once the process group is there, which `close` ends."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(module)
    return Training(model, optimizer, apart=model.no_sync, close=close)


def join(transport: Transport, backend: str = "") -> Any:
    """Make the process group of all ranks, by the backend named or that which fits; returns what ends it."""
    import torch
    import torch.distributed as dist

    if backend == "mpi":
        dist.init_process_group(backend)  # which has the ranks from MPI, as the transport has
    else:
        with_gpus = dist.is_nccl_available() and all(transport.allgather(torch.cuda.is_available()))
        dist.init_process_group("nccl" if with_gpus else "gloo", init_method=rendezvous(transport),
                                rank=transport.rank, world_size=transport.size)

    def close() -> dict[str, Any]:
        dist.destroy_process_group()
        return {}

    return close
