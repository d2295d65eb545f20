"""Results of all benchmarks on one page.

    python -m benchmarks.results_page [DIR]

prints docs/results.md: what was missed, then the question, headline and command of each file in DIR.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.headlines import BENCHMARKS, Headline
from benchmarks.results import ResultsFile, Row
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import InputError

# units as text after a number; others are printed as they are
_UNIT_TEXTS = {"x": "times", "ratio": "times", "share": ""}


def to_markdown(directory: Path) -> str:
    """Format the results of a directory.

    Raises:
        InputError: a file that `results.write` did not write, has no entry in benchmarks/headlines.py, or lacks the
            headline; an entry without a file.
    """
    files = {path.stem: results.read(path) for path in sorted(directory.glob("*.json"))}
    headlines = {headline.file: headline for _, parts in BENCHMARKS.values() for headline in parts}
    for name in files.keys() ^ headlines.keys():
        raise InputError("expected an entry in benchmarks/headlines.py" if name in files else
                         "missing; expected a file for each entry in benchmarks/headlines.py",
                         str(directory / f"{name}.json"))
    sections = [line for name, (target, parts) in BENCHMARKS.items()
                for line in _section(name, target, [(headline, files[headline.file]) for headline in parts])]
    rows = [row for file in files.values() for row in file.rows]
    failed = " `completed` is 0 if a part ended with an error." if any(
        row.metric.endswith(": completed") for row in rows) else ""
    return "\n".join([
        "# Results", "",
        "What each benchmark answers, with the row that answers it first. The other rows, and all samples, are in "
        "[results/](../results). `make results` writes this page.", "",
        f"{results.verdict(rows).capitalize()} targets. A value is the median of its repeats; the smallest and "
        "largest follow. [Sandbox](glossary.md#sandbox), [virtual ranks](glossary.md#virtual-ranks) and [emulated "
        "computation](glossary.md#emulated-compute) are in the glossary; the hosts of a sandbox share the machine's "
        "cores.", "",
        _machines(list(files.values())), "",
        "## Missed targets", "",
        "Rows of one kind share a line, which has the value that is farthest from its target." + failed, "",
        *(line for name, (_, parts) in BENCHMARKS.items() for headline in parts
          for line in _missed_lines(name, headline, files[headline.file])), "",
        *sections])


def _section(name: str, target: str, parts: Sequence[tuple[Headline, ResultsFile]]) -> list[str]:
    rows = [row for _, file in parts for row in file.rows]
    module = f"python -m benchmarks.{name}"
    return [f"## {name}", "",
            f"{results.verdict(rows).capitalize()}. `make {target}`, or `{module}` with the options of a line.", "",
            *(_headline(headline, file, module) for headline, file in parts), ""]


def _headline(headline: Headline, file: ResultsFile, module: str) -> str:
    found = file.select(headline.metric)
    if len(found) > 1:
        raise InputError(f"{headline.metric!r} selects {len(found)} rows; expected the metric of one",
                         f"{file.name}.json")
    row = found[0]
    options = file.command.removeprefix(module).partition(" --results ")[0].strip()
    target = "" if row.met is None else f" Target {row.target}: {'met' if row.met else '**missed**'}."
    return (f"- **{headline.question}** {_value(row)} in `{row.metric}`.{target} {_method(headline, file)}. "
            f"[{file.name}](../results/{file.name}.json), {results.verdict(file.rows)}: `{options}`")


def _missed_lines(name: str, headline: Headline, file: ResultsFile) -> list[str]:
    """Return a line for each kind of missed row; rows of a kind differ only in what precedes the last colon."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in file.rows:
        if row.met is not None:
            kinds.setdefault((row.metric.rpartition(": ")[2], row.target), []).append(row)
    lines = []
    for rows in kinds.values():
        missed = [row for row in rows if not row.met]
        if missed:
            worst = max(missed, key=_distance)
            lines.append(f"- [{file.name}](#{name}), {len(missed)} of {len(rows)}: **{_value(worst)}** in "
                         f"`{worst.metric}`; target {worst.target}. {_method(headline, file)}.")
    return lines


def _distance(row: Row) -> float:
    """How far a missed row is from its target, compared with rows that have the same target."""
    relative = row.value / row.baseline if row.baseline else row.value
    if row.target.startswith("within"):
        return abs(relative - 1)
    return relative if row.target.startswith(("at most", "below")) else -relative


def _format(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"
    return f"{number} {_UNIT_TEXTS.get(unit, unit)}".rstrip()


def _value(row: Row) -> str:
    """The median, the range of several samples, and a baseline to which the median is not already relative."""
    baseline = "" if row.baseline in (None, 1) else f", baseline {_format(row.baseline, row.unit)}"
    return f"{_format(row.value, row.unit)}{row.range_text if row.spread else ''}{baseline}"


def _method(headline: Headline, file: ResultsFile) -> str:
    method = headline.method.format(cores=file.machine["cores"])
    return method[0].upper() + method[1:] + ("; fewer repeats (`--quick`)" if " --quick" in file.command else "")


def _machines(files: Sequence[ResultsFile]) -> str:
    """The machines and versions of all files; a version that differs between files has all its values."""
    machines = sorted({f"{file.machine['system']} {file.machine['kernel'].partition('-')[0]}, "
                       f"{file.machine['cores']} cores, {file.machine['memory_gib']:g} GiB" for file in files})
    versions: dict[str, set[str]] = {}
    for file in files:
        for name, value in file.versions.items():
            if value and name != "kernel":
                versions.setdefault(name, set()).add(value.removeprefix("slurm-wlm "))
    return f"{' or '.join(machines)}; " + ", ".join(
        f"{name} {' or '.join(sorted(values))}" for name, values in versions.items()) + "."


def main(argv: list[str]) -> None:
    """Print the page of a directory of results."""
    parser = CliParser(prog="python -m benchmarks.results_page",
                       description="Print the results of all benchmarks as Markdown.")
    parser.add_argument("directory", nargs="?", default="results", metavar="DIR",
                        help="directory of JSON files (default: %(default)s)")
    print(to_markdown(Path(parser.parse_args(argv).directory)), end="")


if __name__ == "__main__":
    from benchmarks.suite import start

    start(main)
