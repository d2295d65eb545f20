"""How replicas are kept together. A new strategy is one file here and one line in STRATEGIES."""

from __future__ import annotations

from collections.abc import Callable

from slurmdl.train.strategies.allreduce import Allreduce
from slurmdl.train.strategies.gossip import gossip
from slurmdl.train.strategies.local_sgd import LocalSgd
from slurmdl.train.strategies.ps import ps
from slurmdl.train.strategies.strategy import Setting, Strategy

__all__ = ["STRATEGIES", "Setting", "Strategy"]

#: name, one of plan.STRATEGIES -> what makes this rank's part in it from a Setting
STRATEGIES: dict[str, Callable[[Setting], Strategy]] = {
    "allreduce": Allreduce, "gossip": gossip, "adaptive-gossip": gossip, "local-sgd": LocalSgd, "ps": ps}
