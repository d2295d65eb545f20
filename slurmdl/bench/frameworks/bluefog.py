"""BlueFog's gossip: the mean with the neighbours of the one-peer exponential graph after each step."""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks import TrainingSession, import_failure
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("gossip",)


def unavailable_reason() -> str:
    return import_failure("bluefog.torch", "BlueFog")


def setup(transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession:
    import bluefog.torch as bf

    bf.init()
    bf.broadcast_parameters(module.state_dict(), root_rank=0)
    return TrainingSession(module, bf.DistributedAdaptWithCombineOptimizer(optimizer, model=module))
