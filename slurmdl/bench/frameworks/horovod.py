"""Horovod's DistributedOptimizer, over MPI or gloo, depending on its build."""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks import TrainingSession, import_failure
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("allreduce",)


def unavailable_reason() -> str:
    return import_failure("horovod.torch", "Horovod")


def setup(transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession:
    import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    return TrainingSession(module, hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters()))
