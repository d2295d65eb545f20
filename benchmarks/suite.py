"""Command lines of the benchmarks, and suites of parts that can run separately."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from multiprocessing.pool import Pool
from typing import NoReturn

from benchmarks import results
from benchmarks.results import Row
from slurmdl import files
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import SlurmdlError, UsageError, report_error

_RESULTS_HELP = "write all rows, negative controls included, as JSON"


def start(main: Callable[[list[str]], None]) -> NoReturn:
    """Run the command line of a benchmark; exit with the same statuses as `slurmdl`.

    SIGTERM acts like Ctrl-C, so that the benchmark ends its jobs, sandboxes and workers.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report_error(error))
    sys.exit(0)


@contextmanager
def worker_pool() -> Iterator[Pool]:
    """A pool with a process for each core.

    A pool ends its processes by SIGTERM, so they are forked without this process's handler, which might ignore it.
    """
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        pool = multiprocessing.Pool(len(os.sched_getaffinity(0)))
    finally:
        signal.signal(signal.SIGTERM, handler)
    with pool:
        yield pool


def check_output_file(path: str, option: str) -> None:
    """Check before long work that the file of an option can be written; UsageError otherwise."""
    try:
        files.check_writable(path)
    except OSError as error:
        raise UsageError(f"{option}={path}: cannot be written ({error.strerror})") from error


def run_repeated(name: str, description: str, run: Callable[[int, str | None], None], repeats: int,
                 argv: list[str]) -> None:
    """Parse --repeats and --results, and call run(repeats, results file).

    Args:
        name: module in `benchmarks`.
        repeats: default of --repeats.

    Raises:
        UsageError: invalid options, or a results file that cannot be written.
    """
    parser = CliParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--repeats", type=int, default=repeats, metavar="N",
                        help="number of repeats (default: %(default)s)")
    parser.add_argument("--results", metavar="FILE", help=_RESULTS_HELP)
    options = parser.parse_args(argv)
    if options.results:
        check_output_file(options.results, "--results")
    if options.repeats < 1:
        raise UsageError(f"--repeats={options.repeats}: expected a number of at least 1")
    run(options.repeats, options.results)


def module_rows(functions: Mapping[str, str]) -> Callable[[str, int, bool], Iterator[Row]]:
    """Return a function that imports the module of a part and yields its rows.

    Args:
        functions: part -> MODULE, whose `rows(seed)` is called, or MODULE:FUNCTION.
    """
    def rows(part: str, seed: int, quick: bool) -> Iterator[Row]:
        module, _, function = functions[part].partition(":")
        yield from getattr(import_module(module), function or "rows")(seed, **({"quick": True} if quick else {}))

    return rows


def package_versions(*packages: str) -> Callable[[], dict[str, str]]:
    """Return a function that looks up the installed versions of these packages."""
    return lambda: {package: version(package) for package in packages}


def draw_beside(results_file: str, draw: Callable[[str], None]) -> None:
    """Call `draw` with the name of an SVG next to the results file; say so if matplotlib is not installed."""
    try:
        draw(f"{os.path.splitext(results_file)[0]}.svg")
    except ImportError:
        print("no plot: pip install 'slurmdl[plot]'", file=sys.stderr)


@dataclass(frozen=True)
class Suite:
    """A benchmark of several parts.

    Attributes:
        name: package in `benchmarks`.
        description: text of --help.
        parts: names, in running order.
        rows: (part, seed, quick) -> measured rows.
        versions: returns the versions that the rows depend on.
        seed: default of --seed.
        quick: help text of --quick; "" if the suite does not have it.
        positional: whether parts are arguments rather than values of --only.
        plot: called with the name of the results file after it is written.
    """

    name: str
    description: str
    parts: tuple[str, ...]
    rows: Callable[[str, int, bool], Iterator[Row]]
    versions: Callable[[], Mapping[str, str]]
    seed: int = 1
    quick: str = ""
    positional: bool = False
    plot: Callable[[str], None] | None = None

    def main(self, argv: list[str]) -> None:
        """Run the suite with these command-line arguments.

        Raises:
            UsageError: invalid options, or a results file that cannot be written.
        """
        parser = CliParser(prog=f"python -m benchmarks.{self.name}", description=self.description)
        parts = ", ".join(self.parts)
        if self.positional:
            parser.add_argument("parts", nargs="*", metavar="NAME", help=f"{parts} (default: all)")
        else:
            parser.add_argument("--only", default="", metavar="PART,...", help=f"{parts} (default: all)")
        if self.quick:
            parser.add_argument("--quick", action="store_true", help=self.quick)
        parser.add_argument("--seed", type=int, default=self.seed, metavar="N",
                            help="first random seed (default: %(default)s)")
        parser.add_argument("--results", metavar="FILE", help=_RESULTS_HELP)
        options = parser.parse_args(argv)
        if options.results:
            check_output_file(options.results, "--results")
        only = options.parts if self.positional else [part for part in options.only.split(",") if part]
        self.run(only, options.results, options.seed, self.quick != "" and options.quick)

    def run(self, only: Sequence[str] = (), results_file: str | None = None, seed: int | None = None,
            quick: bool = False) -> None:
        """Measure the parts in `only` (default: all), print the table, and write the rows to `results_file`.

        Progress goes to stderr. A part that fails counts as missed; the other parts still run.

        Raises:
            UsageError: unknown part.
        """
        seed = self.seed if seed is None else seed
        for part in only:
            if part not in self.parts:
                raise UsageError(f"{'' if self.positional else '--only '}{part}: unknown part; "
                                 f"expected one of {', '.join(self.parts)}")
        rows_by_part: dict[str, list[Row]] = {}
        for part in only or self.parts:
            start_s = time.monotonic()
            rows_by_part[part] = []
            try:
                for row in self.rows(part, seed, quick):
                    rows_by_part[part].append(row)
                    print(f"{part}: {format_row(row)}", file=sys.stderr, flush=True)
            except (SlurmdlError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                print(f"{part}: failed: {error}", file=sys.stderr, flush=True)
                rows_by_part[part].append(results.make_row(f"{part}: completed", [0], "", target="1", met=False))
            print(f"{part}: {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
        rows = list(itertools.chain.from_iterable(rows_by_part.values()))
        print(format_table(rows_by_part))
        if not results_file:
            print(results.verdict(rows))
            return
        part_options = " ".join(only) if self.positional else f"--only {','.join(only)}" if only else ""
        command_words = [f"python -m benchmarks.{self.name}", *filter(None, (part_options, "--quick" * quick))]
        results.write(results_file, rows, seed=seed, versions=self.versions(),
                      command=f"{' '.join(command_words)} --seed {seed} --results {results_file}")
        if self.plot is not None:
            self.plot(results_file)


def format_table(rows_by_part: Mapping[str, Sequence[Row]]) -> str:
    """Format the rows of all parts, then repeat the rows that missed their target."""
    missed = [row for rows in rows_by_part.values() for row in rows if row.met is False]
    parts = {**rows_by_part, "missed": missed} if missed else rows_by_part
    lines = [f"{'':7}{'median':>10} {'baseline':>10} unit   metric (smallest to largest): target"]
    for part, rows in parts.items():
        lines += ["", part, *map(format_row, rows)]
    return "\n".join(lines)


def format_row(row: Row) -> str:
    """Format one line of the table: verdict, median, baseline, unit, metric, range and target."""
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    target = f": {row.target}" if row.target else ""
    return f"{verdict:7}{row.value:10.4g} {row.baseline_text:>10} {row.unit:6} {row.metric}{row.range_text}{target}"
