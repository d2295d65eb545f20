"""MPI program of test_train_ps.py: two servers, and workers of unequal speed and number of steps; prints JSON."""

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

SIZE, SERVERS, LR = 60_000, 2, 1e-3
comm = MPI.COMM_WORLD
ranks = tuple(range(comm.Get_size()))
collectives: list[str] = []


class RecordingComm:
    """A communicator that records collective calls."""

    LOCAL = ("Isend", "Irecv", "Iprobe", "Get_rank", "Get_size")

    def __getattr__(self, name: str) -> Any:
        if name not in self.LOCAL:
            collectives.append(name)
        return getattr(comm, name)


class RecordingDescent:
    """Gradient descent that records the expected change."""

    def __init__(self, parameters: Any, gradients: Any) -> None:
        self._parameters, self._gradients, self.expected_change = parameters, gradients, 0.0

    def __call__(self, hyperparameters: Any) -> None:
        self._parameters -= np.float32(hyperparameters[0]) * self._gradients
        self.expected_change += float(hyperparameters[0] * self._gradients[0])

    def state_bytes(self) -> Any:
        return np.zeros(3, np.uint8)

    def load_state_bytes(self, state: Any) -> None:
        assert state.size == 3


transport = MpiTransport(RecordingComm())
rank = transport.rank
jitter = random.Random(rank)


def run_servers(config: StrategyConfig) -> dict[str, Any]:
    parameters, gradients = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    optimizers: list[RecordingDescent] = []

    def make_optimizer(part: slice) -> RecordingDescent:
        optimizers.append(RecordingDescent(parameters[part], gradients[part]))
        return optimizers[0]

    no_zones = ("",) * len(ranks)
    ctx = StrategyContext(MeteredP2P(transport, ("intra_zone",) * len(ranks)),
                          CommThread(transport.supports_comm_thread), ranks[SERVERS:], ranks[:SERVERS], parameters,
                          gradients, (SIZE,), config, 1, no_zones, no_zones, {}, lambda: LR, make_optimizer,
                          lambda: np.array([LR]), (0,))
    strategy = STRATEGIES["ps"](ctx)
    collectives.clear()
    if rank < SERVERS:
        step = 0
        while strategy.serve_step(step):
            step += 1
    else:
        for step in range(60 + 40 * (rank == SERVERS)):
            time.sleep(jitter.random() * 2e-3 * rank)
            strategy.before_optimizer_step(step)
    strategy.finish()
    step_collectives = list(collectives)
    ctx.comm_thread.close()
    models = comm.allgather(parameters)
    expected = comm.allgather(optimizers[0].expected_change if optimizers else 0.0)
    return {"collectives": [name for names in comm.allgather(step_collectives) for name in names],
            "identical": all((model == models[SERVERS]).all() for model in models[SERVERS:]),
            "change": [-float(models[SERVERS][0]), -float(models[SERVERS][-1])], "expected": expected[:SERVERS]}


result = run_servers(StrategyConfig("ps", "shards", asynchronous=True))
if rank == 0:
    print(json.dumps(result))
