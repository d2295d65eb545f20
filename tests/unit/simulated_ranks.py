"""A run of a few synchronous strategies, for test_train_simulate.py: over MPI as a program, or with virtual ranks.

As a program it writes what each case has ended in as a file for each rank into the folder that it is given.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from slurmdl.train.library.run import init
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.trainer import optimizers, virtual_run
from slurmdl.train.trainer.data import load_dataset
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.workloads import ImageClassification
from slurmdl.train.transports.transport import Transport
from slurmdl.train.world import init_mpi

RANKS = 4
COMMON = ("--steps", "40", "--model", "mlp:16", "--seed", "3", "--simulate", str(RANKS), "--zones", "A:1x2,B:2x1",
          "--lr-schedule", "cosine", "--batch", "16")
CASES = {
    "ring": ("--strategy", "allreduce", "--traffic", "ring"),
    "hierarchical": ("--strategy", "allreduce", "--traffic", "hierarchical", "--optimizer", "adam", "--lr", "0.003"),
    "random": ("--strategy", "gossip", "--skew", "0.3"),
    "base": ("--strategy", "gossip", "--traffic", "base"),
    "exponential": ("--strategy", "gossip", "--traffic", "exponential", "--optimizer", "adamw", "--lr", "0.003"),
    "ps": ("--strategy", "ps", "--ps", "2"),
    "adaptive": ("--strategy", "adaptive-gossip", "--traffic", "base", "--compress", "int4", "--threshold",
                 "0.05", "--warm-up", "5"),
    "local-sgd": ("--strategy", "local-sgd", "--compress", "int8", "--period", "8"),
    "local-sgd by drift": ("--strategy", "local-sgd", "--trigger", "drift", "--warm-up", "4"),
}


class Logged(MeteredP2P):
    """Messages that write down what they send: to whom, how many bytes, with which tag."""

    log: list[tuple[int, int, int]]

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        self.log.append((peer, array.nbytes, tag))
        return super().isend(peer, array, tag)


def one(case: str, transport: Transport, environ: dict[str, str]) -> dict[str, Any]:
    """The log of one rank's messages, their bytes by level, and the parameters in the end."""
    options = parse_train_options([*COMMON, *CASES[case]], {})
    run = init(options.strategy_config, seed=options.seed, environ=environ, transport=transport)
    log: list[tuple[int, int, int]] = []
    run.p2p.__class__ = Logged
    run.p2p.log = log
    task = ImageClassification(
    options,
    load_dataset(
        options.data,
        options.seed,
         dirichlet_alpha=options.dirichlet_alpha))
    optimizer = optimizers.build_optimizer(
    options.optimizer,
    task.module.parameters(),
    options.lr,
    options.momentum,
     0.0)
    schedule = optimizers.build_lr_scheduler(optimizer, options.lr_schedule, options.steps)
    run.attach(task.module, optimizer)
    if run.worker_rank is None:
        run.serve()
    else:
        batches = task.batches(run.worker_rank, run.worker_count)
        for _ in range(options.steps):
            optimizer.zero_grad()
            task.loss(next(batches)).backward()
            optimizer.step()
            schedule.step()
    run.finish()
    return {"log": log, "sent": dict(run.p2p.bytes_sent), "worker": run.worker_rank,
            "parameters": np.array(run.replica.parameters)}


def simulated(case: str) -> list[dict[str, Any]]:
    """What `one` gives on each virtual rank."""
    options = parse_train_options([*COMMON, *CASES[case]], {})
    return list(virtual_run.run_virtual(options, lambda transport, environ: one(case, transport, environ)))


if __name__ == "__main__":
    over_mpi = init_mpi()
    nodes, zones = virtual_run.rank_places(parse_train_options(COMMON, {}))
    its = virtual_run.rank_environ(nodes[over_mpi.rank], zones[over_mpi.rank])
    found = {case: one(case, over_mpi, its) for case in CASES}
    Path(sys.argv[1], str(over_mpi.rank)).write_bytes(pickle.dumps(found))
