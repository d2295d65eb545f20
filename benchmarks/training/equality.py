"""Synchronous strategies over each backend end with the model of one process on all batches.

The control gives all workers the same samples; its model must differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.open_mpi import LOOPBACK_TCP_ENV
from benchmarks.results import Row, make_row
from benchmarks.training import program
from benchmarks.training.rank_launch import run_ranks

WORKERS = 4
#: distance from the model of one process, relative to the distance that training has moved it
TOLERANCE, CONTROL_DISTANCE = 1e-4, 1e-2
TIMEOUT_S = 180.0
#: name -> parameter servers, and variables of the strategy
CASES = {
    "allreduce, ring": (0, {"STRATEGY": "allreduce", "COMM_PATTERN": "ring"}),
    "allreduce, hierarchical": (0, {"STRATEGY": "allreduce", "COMM_PATTERN": "hierarchical"}),
    "ps, 1 server": (1, {"STRATEGY": "ps", "PS": "1"}),
    "ps, 2 servers": (2, {"STRATEGY": "ps", "PS": "2"}),
    "local-sgd, mean of every step": (0, {"STRATEGY": "local-sgd", "PERIOD": "1", "OUTER_LR": "1",
                                          "OUTER_MOMENTUM": "0"})}
BACKENDS = ("mpi", "torch", "virtual")


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """One row per strategy and backend; deterministic, so one run each. `seed` is not used."""
    expected, start = program.one_process(), program.flat(program.make_model()[0])
    moved = float(np.linalg.norm(expected - start))
    for name, (servers, variables) in list(CASES.items())[:2 if quick else None]:
        for backend in BACKENDS:
            distance = float(np.linalg.norm(_final(backend, WORKERS + servers, variables) - expected)) / moved
            yield make_row(f"{name}, {backend}: distance from the model of one process", [distance], "moved",
                           target=f"at most {TOLERANCE:g} of the distance that training moves it",
                           met=distance <= TOLERANCE)
    same = _final(BACKENDS[0], WORKERS, CASES["allreduce, ring"][1], "same")
    distance = float(np.linalg.norm(same - expected)) / moved
    yield make_row("control: all workers with the same samples", [distance], "moved",
                   target=f"above {CONTROL_DISTANCE:g}", met=distance > CONTROL_DISTANCE)


def _final(backend: str, ranks: int, variables: dict[str, str], *arguments: str) -> Any:
    """Final parameters of the first worker."""
    environ = {f"SLURMDL_TRAIN_{name}": value for name, value in variables.items()}
    if backend == "virtual":
        return _virtual(ranks, environ, "same" in arguments)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(backend, ranks, "benchmarks.training.program", f"{folder}/model.npy", *arguments,
                  environ={**LOOPBACK_TCP_ENV, **environ, "SLURMDL_TRAIN_BACKEND": backend}, timeout_s=TIMEOUT_S)
        return np.load(f"{folder}/model.npy")


def _virtual(ranks: int, environ: dict[str, str], same_samples: bool) -> Any:
    from slurmdl.train import init
    from slurmdl.train.transports import virtual

    results = virtual.run_virtual_ranks(ranks, lambda transport: program.train_rank(
        init(environ=environ, transport=transport, check_every=0), same_samples))
    return next(result for result in results if result is not None)
