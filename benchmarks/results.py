"""Results of benchmarks: rows, results/NAME.json and the line `met n of m`."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmdl import __version__
from slurmdl.bench.host_meters import CPU_BOUND_IDLE
from slurmdl.errors import InputError


@dataclass(frozen=True)
class Row:
    """One measured metric.

    Attributes:
        value: median of `samples`, in `unit`.
        baseline: value to compare with, in the same unit; None if there is none.
        target: description of the target; "" if it has none.
        met: whether the target is met; None if there is no target.
        spread: largest minus smallest sample.
    """

    metric: str
    value: float
    unit: str
    baseline: float | None
    target: str
    met: bool | None
    repeats: int
    spread: float
    samples: tuple[float, ...]

    @property
    def range_text(self) -> str:
        """The smallest and the largest sample in parentheses; "" for a single sample."""
        return f" ({min(self.samples):.4g} to {max(self.samples):.4g})" if self.repeats > 1 else ""

    @property
    def baseline_text(self) -> str:
        return "" if self.baseline is None else f"{self.baseline:.4g}"


def make_row(metric: str, samples: Sequence[float], unit: str, *, baseline: float | None = None, target: str = "",
             met: bool | None = None) -> Row:
    """Make a row from its samples."""
    return Row(metric, statistics.median(samples), unit, baseline, target, met, len(samples),
               max(samples) - min(samples), tuple(samples))


def cpu_bound_note(idle: Sequence[float]) -> str:
    """Return a note for a metric that was CPU-bound, "" otherwise; `idle`: idle share of the CPUs in each repeat."""
    median = statistics.median(idle)
    return f"; CPU-bound: {median:.0%} idle" if median < CPU_BOUND_IDLE else ""


def write(path: str, rows: Sequence[Row], *, seed: int, versions: Mapping[str, str], command: str) -> None:
    """Write the rows with seed, versions, machine and command, and print the verdict."""
    document: dict[str, Any] = {
        "rows": [asdict(row) for row in rows], "seed": seed,
        "versions": {"slurmdl": __version__, "python": platform.python_version(), **versions},
        "machine": _machine(), "command": command}
    Path(path).write_text(to_json(document), encoding="utf-8")
    print(verdict(rows))


def to_json(document: Mapping[str, Any]) -> str:
    """Format a results file: each row on a line of its own, so that diffs show the rows that changed."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in document["rows"])
    others = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items() if key != "rows"]
    return ",\n".join([f'{{\n "rows": [\n{rows}\n ]', *others]) + "\n}\n"


def verdict(rows: Sequence[Row]) -> str:
    """Return the line `met n of m`, which every benchmark prints last."""
    judged = [row for row in rows if row.met is not None]
    return f"met {sum(bool(row.met) for row in judged)} of {len(judged)}"


@dataclass(frozen=True)
class ResultsFile:
    """A file that `write` has written.

    Attributes:
        name: of the file, without .json.
        versions: of the software that the rows depend on, by name.
        machine: `system`, `kernel`, `cores`, `memory_gib`.
        command: repeats the measurement.
    """

    name: str
    rows: tuple[Row, ...]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    command: str

    def select(self, metric: str) -> list[Row]:
        """Return the rows with this metric, in which `*` stands for any text; InputError if there is none."""
        pattern = re.compile(".*".join(map(re.escape, metric.split("*"))))
        rows = [row for row in self.rows if pattern.fullmatch(row.metric)]
        if not rows:
            raise InputError(f"no row {metric!r}; expected a metric of this file", f"{self.name}.json")
        return rows


def read(path: Path) -> ResultsFile:
    """Read a file of results; InputError if `write` did not write it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(Row(**{**row, "samples": tuple(row["samples"])}) for row in document["rows"])
        return ResultsFile(path.stem, rows, document["versions"], document["machine"], document["command"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"no benchmark results ({error})", str(path)) from error


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": platform.system(), "kernel": platform.release(), "cores": os.cpu_count(),
            "load": [round(value, 1) for value in os.getloadavg()], "memory_gib": round(memory / 2**30, 1)}
