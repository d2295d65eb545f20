"""Synchronization strategies. A new one is one class and one line in STRATEGIES."""

from __future__ import annotations

from collections.abc import Callable

from slurmdl.train.strategies.allreduce import make_allreduce
from slurmdl.train.strategies.gossip import make_gossip
from slurmdl.train.strategies.islands import Islands
from slurmdl.train.strategies.local_sgd import LocalSGD
from slurmdl.train.strategies.parameter_server import make_parameter_server
from slurmdl.train.strategies.strategy import Strategy, StrategyContext

__all__ = ["STRATEGIES", "Strategy", "StrategyContext", "make_strategy"]

#: name, one of plan.STRATEGIES -> factory of this rank's part
STRATEGIES: dict[str, Callable[[StrategyContext], Strategy]] = {
    "allreduce": make_allreduce, "gossip": make_gossip, "adaptive-gossip": make_gossip, "local-sgd": LocalSGD,
    "ps": make_parameter_server}


def make_strategy(ctx: StrategyContext) -> Strategy:
    """Make this rank's part in the strategy of `ctx.config`. Collective."""
    return (Islands if ctx.config.islands else STRATEGIES[ctx.config.strategy or ""])(ctx)
