"""MPI program of test_train_shared.py: shared-memory gossip on emulated nodes of two ranks; prints JSON."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.stub_models import PlainParameters
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.world import World

SIZE, STEPS = 301, 24
comm = MPI.COMM_WORLD
ranks = tuple(range(comm.Get_size()))
collectives: list[str] = []


class RecordingComm:
    """A communicator that records collective calls."""

    LOCAL = ("Isend", "Irecv", "Iprobe", "Get_rank", "Get_size", "Get_group")

    def __getattr__(self, name: str) -> Any:
        if name not in self.LOCAL:
            collectives.append(name)
        return getattr(comm, name)


transport = MpiTransport(RecordingComm())
rank = transport.rank
initial = np.random.default_rng(5).standard_normal((len(ranks), SIZE)).astype(np.float32)
jitter = random.Random(rank)


def run_gossip(config: StrategyConfig, steps: int, max_rounds: int = 1) -> dict[str, Any]:
    """Rounds of steps until models are similar: on a busy machine a rank may end its steps before others begin."""
    world = World(transport, config, tuple("ab"[r // 2] for r in ranks), ("",) * len(ranks),
                  ("worker",) * len(ranks), {})
    p2p, model = MeteredP2P(transport, world.locality_levels()), PlainParameters(initial[0].copy())
    ctx = StrategyContext(p2p, CommThread(transport.supports_comm_thread), ranks, (), model.parameters,
                          initial[0].copy(), (SIZE,), config, 3, world.nodes, world.zones, {}, lambda: 0.1,
                          lambda part: lambda hyperparameters: None, relocate_parameters=model.relocate_parameters)
    strategy = STRATEGIES[config.strategy or ""](ctx)
    model.parameters[:] = initial[rank]
    collectives.clear()
    for number in range(max_rounds):
        for step in range(number * steps, (number + 1) * steps):
            if jitter.random() < 0.3:
                time.sleep(jitter.random() * 3e-3)
            strategy.after_optimizer_step(step)
        models = ctx.comm_thread.call(lambda: comm.allgather(model.parameters))
        if np.ptp(models, axis=0).max() < 0.05 * np.ptp(initial, axis=0).max():
            break
    step_collectives = list(collectives)
    strategy.finish()
    ctx.comm_thread.close()
    return {"final": comm.allgather(model.parameters.tolist()), "bytes_sent": comm.allgather(p2p.bytes_sent),
            "collectives": [name for names in comm.allgather(step_collectives) for name in names]}


runs = {
    "every": run_gossip(StrategyConfig("gossip", "base-2", shared_memory=True), STEPS),
    "third": run_gossip(StrategyConfig("gossip", "base-2", shared_memory=True, period=3), STEPS),
    "asynchronous": run_gossip(
        StrategyConfig("gossip", "random-matching", shared_memory=True, asynchronous=True), 300, max_rounds=10)}
if rank == 0:
    print(json.dumps({**runs, "collectives": [name for run in runs.values() for name in run["collectives"]],
                      "steps": STEPS, "initial": initial.tolist()}))
