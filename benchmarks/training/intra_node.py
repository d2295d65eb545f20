"""Allreduce between the ranks of one node: the library beside DistributedDataParallel over gloo.

Ranks without communication are the upper limit. All three train in the same processes, in alternating blocks of
steps: other programs disturb them alike. The control is the library with messages instead of shared memory.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.results import Row, make_row
from benchmarks.training.overhead import NETWORKS, make_network, time_steps
from benchmarks.training.rank_launch import run_ranks

RANKS, REPEATS = (2, 4, 8), 3
#: index in NETWORKS -> goal for the rate beside DistributedDataParallel with 4 ranks, and the parameters in words
MODELS = {1: (1.8, "1.1 million parameters"), 2: (1.4, "25 million parameters")}
GOAL_RANKS, MIN_OF_FREE = 4, 0.8
BLOCKS, TIMEOUT_S = 8, 600.0
LIBRARY, DDP, FREE = "library", "ddp", "none"
LABELS = {FREE: "without communication", DDP: "DistributedDataParallel over gloo", LIBRARY: "slurmdl"}


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rates of each kind; a sample is the median of the blocks of one process group. `seed` is not used."""
    for network, (goal, text) in MODELS.items():
        for ranks in RANKS:
            samples = [_steps_per_s(ranks, network, "shared") for _ in range(1 if quick else REPEATS)]
            name, is_goal = f"{text}, {ranks} ranks on one node", ranks == GOAL_RANKS
            for kind, label in LABELS.items():
                yield make_row(f"{name}: steps per second, {label}", [sample[kind] for sample in samples], "1/s")
            ratios = [sample[LIBRARY] / sample[DDP] for sample in samples]
            yield make_row(f"{name}: rate, slurmdl to DistributedDataParallel", ratios, "times", baseline=1.0,
                           target=f"at least {goal:g}" if is_goal else "",
                           met=statistics.median(ratios) >= goal if is_goal else None)
            shares, fits = [sample[LIBRARY] / sample[FREE] for sample in samples], ranks <= (os.cpu_count() or 1)
            yield make_row(f"{name}: rate, slurmdl to no communication", shares, "times", baseline=1.0,
                           target=f"at least {MIN_OF_FREE:g}" if fits else "",
                           met=statistics.median(shares) >= MIN_OF_FREE if fits else None)
            if is_goal:
                with_messages = _steps_per_s(ranks, network, "messages")
                yield make_row(f"control: {name}: rate, slurmdl with messages to DistributedDataParallel",
                               [with_messages[LIBRARY] / with_messages[DDP]], "times", baseline=1.0)
            print(f"{name}: measured", file=sys.stderr, flush=True)


def _steps_per_s(ranks: int, network: int, memory: str) -> dict[str, float]:
    """Rate of each kind; `memory` is how the library exchanges data: "shared", or by "messages"."""
    with tempfile.TemporaryDirectory() as folder:
        output = run_ranks("mpi", ranks, "benchmarks.training.intra_node", str(network), memory,
                           str(Path(folder, "store")), environ={"OMP_NUM_THREADS": "1"}, timeout_s=TIMEOUT_S)
    return dict(json.loads(output.splitlines()[-1]))


def _main(network: int, memory: str, store: str) -> None:
    import torch
    from torch import distributed

    from slurmdl.train import init
    from slurmdl.train.transports.mpi import MpiTransport

    torch.set_num_threads(1)
    _, sizes, batch, block_steps = NETWORKS[network]
    x, y = torch.randn(batch, sizes[0]), torch.randint(sizes[-1], (batch,))
    torch.manual_seed(1)
    MpiTransport.prefers_shared_memory = memory == "shared"
    run = init(backend="mpi")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=run.rank, world_size=run.worker_count)
    networks = {kind: make_network(sizes) for kind in LABELS}
    run.wrap(*networks[LIBRARY])
    steps = {kind: partial(time_steps, model, opt, x, y) for kind, (model, opt) in networks.items()}
    steps[DDP] = partial(time_steps, torch.nn.parallel.DistributedDataParallel(networks[DDP][0]), networks[DDP][1], x,
                         y)
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(1 + BLOCKS):
        for kind, take_steps in steps.items():
            distributed.barrier()
            start = time.perf_counter()
            take_steps(block_steps)
            distributed.barrier()
            seconds[kind].append(time.perf_counter() - start)
    if run.is_main:
        print(json.dumps({kind: block_steps / statistics.median(values[1:]) for kind, values in seconds.items()}),
              flush=True)
    run.all_gather_object(None)  # no rank closes its connections while another one is in the last barrier
    distributed.destroy_process_group()
    run.finish()


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])
