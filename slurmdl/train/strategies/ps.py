"""Parameter servers: in step, within a bound of steps, or asynchronous."""

from __future__ import annotations

from slurmdl.train.strategies.servers import Server, Worker
from slurmdl.train.strategies.stale import StaleServer, StaleWorker
from slurmdl.train.strategies.strategy import Setting, Strategy


def ps(setting: Setting) -> Strategy:
    """This rank's part. Workers in step need no bound: each server waits for all of them anyway."""
    serves = setting.messages.rank in setting.servers
    if setting.method.asynchronous or setting.method.staleness:
        return StaleServer(setting) if serves else StaleWorker(setting)
    return Server(setting) if serves else Worker(setting)
