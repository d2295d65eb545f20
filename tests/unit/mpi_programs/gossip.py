"""MPI program of test_train_gossip_mpi.py: runs CONFIGS and pickles the workers' logs to argv[1]."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from strategy_harness import noise, run_worker

from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.mpi import MpiTransport

STEPS, SIZE = 40, 20_000
CONFIGS = {
    "gossip": StrategyConfig("gossip", "base-2"),
    "random": StrategyConfig("gossip", "random-matching", compression="fp16", period=3),
    "adaptive": StrategyConfig("adaptive-gossip", "base-2", compression="int4", comm_budget=0.02),
    "push": StrategyConfig("gossip", "random-matching", asynchronous=True),
    "zone-aware push": StrategyConfig("gossip", "zone-aware", asynchronous=True, compression="fp16"),
    "local-sgd": StrategyConfig("local-sgd", "ring", compression="int8", period=4)}
#: equal on MPI and virtual ranks
WORKER_OPTIONS: dict[str, Any] = {"size": SIZE, "update": noise(0.01), "zones": "aabb",
                                  "step_seconds": lambda rank: 1e-3}


class RecordingComm:
    """A communicator that records calls of all methods except point-to-point messages."""

    POINT_TO_POINT = ("Isend", "Irecv", "Iprobe", "Get_rank", "Get_size")

    def __init__(self, comm: Any) -> None:
        self._comm, self.collectives = comm, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name not in self.POINT_TO_POINT:
            self.collectives.add(name)
        return getattr(self._comm, name)


class JitterTransport(MpiTransport):
    """Sleeps before some calls, so that messages are observed in any state."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self._random = np.random.default_rng(self.rank)

    def _jitter(self) -> None:
        if self._random.random() < 0.1:
            time.sleep(2e-3 * self._random.random())

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        self._jitter()
        return super().isend(peer, array, tag)

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any:
        self._jitter()
        return super().irecv(peer, array, tag)

    def iprobe(self, tag: int) -> int | None:
        self._jitter()
        return super().iprobe(tag)

    def testall(self, requests: Sequence[Any]) -> bool:
        self._jitter()
        return super().testall(requests)


def main() -> None:
    comm = MPI.COMM_WORLD
    result = {}
    for name, config in CONFIGS.items():
        recording = RecordingComm(comm)
        log = run_worker(JitterTransport(recording), config, STEPS, **WORKER_OPTIONS)
        result[name] = comm.gather({
            "initial": log.initial, "final": log.final, "total_update": log.total_update,
            "model_weight": log.strategy.model_weight, "exchanges": log.strategy.exchanges,
            "exchange_steps": log.exchange_steps, "collectives": sorted(recording.collectives)})
    if comm.Get_rank() == 0:
        with open(sys.argv[1], "wb") as file:
            pickle.dump(result, file)


if __name__ == "__main__":
    main()
