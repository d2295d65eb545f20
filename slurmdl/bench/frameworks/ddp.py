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
    from torch.nn.parallel import DistributedDataParallel

    close = join(transport)
    model = DistributedDataParallel(module)
    return Training(model, optimizer, apart=model.no_sync, close=close)


def join(transport: Transport) -> Any:
    """Make the process group of all ranks; returns what ends it."""
    import torch
    import torch.distributed as dist

    with_gpus = dist.is_nccl_available() and all(transport.allgather(torch.cuda.is_available()))
    dist.init_process_group("nccl" if with_gpus else "gloo", init_method=rendezvous(transport), rank=transport.rank,
                            world_size=transport.size)

    def close() -> dict[str, Any]:
        dist.destroy_process_group()
        return {}

    return close
