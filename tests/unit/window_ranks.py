"""An MPI program for test_train_window.py: readers and writers of shared slots at full speed, with random delays.

Each version of a model is one number all over, so that halves of two versions are seen as such.
"""

from __future__ import annotations

import json
import random
import time

import numpy as np
from mpi4py import MPI

from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.transports.window import ModelWindow, mix_pair

SIZE, SECONDS = 50_000, 1.5
comm = MPI.COMM_WORLD
transport = MpiTransport(comm)
rank, ranks = transport.rank, tuple(range(transport.size))
draw = random.Random(rank)


def hunt_without_waiting() -> dict[str, int]:
    """Even ranks write as fast as they can; odd ones take in the newest whole model of the rank before."""
    window = ModelWindow(transport.allocate_shared, rank, ranks, SIZE)
    seen, torn, given_up, version = set(), 0, 0, 0
    model = np.zeros(SIZE, np.float32)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        version += 1
        if rank % 2 == 0:
            model.fill(version)
            window.publish(version, model)
        else:
            model.fill(0)
            given_up += not window.mix_newest(version, model, rank - 1, 1.0)
            torn += bool((model != model[0]).any())
            seen.add(float(model[0]))
        if draw.random() < 0.1:
            time.sleep(draw.random() * 1e-3)
    transport.barrier()
    window.close()
    return {"versions": version, "seen": len(seen - {0.0}), "torn": torn, "given_up": given_up}


def hunt_in_step(steps: int) -> dict[str, int]:
    """Pairs that change from step to step mix their models in place, each one half of both."""
    window = ModelWindow(transport.allocate_shared, rank, ranks, SIZE)
    model, wrong = window.live_model(rank), 0
    for step in range(steps):
        peer = rank ^ (1 + step % (len(ranks) - 1))
        model.fill(1000 * step + rank)
        window.set_flag("ready", step)
        if draw.random() < 0.2:
            time.sleep(draw.random() * 1e-3)
        window.wait_flag(peer, "ready", step)
        half = slice(0, SIZE // 2) if rank < peer else slice(SIZE // 2, SIZE)
        mix_pair(model[half], window.live_model(peer)[half], (0.25, 0.25))
        window.set_flag("mixed", step)
        window.wait_flag(peer, "mixed", step)
        wrong += bool((model != 1000 * step + 0.75 * rank + 0.25 * peer).any())
    transport.barrier()
    window.close()
    return {"wrong": wrong}


free, in_step = hunt_without_waiting(), hunt_in_step(300)
found = comm.gather({"free": free, "in_step": in_step})
if rank == 0:
    print(json.dumps(found))
