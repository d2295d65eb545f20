"""Gossip exchanges inside a node, through shared memory and by messages, alternating in one MPI run.

    mpirun -n 4 python -m benchmarks.strategies.shared_memory_gossip_worker WORK.json RESULT.json

It runs the trainer's own gossip on models that are not trained, so that only the exchanges take time.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import numpy as np

from benchmarks.stub_models import NoOpOptimizer, PlainParameters
from slurmdl.train import world
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.transport import Transport

SEED = 1


def main() -> None:
    """Measure the variants of WORK.json.

    WORK.json is {"parameters": D, "variants": [[name, whether it uses shared memory]], "repeats", "steps"};
    RESULT.json is {name: [seconds per exchange of the slowest rank in each repeat]}.
    """
    work_file, result_file = sys.argv[1:]
    transport = world.init_mpi()
    with open(work_file, encoding="utf-8") as file:
        work = json.load(file)
    times: dict[str, list[float]] = {name: [] for name, _ in work["variants"]}
    for repeat in range(work["repeats"]):
        for name, shared in work["variants"][::-1 if repeat % 2 else 1]:
            times[name].append(measure(transport, shared, work["parameters"], work["steps"]))
    if transport.rank == 0:
        with open(result_file, "w", encoding="utf-8") as file:
            json.dump(times, file)


def measure(transport: Transport, shared: bool, size: int, steps: int) -> float:
    """Return the seconds per exchange of the slowest rank."""
    ranks = tuple(range(transport.size))
    p2p = MeteredP2P(transport, ("intra_node",) * len(ranks))
    comm_thread = CommThread(transport.supports_comm_thread)
    model = PlainParameters(np.full(size, transport.rank, np.float32))
    config = replace(StrategyConfig("gossip", "base-2"), shared_memory=shared)
    context = StrategyContext(p2p, comm_thread, ranks, (), model.parameters, np.empty(0, np.float32), (size,), config,
                              SEED, ("",) * len(ranks), ("",) * len(ranks), {}, lambda: 0.01,
                              lambda part: NoOpOptimizer(), relocate_parameters=model.relocate_parameters)
    strategy = STRATEGIES["gossip"](context)
    strategy.after_optimizer_step(0)
    strategy.after_optimizer_step(1)
    comm_thread.call(transport.barrier)
    start = time.perf_counter()
    for number in range(2, 2 + steps):
        strategy.after_optimizer_step(number)
    seconds = (time.perf_counter() - start) / steps
    strategy.finish()
    comm_thread.close()
    if strategy.exchanges < steps or abs(float(model.parameters.mean()) - (len(ranks) - 1) / 2) > 1e-3:
        raise RuntimeError(f"{strategy.exchanges} exchanges: mean parameter {model.parameters.mean()}; "
                           f"expected at least {steps} exchanges and {(len(ranks) - 1) / 2}")
    return float(max(transport.allgather(seconds)))


if __name__ == "__main__":
    main()
