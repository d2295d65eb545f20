"""Placement: how fast, how good, how many at once, and what it costs a submission. One part a file of this room."""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from slurmdl.bench.parts import Bench
from slurmdl.bench.results import Row

#: part -> its module, which has `rows(seed)`
PARTS = {"speed": "slurmdl.bench.speed", "overhead": "slurmdl.bench.overhead",
         "quality": "slurmdl.bench.quality", "exact": "slurmdl.bench.exact", "herding": "slurmdl.bench.herding"}
SEED = 0


def run(only: Sequence[str] = (), results_file: str | None = None, seed: int = SEED) -> None:
    """Measure the parts in `only` (all by default), as `Bench.run` says."""
    Bench("placement", tuple(PARTS), lambda part, its: _rows(part, its), _versions).run(only, results_file, seed)


def _rows(part: str, seed: int) -> Iterator[Row]:
    yield from import_module(PARTS[part]).rows(seed=seed)


def _versions() -> dict[str, str]:
    found = {"numpy": np.__version__, "libc": " ".join(platform.libc_ver())}
    for package in ("ortools", "kahip"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    if shutil.which("sbatch"):
        done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=10, check=False)
        found["slurm"] = done.stdout.strip()
    return found
