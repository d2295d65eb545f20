"""An MPI program for test_train_gossip_mpi.py: plays METHODS for real; argument: file for what came of it."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from training import live, noise

from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.mpi import MpiTransport

STEPS, SIZE = 40, 20_000
METHODS = {
    "gossip": StrategyConfig("gossip", "base"), "random": StrategyConfig("gossip", "random", compression="fp16", period=3),
    "adaptive": StrategyConfig("adaptive-gossip", "base", compression="int4", drift_threshold=0.03, trigger_warmup=5),
    "push": StrategyConfig("gossip", "random", asynchronous=True),
    "adaptive-push": StrategyConfig("adaptive-gossip", "links", asynchronous=True, compression="fp16", drift_threshold=0.03),
    "local-sgd": StrategyConfig("local-sgd", "ring", compression="int8", period=4),
    "local-sgd by drift": StrategyConfig("local-sgd", "ring", trigger="drift", drift_threshold=0.03, trigger_warmup=5)}
#: alike in each rank, whether it is real or virtual
FURTHER: dict[str, Any] = {"size": SIZE, "update": noise(0.01), "zones": "aabb", "seconds": lambda rank: 1e-3}


class Spy:
    """A communicator that notes which of its methods are called besides those for single messages."""

    SINGLE = ("Isend", "Irecv", "Iprobe", "Get_rank", "Get_size")

    def __init__(self, comm: Any) -> None:
        self._comm, self.noted = comm, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name not in self.SINGLE:
            self.noted.add(name)
        return getattr(self._comm, name)


class Hesitant(MpiTransport):
    """Sleeps before some of the calls, so that messages are seen half sent and at any time."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self._random = np.random.default_rng(self.rank)

    def _hesitate(self) -> None:
        if self._random.random() < 0.1:
            time.sleep(2e-3 * self._random.random())

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        self._hesitate()
        return super().isend(peer, array, tag)

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any:
        self._hesitate()
        return super().irecv(peer, array, tag)

    def iprobe(self, tag: int) -> int | None:
        self._hesitate()
        return super().iprobe(tag)

    def testall(self, requests: Sequence[Any]) -> bool:
        self._hesitate()
        return super().testall(requests)


def main() -> None:
    comm = MPI.COMM_WORLD
    result = {}
    for name, method in METHODS.items():
        spy = Spy(comm)
        played = live(Hesitant(spy), method, STEPS, **FURTHER)
        result[name] = comm.gather({
            "first": played.first, "last": played.last, "added": played.added,
            "weight": played.strategy.model_weight, "fired": played.strategy.exchanges, "sent": sum(played.sent),
            "exchanges": played.exchanges, "collective": sorted(spy.noted)})
    if comm.Get_rank() == 0:
        with open(sys.argv[1], "wb") as file:
            pickle.dump(result, file)


if __name__ == "__main__":
    main()
