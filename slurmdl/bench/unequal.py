"""Unequal machines: load balance, heterogeneous gossip, and placement that shows in bytes and in training time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version

from slurmdl.bench.parts import Bench
from slurmdl.bench.results import Row

#: part -> its module, which has `rows(seed)`; all but `accuracy` need root, for a sandbox
PARTS = {"speed": "slurmdl.bench.unequal_speed", "accuracy": "slurmdl.bench.unequal_accuracy",
         "gossip": "slurmdl.bench.unequal_gossip", "aggregation": "slurmdl.bench.unequal_placement",
         "tie": "slurmdl.bench.unequal_tie", "lost": "slurmdl.bench.unequal_lost"}
SEED = 1


def run(only: Sequence[str] = (), results_file: str | None = None, seed: int = SEED) -> None:
    """Measure the parts in `only` (all by default), as `Bench.run` says."""
    Bench("unequal", tuple(PARTS), _rows, lambda: {
        package: version(package) for package in ("torch", "numpy", "scikit-learn", "ortools")}).run(
            only, results_file, seed)


def _rows(part: str, seed: int) -> Iterator[Row]:
    yield from import_module(PARTS[part]).rows(seed)
