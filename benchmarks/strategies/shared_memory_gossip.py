"""Gossip inside a node: shared memory compared with MPI messages, alternating in one run.

MPI messages inside a node also use shared memory (MPI's default transports). The window avoids the receive buffer and
its copy. The negative control compares messages with messages.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.open_mpi import OVERSUBSCRIBE_ENV
from benchmarks.results import Row, make_row
from benchmarks.sandbox_mpi import ROOT
from slurmdl.errors import SlurmdlError

#: elements of a model -> exchanges per repeat
SIZES = {1_000_000: 40, 25_000_000: 6}
REPEATS = 7
TARGET = 1.5
#: required space in /dev/shm per rank, in models
_SPACE = 3


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield ratios of exchange times, for 2 ranks and for up to 4 ranks."""
    cores = os.cpu_count() or 1
    for ranks in sorted({2, min(2 * cores, 4)}):
        for size, steps in SIZES.items():
            times = exchanges(ranks, size, steps, 3 if quick else REPEATS)
            label = f"{ranks} ranks, {size // 1_000_000}M parameters"
            bound = f"; CPU-bound: {ranks} ranks on {cores} cores" if ranks > cores else ""
            ratio = _ratios(times["messages"], times["shared"])
            median_ratio = statistics.median(ratio)
            yield make_row(f"{label}: exchange time, messages / shared memory{bound}", ratio, "x",
                           target=f"at least {TARGET}", met=median_ratio >= TARGET)
            control = _ratios(times["messages"], times["disabled"])
            yield make_row(f"{label}: the same with shared memory disabled (control)", control, "x",
                           baseline=median_ratio, target=f"below {TARGET}", met=statistics.median(control) < TARGET)
            yield make_row(f"{label}: seconds per exchange through shared memory", times["shared"], "s",
                           baseline=statistics.median(times["messages"]))


def _ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    return [first / second for first, second in zip(numerators, denominators, strict=True)]


def exchanges(ranks: int, size: int, steps: int, repeats: int) -> dict[str, list[float]]:
    """Return variant -> seconds per exchange of each repeat; see `shared_memory_gossip_worker`.

    Raises:
        SlurmdlError: the ranks cannot run.
    """
    space = os.statvfs("/dev/shm")
    if space.f_bavail * space.f_frsize < _SPACE * 4 * size * ranks:
        raise SlurmdlError(f"/dev/shm: too small for the models of {ranks} ranks of {size:,} parameters")
    variants: list[tuple[str, bool]] = [("messages", False), ("shared", True), ("disabled", False)]
    with tempfile.TemporaryDirectory() as folder:
        work, result = Path(folder, "work.json"), Path(folder, "result.json")
        work.write_text(json.dumps({"parameters": size, "variants": variants, "repeats": repeats, "steps": steps}))
        done = subprocess.run(
            ["mpirun", "-n", str(ranks), sys.executable, "-m", "benchmarks.strategies.shared_memory_gossip_worker",
             str(work), str(result)], env={**os.environ, **OVERSUBSCRIBE_ENV, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise SlurmdlError(f"mpirun: exit status {done.returncode}: {' '.join(done.stderr.split())[:300]}")
        times: dict[str, Any] = json.loads(result.read_text())
        return times
