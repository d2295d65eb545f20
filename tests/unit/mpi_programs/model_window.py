"""MPI program of test_train_window.py: readers and writers of shared models at full speed, with random delays.

All elements of a version are equal, so that torn reads are detected.
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
jitter = random.Random(rank)


def run_asynchronous() -> dict[str, int]:
    """Even ranks write continuously; odd ranks read the newest version of the previous rank."""
    window = ModelWindow(transport.allocate_shared, rank, ranks, SIZE)
    versions_read, torn, skipped, version = set(), 0, 0, 0
    model = np.zeros(SIZE, np.float32)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        version += 1
        if rank % 2 == 0:
            model.fill(version)
            window.publish(version, model)
        else:
            model.fill(0)
            skipped += not window.mix_newest(version, model, rank - 1, 1.0)
            torn += bool((model != model[0]).any())
            versions_read.add(float(model[0]))
        if jitter.random() < 0.1:
            time.sleep(jitter.random() * 1e-3)
    transport.barrier()
    window.close()
    return {"versions": version, "read": len(versions_read - {0.0}), "torn": torn, "skipped": skipped}


def run_synchronous(steps: int) -> dict[str, int]:
    """Changing pairs mix their models in place, half of both each."""
    window = ModelWindow(transport.allocate_shared, rank, ranks, SIZE)
    model, wrong = window.live_model(rank), 0
    for step in range(steps):
        peer = rank ^ (1 + step % (len(ranks) - 1))
        model.fill(1000 * step + rank)
        window.set_flag("ready", step)
        if jitter.random() < 0.2:
            time.sleep(jitter.random() * 1e-3)
        window.wait_flag(peer, "ready", step)
        half = slice(0, SIZE // 2) if rank < peer else slice(SIZE // 2, SIZE)
        mix_pair(model[half], window.live_model(peer)[half], (0.25, 0.25))
        window.set_flag("mixed", step)
        window.wait_flag(peer, "mixed", step)
        wrong += bool((model != 1000 * step + 0.75 * rank + 0.25 * peer).any())
    transport.barrier()
    window.close()
    return {"wrong": wrong}


results = comm.gather({"asynchronous": run_asynchronous(), "synchronous": run_synchronous(300)})
if rank == 0:
    print(json.dumps(results))
