"""Parameter servers: in step, within a bound of steps, or asynchronous."""

from __future__ import annotations

from slurmdl.train.strategies.servers import PSWorker, SyncPSServer
from slurmdl.train.strategies.stale import AsyncPSServer, AsyncPSWorker
from slurmdl.train.strategies.strategy import Strategy, StrategyContext


def make_parameter_server(ctx: StrategyContext) -> Strategy:
    """This rank's part. Workers in step need no bound: each server waits for all of them anyway."""
    serves = ctx.p2p.rank in ctx.servers
    if ctx.config.asynchronous or ctx.config.max_staleness:
        return AsyncPSServer(ctx) if serves else AsyncPSWorker(ctx)
    return SyncPSServer(ctx) if serves else PSWorker(ctx)
