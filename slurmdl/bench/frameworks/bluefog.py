"""BlueFog's gossip: the mean with the neighbours of the one-peer exponential graph after each step."""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks.framework import Training, missing_module
from slurmdl.train.transports.transport import Transport

STRATEGIES = ("gossip",)


def missing() -> str:
    return missing_module("bluefog.torch", "BlueFog")


def start(transport: Transport, strategy: str, module: Any, optimizer: Any) -> Training:
    import bluefog.torch as bf

    bf.init()
    bf.broadcast_parameters(module.state_dict(), root_rank=0)
    return Training(module, bf.DistributedAdaptWithCombineOptimizer(optimizer, model=module))
