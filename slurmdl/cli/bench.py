"""the same jobs side by side: plain Slurm, leaf order, placed"""

from __future__ import annotations

from slurmdl.cli.parser import Parser
from slurmdl.errors import UsageError


def run(argv: list[str]) -> int:
    top = Parser(prog="slurmdl bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="two training jobs three ways on a sandbox of 8 nodes",
                               description="Two training jobs three ways on a sandbox of 8 nodes (needs root).")
    demo.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each (default: %(default)s)")
    demo.add_argument("--results", metavar="FILE", help="write the figures, a control among them, as JSON")
    options = top.parse_args(argv)
    if options.repeats < 1:
        raise UsageError(f"--repeats {options.repeats}: at least 1 expected")
    from slurmdl.bench import demo as bench

    bench.run(options.repeats, options.results)
    return 0
