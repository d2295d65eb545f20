"""Horovod's DistributedOptimizer, over MPI or gloo as it was built."""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks.framework import Training, missing_module
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("allreduce",)


def missing() -> str:
    return missing_module("horovod.torch", "Horovod")


def start(transport: Transport, strategy: str, module: Any, optimizer: Any) -> Training:
    import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    return Training(module, hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters()))
