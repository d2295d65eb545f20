"""The one language of benchmark results: results/NAME.json and the line `met n of m`."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmdl import __version__


@dataclass(frozen=True)
class Row:
    """One measured figure.

    Attributes
    ----------
    value : median of `samples`, in `unit`.
    baseline : what it is compared with, in the same unit; None where it stands alone.
    target : the words of the target, "" where the row only informs.
    met : whether the target is met; None where there is none.
    spread : largest minus smallest sample.
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


def row(metric: str, samples: Sequence[float], unit: str, *, baseline: float | None = None, target: str = "",
        met: bool | None = None) -> Row:
    """A row from its samples."""
    return Row(metric, statistics.median(samples), unit, baseline, target, met, len(samples),
               max(samples) - min(samples), tuple(samples))


def write(path: str, rows: Sequence[Row], *, seed: int, versions: Mapping[str, str], command: str) -> None:
    """Write the rows with what is needed to repeat them, and print the closing line."""
    document: dict[str, Any] = {
        "rows": [asdict(r) for r in rows], "seed": seed,
        "versions": {"slurmdl": __version__, "python": platform.python_version(), **versions},
        "machine": _machine(), "command": command}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    print(closing(rows))


def closing(rows: Sequence[Row]) -> str:
    """The last line that a benchmark prints."""
    judged = [r for r in rows if r.met is not None]
    return f"met {sum(bool(r.met) for r in judged)} of {len(judged)}"


def _machine() -> dict[str, Any]:
    import os
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": platform.system(), "kernel": platform.release(), "cores": os.cpu_count(),
            "load": [round(value, 1) for value in os.getloadavg()], "memory_gib": round(memory / 2**30, 1)}
