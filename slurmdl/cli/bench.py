"""compare frameworks, strategies, models and placements in jobs on your own cluster"""

from __future__ import annotations

import signal
from pathlib import Path

from slurmdl.cli.arguments import CliParser
from slurmdl.errors import warn
from slurmdl.text import print_escaped


def run(argv: list[str]) -> int:
    top = CliParser(prog="slurmdl bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    matrix = commands.add_parser("run", help="run all combinations of a SPEC.yaml as jobs",
                                 description="Submit each combination of SPEC.yaml as a job, one after the "
                                             "other. The same command continues an interrupted run; see "
                                             "docs/bench.md.")
    matrix.add_argument("spec", metavar="SPEC.yaml", help="frameworks, strategies, models, nodes and placements")
    matrix.add_argument("--results", metavar="DIR",
                        help="results directory on a shared file system (default: SPEC without .yaml)")
    matrix.add_argument("--retry-failed", action="store_true", help="run failed combinations again")
    report = commands.add_parser("report", help="table, CSV and plots of the results of `run`",
                                 description="Write report.md, report.csv and plots (with matplotlib) to DIR.")
    report.add_argument("results", metavar="DIR", help="results directory of `slurmdl bench run`")
    options = top.parse_args(argv)
    # SIGTERM cancels the running job, like Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.command == "run":
        return _run(options.spec, options.results, options.retry_failed)
    return _report(options.results)


def _run(spec: str, results: str | None, retry_failed: bool) -> int:
    from slurmdl.bench import submit
    from slurmdl.bench.spec import read_matrix_spec

    directory = Path(results or Path(spec).with_suffix(""))
    try:
        submit.run(read_matrix_spec(spec), directory, retry_failed)
    except KeyboardInterrupt:
        warn(f"bench run: interrupted; `slurmdl bench run {spec} --results {directory}` continues")
        raise
    return _report(str(directory))


def _report(results: str) -> int:
    from slurmdl.bench import report

    directory = Path(results)
    files = report.write(directory)
    try:
        files += report.draw_plots(directory, report.report_rows(directory))
    except ImportError:
        warn("no plots: matplotlib is not installed (pip install 'slurmdl[plot]')")
    print_escaped(files[0].read_text().rstrip("\n"))
    print_escaped("\n".join(map(str, files)))
    return 0
