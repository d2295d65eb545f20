"""Placement: how fast, how good, how many at once, and what it costs a submission. One part a file of this room."""

from __future__ import annotations

import contextlib
import itertools
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from slurmdl.bench import results
from slurmdl.bench.results import Row
from slurmdl.errors import SlurmdlError, UsageError

#: part -> its module, which has `rows(seed)`
PARTS = {"speed": "slurmdl.bench.speed", "overhead": "slurmdl.bench.overhead",
         "quality": "slurmdl.bench.quality", "exact": "slurmdl.bench.exact", "herding": "slurmdl.bench.herding"}
SEED = 0


def run(only: Sequence[str] = (), results_file: str | None = None, seed: int = SEED) -> None:
    """Measure the parts in `only` (all by default), print the table, and write the figures where wanted.

    Progress goes to stderr. A part that breaks counts as missed; the others are measured all the same.

    Raises
    ------
    UsageError : a part that does not exist.
    """
    for part in only:
        if part not in PARTS:
            raise UsageError(f"--only {part}: no such part; valid: {', '.join(PARTS)}")
    found: dict[str, list[Row]] = {}
    for part in only or PARTS:
        began = time.monotonic()
        found[part] = []
        try:
            for row in _rows(part, seed):
                found[part].append(row)
                print(f"{part}: {line(row)}", file=sys.stderr, flush=True)
        except (SlurmdlError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{part}: broken off: {error}", file=sys.stderr, flush=True)
            found[part].append(results.row(f"{part}: measured to its end", [0], "", target="1", met=False))
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    rows = list(itertools.chain.from_iterable(found.values()))
    print(table(found))
    command = "slurmdl bench placement" + (f" --only {','.join(only)}" if only else "")
    if results_file:
        results.write(results_file, rows, seed=seed, versions=_versions(),
                      command=f"{command} --seed {seed} --results {results_file}")
    else:
        print(results.closing(rows))


def _rows(part: str, seed: int) -> Iterator[Row]:
    yield from import_module(PARTS[part]).rows(seed=seed)


def table(found: Mapping[str, Sequence[Row]]) -> str:
    """All parts one below the other, and what missed its target once more at the end."""
    missed = [row for rows in found.values() for row in rows if row.met is False]
    parts = {**found, "missed": missed} if missed else found
    lines = [f"{'':7}{'median':>10} {'beside':>10} unit   what (smallest to largest): target"]
    for part, rows in parts.items():
        lines += ["", part, *map(line, rows)]
    return "\n".join(lines)


def line(row: Row) -> str:
    """One line of the table: whether the target is met, the figure, what it stands beside, what it is, its range and
    its target."""
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    beside = f"{row.baseline:.4g}" if row.baseline is not None else ""
    spread = f" ({min(row.samples):.4g} to {max(row.samples):.4g})" if row.repeats > 1 else ""
    target = f": {row.target}" if row.target else ""
    return f"{verdict:7}{row.value:10.4g} {beside:>10} {row.unit:6} {row.metric}{spread}{target}"


def _versions() -> dict[str, str]:
    found = {"numpy": np.__version__, "libc": " ".join(platform.libc_ver())}
    for package in ("ortools", "kahip"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    if shutil.which("sbatch"):
        done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=10, check=False)
        found["slurm"] = done.stdout.strip()
    return found
