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

from slurmdl.train.method import Method
from slurmdl.train.transports.mpi import Mpi

STEPS, SIZE = 40, 20_000
METHODS = {
    "gossip": Method("gossip", "base"), "random": Method("gossip", "random", compress="fp16", period=3),
    "adaptive": Method("adaptive-gossip", "base", compress="int4", threshold=0.03, warm_up=5),
    "push": Method("gossip", "random", asynchronous=True),
    "adaptive-push": Method("adaptive-gossip", "links", asynchronous=True, compress="fp16", threshold=0.03),
    "local-sgd": Method("local-sgd", "ring", compress="int8", period=4),
    "local-sgd by drift": Method("local-sgd", "ring", trigger="drift", threshold=0.03, warm_up=5)}
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


class Hesitant(Mpi):
    """Sleeps before some of the calls, so that messages are seen half sent and at any time."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self._random = np.random.default_rng(self.rank)

    def _hesitate(self) -> None:
        if self._random.random() < 0.1:
            time.sleep(2e-3 * self._random.random())

    def send(self, peer: int, array: Any, tag: int = 0) -> Any:
        self._hesitate()
        return super().send(peer, array, tag)

    def receive(self, peer: int, array: Any, tag: int = 0) -> Any:
        self._hesitate()
        return super().receive(peer, array, tag)

    def probe(self, tag: int) -> int | None:
        self._hesitate()
        return super().probe(tag)

    def test(self, requests: Sequence[Any]) -> bool:
        self._hesitate()
        return super().test(requests)


def main() -> None:
    comm = MPI.COMM_WORLD
    result = {}
    for name, method in METHODS.items():
        spy = Spy(comm)
        played = live(Hesitant(spy), method, STEPS, **FURTHER)
        result[name] = comm.gather({
            "first": played.first, "last": played.last, "added": played.added,
            "weight": played.strategy.weight, "fired": played.strategy.fired, "sent": sum(played.sent),
            "exchanges": played.exchanges, "collective": sorted(spy.noted)})
    if comm.Get_rank() == 0:
        with open(sys.argv[1], "wb") as file:
            pickle.dump(result, file)


if __name__ == "__main__":
    main()
