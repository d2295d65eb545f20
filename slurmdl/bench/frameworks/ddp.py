"""PyTorch's DistributedDataParallel, over NCCL if every rank has a GPU, else over gloo."""

from __future__ import annotations

import socket
from typing import Any

from slurmdl.bench.frameworks import TrainingSession
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("allreduce",)


def unavailable_reason() -> str:
    import torch.distributed as dist

    return "" if dist.is_available() else "this PyTorch has no torch.distributed"


def setup(transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession:
    from torch.nn.parallel import DistributedDataParallel

    close = init_process_group(transport)
    model = DistributedDataParallel(module)
    return TrainingSession(model, optimizer, no_sync=model.no_sync, close=close)


def init_process_group(transport: Transport) -> Any:
    """Create the process group, with NCCL if all ranks have a GPU, else gloo, and return its destructor."""
    import torch
    import torch.distributed as dist

    with_gpus = dist.is_nccl_available() and all(transport.allgather(torch.cuda.is_available()))
    with socket.create_server(("", 0)) as free:  # a port on which rank 0 can listen
        address = transport.broadcast(f"tcp://{socket.gethostname()}:{free.getsockname()[1]}")
    dist.init_process_group("nccl" if with_gpus else "gloo", init_method=address, rank=transport.rank,
                            world_size=transport.size)
    return dist.destroy_process_group
