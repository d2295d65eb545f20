"""Communication of many placements, one after the other in one step: an MPI program with one rank on each node.

    srun --mpi=pmix python -m slurmdl.bench.replay WORK.json RESULT.json

It runs the trainer's own strategies over the trainer's own messages and meters; only the gradients are made up, so
that a placement costs no start of PyTorch. Ranks that a placement leaves out wait, asleep.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from slurmdl.plan import PATTERNS
from slurmdl.train import runtime
from slurmdl.train.messages import Messages
from slurmdl.train.meters import Meter
from slurmdl.train.strategies import STRATEGIES, Setting

SEED = 1


def main() -> None:
    """Replay each job of WORK.json.

    WORK.json is {"parameters": D, "jobs": [{"strategy", "ps", "nodes", "warm_up", "blocks", "steps"}]}, RESULT.json
    a list: for each job the figures of its blocks, as `measure` gives them.
    """
    work_file, result_file = sys.argv[1:]
    comm = runtime.connect()
    with open(work_file, encoding="utf-8") as file:
        work = json.load(file)
    here = runtime.node_name()
    everyone = Messages(comm, ("zone",) * comm.Get_size())
    found = []
    for job in work["jobs"]:
        mine = job["nodes"].index(here) if here in job["nodes"] else None
        # 1: the ranks of the job, in its order; the others wait at the end of the loop
        part = comm.Split(int(mine is not None), mine or 0)
        figures = None if mine is None else measure(part, job, work["parameters"])
        everyone.meet()
        found.append(next(figure for figure in comm.allgather(figures) if figure))
        part.Free()
    if comm.Get_rank() == 0:
        with open(result_file, "w", encoding="utf-8") as file:
            json.dump(found, file)


def measure(comm: Any, job: Mapping[str, Any], parameters: int) -> list[float]:
    """Seconds of communication per iteration, one figure for each block of steps: the slowest worker's mean.

    A mean, since the partners of gossip, and with them the links in use, differ from step to step.
    """
    size, blocks, steps = comm.Get_size(), job["blocks"], job["steps"]
    messages = Messages(comm, ("zone",) * size)
    servers, workers = tuple(range(job["ps"])), tuple(range(job["ps"], size))
    gradients = np.full(parameters, 1e-3, np.float32)
    strategy = STRATEGIES[job["strategy"]](Setting(messages, workers, servers, np.zeros_like(gradients), gradients,
                                                   lr=0.01, momentum=0.9, seed=SEED,
                                                   traffic=PATTERNS[job["strategy"]][0],
                                                   zones=("",) * size))
    meter = Meter()
    messages.meet()
    for number in range(job["warm_up"] + blocks * steps):
        with meter.step(messages):
            strategy.step(number)
    communication = np.array(meter.comm[job["warm_up"]:]).reshape(blocks, steps).mean(axis=1)
    told = comm.allgather(communication if messages.rank in workers else np.zeros(blocks))
    return [float(figure) for figure in np.max(told, axis=0)]


if __name__ == "__main__":
    main()
