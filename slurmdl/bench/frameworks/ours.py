"""The strategies of slurmdl.train, by its library; the plan of `slurmdl srun` says who serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmdl.bench.frameworks.framework import Training
from slurmdl.plan import STRATEGIES as _STRATEGIES
from slurmdl.train.transports.transport import Transport

STRATEGIES = _STRATEGIES


def missing() -> str:
    return ""


def start(transport: Transport, strategy: str, module: Any, optimizer: Any) -> Training | None:
    from slurmdl.train import init

    run = init(transport=transport)
    run.attach(module, optimizer)

    def close() -> Mapping[str, Any]:
        run.finish()
        # a server may be the rank that has them
        return transport.broadcast(run.summary()) or {}

    if run.serves:
        run.serve()
        close()
        return None
    return Training(module, optimizer, phases=lambda: dict(run.meter.phases), hidden=lambda: run.meter.hidden,
                    close=close)
