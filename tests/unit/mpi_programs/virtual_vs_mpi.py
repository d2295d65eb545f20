"""Runs of synchronous strategies for test_train_strategies.py, over MPI or on virtual ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from slurmdl.train.library.startup import init
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.trainer import models, trainer
from slurmdl.train.trainer.data_readers import load_dataset
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.workloads import Classification
from slurmdl.train.transports.transport import Transport
from slurmdl.train.world import init_mpi

RANKS = 4
COMMON = ("--steps", "24", "--model", "mlp:16", "--seed", "3", "--virtual-ranks", str(RANKS),
          "--virtual-zones", "A:1x2,B:2x1", "--lr-schedule", "cosine", "--batch-size", "16")
CASES = {
    "ring": "--strategy allreduce --comm-pattern ring",
    "hierarchical": "--strategy allreduce --comm-pattern hierarchical --optimizer adam --lr 0.003",
    "random": "--strategy gossip --dirichlet-alpha 0.3",
    "base": "--strategy gossip --comm-pattern base-2",
    "exponential": "--strategy gossip --comm-pattern one-peer-exponential --optimizer adamw --lr 0.003",
    "ps": "--strategy ps --ps 2",
    "adaptive": "--strategy adaptive-gossip --comm-pattern base-2 --compression int4 --comm-budget 2%",
    "local-sgd": "--strategy local-sgd --compression int8 --period 8",
}


class LoggingP2P(MeteredP2P):
    """Logs target, bytes and tag of all messages sent."""

    log: list[tuple[int, int, int]]

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        self.log.append((peer, array.nbytes, tag))
        return super().isend(peer, array, tag)


def run_case(case: str, transport: Transport, environ: dict[str, str]) -> dict[str, Any]:
    """Run a case on one rank; return its message log, bytes by locality level, and final parameters."""
    options = parse_train_options([*COMMON, *CASES[case].split()], {})
    run = init(options.strategy_config, seed=options.seed, environ=environ, transport=transport)
    log: list[tuple[int, int, int]] = []
    run.p2p.__class__ = LoggingP2P
    run.p2p.log = log
    data = load_dataset(options.data, options.seed, dirichlet_alpha=options.dirichlet_alpha)
    workload = Classification(options, data)
    optimizer = models.build_optimizer(options.optimizer, workload.module.parameters(), options.lr,
                                           options.momentum, 0.0)
    scheduler = models.build_lr_scheduler(optimizer, options.lr_schedule, options.steps)
    run.attach(workload.module, optimizer)
    if run.worker_rank is None:
        run.serve()
    else:
        batches = workload.batches(run.worker_rank, run.worker_count)
        for _ in range(options.steps):
            optimizer.zero_grad()
            workload.loss(next(batches)).backward()
            optimizer.step()
            scheduler.step()
    run.finish()
    return {"log": log, "bytes_sent": dict(run.p2p.bytes_sent), "worker_rank": run.worker_rank,
            "parameters": np.array(run.replica.parameters)}


def run_virtual_case(case: str) -> list[dict[str, Any]]:
    """Results of `run_case` on all virtual ranks."""
    options = parse_train_options([*COMMON, *CASES[case].split()], {})
    return list(trainer.run_virtual(options, lambda transport, environ: run_case(case, transport, environ)))


def write_results(folder: Path) -> None:
    """Run all cases over MPI; write their results to one file per rank."""
    transport = init_mpi()
    nodes, zones = trainer.rank_places(parse_train_options(COMMON, {}))
    environ = trainer.rank_environ(nodes[transport.rank], zones[transport.rank])
    results = {case: run_case(case, transport, environ) for case in CASES}
    (folder / str(transport.rank)).write_bytes(pickle.dumps(results))
