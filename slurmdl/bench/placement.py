"""Placement: how fast, how good, how many at once, and what it costs a submission. One part a file of this room."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib import import_module

import numpy as np

from slurmdl.bench import results
from slurmdl.bench.results import Row
from slurmdl.errors import UsageError

#: part -> its module, which has `rows(seed)`
PARTS = {"speed": "slurmdl.bench.speed", "quality": "slurmdl.bench.quality",
         "herding": "slurmdl.bench.herding", "overhead": "slurmdl.bench.overhead",
         "exact": "slurmdl.bench.exact"}
SEED = 0


def run(only: Sequence[str] = (), results_file: str | None = None, seed: int = SEED) -> None:
    """Measure the parts in `only` (all by default), print each figure, and write them where wanted.

    Raises
    ------
    UsageError : a part that does not exist.
    """
    for part in only:
        if part not in PARTS:
            raise UsageError(f"--only {part}: no such part; valid: {', '.join(PARTS)}")
    found: list[Row] = []
    for part in only or PARTS:
        began = time.monotonic()
        print(f"--- {part}", flush=True)
        for row in _rows(part, seed):
            found.append(row)
            print(line(row), flush=True)
        print(f"--- {part}: {time.monotonic() - began:.0f} s", flush=True)
    missed = [row for row in found if row.met is False]
    if missed:
        print("\nmissed:", *map(line, missed), sep="\n")
    command = "slurmdl bench placement" + (f" --only {','.join(only)}" if only else "")
    if results_file:
        results.write(results_file, found, seed=seed, versions=_versions(),
                      command=f"{command} --seed {seed} --results {results_file}")
    else:
        print(results.closing(found))


def _rows(part: str, seed: int) -> Iterator[Row]:
    yield from import_module(PARTS[part]).rows(seed=seed)


def line(row: Row) -> str:
    """One line of the table: whether the target is met, the figure, what it is, its range and its target."""
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    spread = f" ({min(row.samples):.4g} to {max(row.samples):.4g})" if row.repeats > 1 else ""
    beside = f", beside {row.baseline:.4g}" if row.baseline is not None else ""
    target = f"; {row.target}" if row.target else ""
    return f"{verdict:7}{row.value:10.4g} {row.unit:6} {row.metric}{spread}{beside}{target}"


def _versions() -> dict[str, str]:
    found = {"numpy": np.__version__, "libc": " ".join(platform.libc_ver())}
    if shutil.which("sbatch"):
        done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=10, check=False)
        found["slurm"] = done.stdout.strip()
    return found
