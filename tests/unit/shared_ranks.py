"""An MPI program for test_train_shared.py: gossip in shared memory on pretended nodes of two ranks, as JSON."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
from mpi4py import MPI
from stub_models import PlainParameters

from slurmdl.train.comm_thread import CommThread
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.world import World

SIZE, STEPS = 301, 24
comm = MPI.COMM_WORLD
ranks = tuple(range(comm.Get_size()))
collective: list[str] = []


class Spy:
    """A communicator that notes collective calls."""

    LOCAL = ("Isend", "Irecv", "Iprobe", "Get_rank", "Get_size", "Get_group")

    def __getattr__(self, name: str) -> Any:
        if name not in self.LOCAL:
            collective.append(name)
        return getattr(comm, name)


transport = MpiTransport(Spy())
rank = transport.rank
before = np.random.default_rng(5).standard_normal((len(ranks), SIZE)).astype(np.float32)
draw = random.Random(rank)


def mixed(method: StrategyConfig, steps: int) -> dict[str, Any]:
    world = World(transport, method, tuple("ab"[r // 2] for r in ranks), ("",) * len(ranks),
                  ("worker",) * len(ranks), {})
    messages, model = MeteredP2P(transport, world.locality_levels()), PlainParameters(before[0].copy())
    its = StrategyContext(messages, CommThread(transport.supports_comm_thread), ranks, (), model.parameters, before[0].copy(), (SIZE,),
                  method, 3, world.nodes, world.zones, {}, lambda: 0.1, lambda part: lambda numbers: None,
                  relocate_parameters=model.settle)
    strategy = STRATEGIES[method.strategy or ""](its)
    model.parameters[:] = before[rank]
    collective.clear()
    for number in range(steps):
        if draw.random() < 0.3:
            time.sleep(draw.random() * 3e-3)
        strategy.after_optimizer_step(number)
    called = list(collective)
    strategy.finish()
    its.comm_thread.close()
    return {"after": comm.allgather(model.parameters.tolist()), "sent": comm.allgather(messages.bytes_sent),
            "collective": [name for its in comm.allgather(called) for name in its]}


result: dict[str, Any] = {
    "every": mixed(StrategyConfig("gossip", "base", shared_memory=True), STEPS),
    "third": mixed(StrategyConfig("gossip", "base", shared_memory=True, period=3), STEPS),
    "drift": mixed(StrategyConfig("adaptive-gossip", "base", shared_memory=True, trigger_warmup=4, drift_threshold=0.3), STEPS),
    "free": mixed(StrategyConfig("gossip", "random", shared_memory=True, asynchronous=True), 300)}
result |= {"collective": [name for its in result.values() for name in its["collective"]], "steps": STEPS,
           "before": before.tolist()}
if rank == 0:
    print(json.dumps(result))
