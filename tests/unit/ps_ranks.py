"""An MPI program for test_train_ps.py: two servers and workers of unequal speed and number of steps, as JSON."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from slurmdl.train.comm_thread import CommThread
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.mpi import MpiTransport

SIZE, SERVERS, RATE = 60_000, 2, 1e-3
comm = MPI.COMM_WORLD
ranks = tuple(range(comm.Get_size()))
collective: list[str] = []


class Spy:
    """A communicator that notes collective calls."""

    LOCAL = ("Isend", "Irecv", "Iprobe", "Get_rank", "Get_size")

    def __getattr__(self, name: str) -> Any:
        if name not in self.LOCAL:
            collective.append(name)
        return getattr(comm, name)


class Descent:
    """Gradient descent that notes how far its steps should have gone."""

    def __init__(self, parameters: Any, gradients: Any) -> None:
        self._parameters, self._gradients, self.gone = parameters, gradients, 0.0

    def __call__(self, numbers: Any) -> None:
        self._parameters -= np.float32(numbers[0]) * self._gradients
        self.gone += float(numbers[0] * self._gradients[0])

    def state_bytes(self) -> Any:
        return np.zeros(3, np.uint8)

    def load_state_bytes(self, state: Any) -> None:
        assert state.size == 3


transport = MpiTransport(Spy())
rank = transport.rank
draw = random.Random(rank)


def ran(method: StrategyConfig) -> dict[str, Any]:
    parameters, gradients = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    updates: list[Descent] = []

    def updater(part: slice) -> Descent:
        updates.append(Descent(parameters[part], gradients[part]))
        return updates[0]

    its = StrategyContext(MeteredP2P(transport, ("zone",) * len(ranks)), CommThread(transport.supports_comm_thread), ranks[SERVERS:],
                  ranks[:SERVERS], parameters, gradients, (SIZE,), method, 1, ("",) * len(ranks),
                  ("",) * len(ranks), {}, lambda: RATE, updater, lambda: np.array([RATE]), (0,))
    strategy = STRATEGIES["ps"](its)
    collective.clear()
    begun = []
    if rank < SERVERS:
        number = 0
        while strategy.serve_step(number):
            number += 1
    else:
        for step in range(60 + 40 * (rank == SERVERS)):
            begun.append(time.time())
            time.sleep(draw.random() * 2e-3 * rank)
            strategy.before_optimizer_step(step)
    strategy.finish()
    called = list(collective)
    its.comm_thread.close()
    everyone, starts = comm.allgather(parameters), comm.allgather(begun)[SERVERS:]
    gone = comm.allgather(updates[0].gone if updates else 0.0)
    # a worker has made as many steps as it has begun, less the one under way
    gap = max(step - min(sum(when <= moment for when in other) for other in starts if other[-1] > moment)
              for its in starts for step, moment in enumerate(its) if any(other[-1] > moment for other in starts))
    return {"collective": [name for its in comm.allgather(called) for name in its], "gap": gap,
            "alike": all((model == everyone[SERVERS]).all() for model in everyone[SERVERS:]),
            "moved": [-float(everyone[SERVERS][0]), -float(everyone[SERVERS][-1])], "expected": gone[:SERVERS]}


result = {"stale": ran(StrategyConfig("ps", "shards", max_staleness=3)),
          "free": ran(StrategyConfig("ps", "shards", asynchronous=True))}
if rank == 0:
    print(json.dumps(result))
