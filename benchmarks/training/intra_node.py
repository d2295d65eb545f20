"""Allreduce between the ranks of one node: the library beside DistributedDataParallel over gloo.

Ranks without communication are the upper limit. The control is the library with messages instead of shared memory.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.results import Row, make_row
from benchmarks.training.overhead import NETWORKS, make_network, time_steps
from benchmarks.training.rank_launch import run_ranks

RANKS, REPEATS = (2, 4, 8), 5
#: index in NETWORKS -> goal for the rate beside DistributedDataParallel with 4 ranks, and the parameters in words
MODELS = {1: (1.8, "1.1 million parameters"), 2: (1.4, "25 million parameters")}
GOAL_RANKS, MIN_OF_FREE = 4, 0.8
BLOCKS, TIMEOUT_S = 10, 300.0
#: a rank may leave the last barrier late, and must not lose its peers in it
_END_PAUSE_S = 1.0
KINDS = ("library", "messages", "ddp", "none")


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rates of each kind, one process group after another in each repeat. `seed` is not used."""
    for network, (goal, text) in MODELS.items():
        for ranks in RANKS:
            samples = [{kind: _steps_per_s(kind, ranks, network) for kind in KINDS}
                       for _ in range(2 if quick else REPEATS)]
            name = f"{text}, {ranks} ranks on one node"
            for kind, label in (("none", "without communication"), ("ddp", "DistributedDataParallel over gloo"),
                                ("library", "slurmdl")):
                yield make_row(f"{name}: steps per second, {label}", [sample[kind] for sample in samples], "1/s")
            ratios = {kind: [sample["library"] / sample[kind] for sample in samples] for kind in KINDS[1:]}
            medians = {kind: statistics.median(values) for kind, values in ratios.items()}
            is_goal = ranks == GOAL_RANKS
            yield make_row(f"{name}: rate, slurmdl to DistributedDataParallel", ratios["ddp"], "times", baseline=1.0,
                           target=f"at least {goal:g}" if is_goal else "",
                           met=medians["ddp"] >= goal if is_goal else None)
            fits = ranks <= (os.cpu_count() or 1)
            yield make_row(f"{name}: rate, slurmdl to no communication", ratios["none"], "times", baseline=1.0,
                           target=f"at least {MIN_OF_FREE:g}" if fits else "",
                           met=medians["none"] >= MIN_OF_FREE if fits else None)
            yield make_row(f"control: {name}: rate, shared memory to messages", ratios["messages"], "times",
                           baseline=1.0)


def _steps_per_s(kind: str, ranks: int, network: int) -> float:
    backend = "mpi" if kind in ("library", "messages") else "torch"
    output = run_ranks(backend, ranks, "benchmarks.training.intra_node", kind, str(network),
                       environ={"OMP_NUM_THREADS": "1"}, timeout_s=TIMEOUT_S)
    return float(output.split()[-1])


def _main(kind: str, network: int) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    _, sizes, batch, block_steps = NETWORKS[network]
    x, y = torch.randn(batch, sizes[0]), torch.randint(sizes[-1], (batch,))
    torch.manual_seed(1)
    model, opt = make_network(sizes)
    run: Any = None
    if kind in ("library", "messages"):
        from slurmdl.train import init
        from slurmdl.train.transports.mpi import MpiTransport

        MpiTransport.prefers_shared_memory = kind == "library"
        run = init()
        run.wrap(model, opt)
        is_main = run.is_main
    else:
        distributed.init_process_group("gloo")
        is_main = distributed.get_rank() == 0
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
    synchronize = partial(run.all_gather_object, None) if run else distributed.barrier
    time_steps(model, opt, x, y, 2 * block_steps)
    synchronize()
    start = time.perf_counter()
    time_steps(model, opt, x, y, BLOCKS * block_steps)
    synchronize()
    if is_main:
        print(BLOCKS * block_steps / (time.perf_counter() - start), flush=True)
    if run:
        run.finish()
    else:  # gloo's threads may abort or block a process at its end
        time.sleep(_END_PAUSE_S)
        os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
