"""The one language of benchmark results: results/NAME.json and the line `met n of m`."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmdl import __version__
from slurmdl.errors import InputError


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

    @property
    def extremes(self) -> str:
        """The smallest and the largest sample, to stand behind something else; "" where there is one."""
        return f" ({min(self.samples):.4g} to {max(self.samples):.4g})" if self.repeats > 1 else ""

    @property
    def beside(self) -> str:
        return "" if self.baseline is None else f"{self.baseline:.4g}"


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
        file.write(_text(document))
    print(closing(rows))


def _text(document: Mapping[str, Any]) -> str:
    """Format a document as JSON with one row per line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in document["rows"])
    rest = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items() if key != "rows")
    return f'{{\n "rows": [\n{rows}\n ],\n{rest}\n}}\n'


def closing(rows: Sequence[Row]) -> str:
    """The last line that a benchmark prints."""
    judged = [r for r in rows if r.met is not None]
    return f"met {sum(bool(r.met) for r in judged)} of {len(judged)}"


def document(folder: Path) -> str:
    """All results of a folder in Markdown, with what is needed to repeat them: docs/results.md.

    Of each file the rows that are judged; the others are in the file.

    Raises
    ------
    InputError : a file that is none of `write`.
    """
    parts = ["# Results", "", "Written by `slurmdl bench results`, each table's figures by the command above it. A "
             "figure is the median of its repeats, with the smallest and the largest behind it. Rows called control "
             "must come out as they say, or the others mean nothing.", ""]
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InputError("no results of `slurmdl bench` (no *.json); valid: a folder of what --results has written",
                         str(folder))
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            rows = [Row(**{**its, "samples": tuple(its["samples"])}) for its in found["rows"]]
            machine, versions = found["machine"], found["versions"]
            parts += _section(file.stem, rows, found["command"], machine, versions)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"no results of `slurmdl bench` ({error})", str(file)) from error
    return "\n".join(parts)


def _section(name: str, rows: Sequence[Row], command: str, machine: Mapping[str, Any],
             versions: Mapping[str, str]) -> list[str]:
    judged = [its for its in rows if its.met is not None]
    words = ", ".join(f"{key} {value}" for key, value in versions.items())
    lines = [f"## {name}: {closing(rows)}", "", f"`{command}`", "",
             f"{machine['system']} {machine['kernel']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB; "
             f"{words}. {len(rows)} figures, {len(judged)} judged:", "",
             "| | figure | beside | unit | what | target |", "| --- | ---: | ---: | --- | --- | --- |"]
    for its in judged:
        cells = ["met" if its.met else "**missed**", f"{its.value:.4g}{its.extremes}", its.beside, its.unit,
                 its.metric, its.target]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _machine() -> dict[str, Any]:
    import os
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": platform.system(), "kernel": platform.release(), "cores": os.cpu_count(),
            "load": [round(value, 1) for value in os.getloadavg()], "memory_gib": round(memory / 2**30, 1)}
