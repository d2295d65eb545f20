"""Synchronization strategies. A new one is one class and one line in STRATEGIES."""

from __future__ import annotations

from collections.abc import Callable

from slurmdl.train.strategies.allreduce import Allreduce
from slurmdl.train.strategies.gossip import make_gossip
from slurmdl.train.strategies.local_sgd import LocalSGD
from slurmdl.train.strategies.parameter_server import make_parameter_server
from slurmdl.train.strategies.strategy import Strategy, StrategyContext

__all__ = ["SEND_GRADIENTS", "STRATEGIES", "Strategy", "StrategyContext"]

#: name, one of plan.STRATEGIES -> factory of this rank's part
STRATEGIES: dict[str, Callable[[StrategyContext], Strategy]] = {
    "allreduce": Allreduce, "gossip": make_gossip, "adaptive-gossip": make_gossip, "local-sgd": LocalSGD,
    "ps": make_parameter_server}

#: strategies that send gradients; the others send parameters
SEND_GRADIENTS = ("allreduce", "ps")
