"""Training strategies side by side. One part a file of this room, with `rows(seed, quick)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version

from slurmdl.bench.parts import Bench
from slurmdl.bench.results import Row

#: part -> its module
PARTS = {"accuracy": "slurmdl.bench.accuracy", "asynchronous": "slurmdl.bench.accuracy_asynchronous",
         "time": "slurmdl.bench.time_to_accuracy",
         "allreduce": "slurmdl.bench.strategies_allreduce", "shared": "slurmdl.bench.strategies_shared",
         "metering": "slurmdl.bench.strategies_metering"}
SEED = 1


def run(only: Sequence[str] = (), results_file: str | None = None, seed: int = SEED, quick: bool = False) -> None:
    """Measure the parts in `only` (all by default), as `Bench.run` says; `quick` with fewer repeats."""
    Bench("strategies", tuple(PARTS), lambda part, its: _rows(part, its, quick),
          lambda: {package: version(package) for package in ("torch", "numpy", "scikit-learn")},
          "--quick" if quick else "").run(only, results_file, seed)


def _rows(part: str, seed: int, quick: bool) -> Iterator[Row]:
    yield from import_module(PARTS[part]).rows(seed, quick)
