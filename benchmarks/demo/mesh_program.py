"""MPI program of the demo: steps that only communicate, on a mesh of ranks.

    srun python mesh_program.py dp=4,tp=2 dp=50000,tp=1000000 STEPS SUMMARY.json METRICS.json

In each step a ring all-reduces the bytes of each dimension. The files have those members of the files of
`slurmdl train` that the demo reads.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from mpi4py import MPI

from slurmdl.train.transports.mpi import wait_until_ready


def ring_allreduce(ring: MPI.Comm, buffer: np.ndarray) -> None:
    """Sum float32 buffers in place: a reduce-scatter and an all-gather, each of size - 1 messages."""
    size, rank = ring.size, ring.rank
    if size == 1:
        return
    chunks = np.array_split(buffer, size)
    incoming = np.empty(len(chunks[0]), np.float32)
    for turn in range(2 * (size - 1)):
        sent, received = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
        part = incoming[:len(received)]
        ring.Sendrecv(sent, (rank + 1) % size, 0, part, (rank - 1) % size, 0)
        if turn < size - 1:
            received += part
        else:
            received[:] = part


def main() -> None:
    mesh, volumes = ({name: int(value) for name, value in (item.split("=") for item in text.split(","))}
                     for text in sys.argv[1:3])
    steps, summary_file, metrics_file = int(sys.argv[3]), *sys.argv[4:6]
    wait_until_ready(MPI)
    world = MPI.COMM_WORLD
    place = np.unravel_index(world.rank, tuple(mesh.values()))
    rings = []
    for axis, name in enumerate(mesh):
        others = [int(at) for other, at in enumerate(place) if other != axis]
        shape = [size for other, size in enumerate(mesh.values()) if other != axis]
        color = int(np.ravel_multi_index(others, shape)) if others else 0
        rings.append((world.Split(color, world.rank), np.ones(volumes[name] // 4, np.float32)))
    metrics = []
    for step in range(1, steps + 1):
        world.Barrier()
        begin = time.perf_counter()
        for ring, buffer in rings:
            buffer[:] = 1
            ring_allreduce(ring, buffer)
            assert buffer[0] == buffer[-1] == ring.size
        world.Barrier()
        metrics.append({"step": step, "seconds": time.perf_counter() - begin})
    nodes = world.gather(os.environ["SLURMD_NODENAME"])
    if nodes:
        with open(metrics_file, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in metrics)
        with open(summary_file, "w", encoding="utf-8") as file:
            json.dump({"rank_map": [{"node": node} for node in nodes]}, file)


main()
