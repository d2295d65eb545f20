"""The strategies of slurmdl.train through its library; the plan of `slurmdl srun` selects the servers."""

from __future__ import annotations

from typing import Any

from slurmdl.bench.frameworks import TrainingSession
from slurmdl.plan import STRATEGIES as STRATEGIES
from slurmdl.train.transports.transport import Transport


def unavailable_reason() -> str:
    return ""


def setup(transport: Transport, strategy: str, module: Any, optimizer: Any) -> TrainingSession | None:
    from slurmdl.train import init

    run = init(transport=transport)
    run.attach(module, optimizer)

    def close() -> Any:
        run.finish()
        return transport.broadcast(run.summary())  # rank 0, which has the summary, may be a server

    if run.is_server:
        run.serve()
        close()
        return None
    return TrainingSession(module, optimizer, phase_seconds=lambda: dict(run.meter.phases),
                           overlapped_comm=lambda: run.meter.overlapped_comm, close=close)
