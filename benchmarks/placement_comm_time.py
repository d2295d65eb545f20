"""Communication times of many placements, measured in one step: an MPI program with one rank on each node.

    srun --mpi=pmix python -m benchmarks.placement_comm_time WORK.json RESULT.json

It runs the trainer's own strategies, messages and meters on constant gradients, without PyTorch. Ranks that a
placement does not use sleep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import sandbox_mpi
from benchmarks.stub_models import NoOpOptimizer
from slurmdl.plan import COMM_PATTERNS
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.transport import Transport

SEED = 1


def main() -> None:
    """Measure each job of WORK.json (see benchmarks.sandbox_mpi).

    WORK.json is {"parameters": D, "jobs": [{"strategy", "ps", "nodes", "zones", "warm_up", "blocks", "steps"}]};
    entry i of "zones" is the zone of rank i. The result of a job is the return value of `measure`.
    """
    sandbox_mpi.measure_jobs(lambda transport, job, work: measure(transport, job, work["parameters"]))


def measure(transport: Transport, job: Mapping[str, Any], size: int) -> list[float]:
    """Return the communication seconds per iteration of the slowest worker, one mean for each block of steps.

    Gossip partners, and so the links in use, differ between steps; hence the mean.
    """
    ranks, blocks, steps = transport.size, job["blocks"], job["steps"]
    levels = ["intra_zone" if zone == job["zones"][transport.rank] else "inter_zone" for zone in job["zones"]]
    p2p, comm_thread = MeteredP2P(transport, levels), CommThread(transport.supports_comm_thread)
    servers, workers = tuple(range(job["ps"])), tuple(range(job["ps"], ranks))
    gradients = np.full(size, 1e-3, np.float32)
    parameters = np.zeros_like(gradients)
    config = StrategyConfig(job["strategy"], COMM_PATTERNS[job["strategy"]][0])
    strategy = STRATEGIES[job["strategy"]](StrategyContext(
        p2p, comm_thread, workers, servers, parameters, gradients, (size,), config, SEED, job["nodes"],
        ("",) * ranks, {}, lambda: 0.01, lambda part: NoOpOptimizer()))
    seconds = []
    comm_thread.call(transport.barrier)
    for step in range(job["warm_up"] + blocks * steps):
        blocked_before = comm_thread.blocked_seconds
        if transport.rank in servers:
            strategy.serve_step(step)
        else:
            strategy.finish_gradients(step)
            strategy.after_optimizer_step(step)
        seconds.append(comm_thread.blocked_seconds - blocked_before)
    comm_thread.close()
    communication = np.array(seconds[job["warm_up"]:]).reshape(blocks, steps).mean(axis=1)
    times = transport.allgather(communication if transport.rank in workers else np.zeros(blocks))
    return [float(value) for value in np.max(times, axis=0)]


if __name__ == "__main__":
    main()
