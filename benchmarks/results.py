"""Results of benchmarks: rows, results/NAME.json and the line `met n of m`.

    python -m benchmarks.results [DIR]

prints all results of a directory as Markdown: docs/results.md.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmdl import __version__
from slurmdl.bench.host_meters import CPU_BOUND_IDLE
from slurmdl.cli.arguments import CliParser
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


def to_markdown(directory: Path) -> str:
    """Format all results of a directory as Markdown: the rows with a target, and how to repeat them.

    Raises:
        InputError: no results, or a file that `write` did not write.
    """
    parts = ["# Results", "", "Written by `python -m benchmarks.results`; the command above each table repeats it. "
             "Each value is the median of its repeats, followed by the smallest and the largest. Rows called control "
             "must meet their target; otherwise the other rows prove nothing.", ""]
    files = sorted(directory.glob("*.json"))
    if not files:
        raise InputError("no benchmark results (*.json); expected a directory of files that --results has written",
                         str(directory))
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            rows = [Row(**{**row, "samples": tuple(row["samples"])}) for row in document["rows"]]
            parts += _section(file.stem, rows, document["command"], document["machine"], document["versions"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"no benchmark results ({error})", str(file)) from error
    return "\n".join(parts)


def _section(name: str, rows: Sequence[Row], command: str, machine: Mapping[str, Any],
             versions: Mapping[str, str]) -> list[str]:
    judged = [row for row in rows if row.met is not None]
    version_list = ", ".join(f"{key} {value}" for key, value in versions.items())
    lines = [f"## {name}: {verdict(rows)}", "", f"`{command}`", "",
             f"{machine['system']} {machine['kernel']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB; "
             f"{version_list}. {len(rows)} rows, {len(judged)} with a target:", "",
             "| | median | baseline | unit | metric | target |", "| --- | ---: | ---: | --- | --- | --- |"]
    for row in judged:
        cells = ["met" if row.met else "**missed**", f"{row.value:.4g}{row.range_text}", row.baseline_text, row.unit,
                 row.metric, row.target]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": platform.system(), "kernel": platform.release(), "cores": os.cpu_count(),
            "load": [round(value, 1) for value in os.getloadavg()], "memory_gib": round(memory / 2**30, 1)}


def main(argv: list[str]) -> None:
    """Print the results of a directory as Markdown."""
    parser = CliParser(prog="python -m benchmarks.results", description="Print benchmark results as Markdown.")
    parser.add_argument("directory", nargs="?", default="results", metavar="DIR",
                        help="directory of JSON files (default: %(default)s)")
    print(to_markdown(Path(parser.parse_args(argv).directory)), end="")


if __name__ == "__main__":
    from benchmarks.suite import start

    start(main)
