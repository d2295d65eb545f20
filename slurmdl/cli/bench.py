"""figures, measured: jobs side by side, and the speed of slurmdl itself"""

from __future__ import annotations

import signal
from importlib import import_module
from pathlib import Path

from slurmdl.cli.parser import Parser, check_file
from slurmdl.errors import UsageError, warn
from slurmdl.output import show

#: benchmarks of several parts -> the seed, what it is of, and what is measured in few words and in more
PARTS = {
    "placement": (0, "of all traces", "speed, quality and herding of placement",
                  "How fast and how good placement is, beside Slurm's choice, graph mappers and many submitters at "
                  "once (parts need root)."),
    "strategies": (1, "the first one", "training strategies side by side",
                   "Bytes, accuracy and time of training strategies, side by side."),
    "scores": (0, "of all links", "what link scores recover, are worth, and cost at scale",
               "What probes recover of shaped links, what scores are worth to training (both need root), and how bad "
               "links are found among 10,000 nodes."),
    "unequal": (1, "the first one", "ranks of unequal speed, and what placement saves in training",
                "What load balance recovers of ranks of unequal speed, and what placement saves jobs of several "
                "tasks per node in bytes and time (needs root)."),
    "simulate": (1, "of clusters", "simulated beside measured step times, and up to 10,000 nodes",
                 "Simulated step times beside those of real placements (needs root), and what placement is worth "
                 "from 8 to 10,000 nodes."),
}
#: those of them that can be had with less, and with how much
QUICK = {"strategies": "fewer repeats", "simulate": "fewer placements, up to 512 nodes"}


def run(argv: list[str]) -> int:
    top = Parser(prog="slurmdl bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="two training jobs three ways on a sandbox of 8 nodes",
                               description="Two training jobs three ways on a sandbox of 8 nodes (needs root).")
    demo.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each (default: %(default)s)")
    demo.add_argument("--results", metavar="FILE", help="write the figures, a control among them, as JSON")
    topology = commands.add_parser("topology", help="how long topologies take to read and to ask, by size",
                                   description="How long topologies take to read and to ask, by size.")
    topology.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each (default: %(default)s)")
    topology.add_argument("--results", metavar="FILE", help="write the figures, controls among them, as JSON")
    model = commands.add_parser("model", help="predicted against measured communication of random placements",
                                description="Predicted against measured communication of random placements on a "
                                            "sandbox (needs root).")
    model.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each (default: %(default)s)")
    model.add_argument("--results", metavar="FILE", help="write the figures, controls among them, as JSON")
    spank = commands.add_parser("spank", help="what the SPANK plugin adds to a task's launch",
                                description="What the SPANK plugin adds to the launch of a task, on sandboxes "
                                            "(needs root, and the plugin built).")
    spank.add_argument("--repeats", type=int, default=1000, metavar="N", help="steps of each kind (%(default)s)")
    spank.add_argument("--results", metavar="FILE", help="write the figures, controls among them, as JSON")
    matrix = commands.add_parser("run", help="frameworks, strategies, models, nodes and placements of a SPEC.yaml",
                                 description="Submits every cell of a matrix as a job of this cluster, one after the "
                                             "other, and goes on where it stopped; see docs/bench.md.")
    matrix.add_argument("spec", metavar="SPEC.yaml", help="what is compared")
    matrix.add_argument("--results", metavar="DIR", help="shared by all nodes (default: the name of SPEC)")
    matrix.add_argument("--again", action="store_true", help="also what failed before")
    report = commands.add_parser("report", help="table, CSV and pictures of what `run` has measured",
                                 description="Writes report.md, report.csv and pictures (with matplotlib) into DIR.")
    report.add_argument("results", metavar="DIR", help="that of `slurmdl bench run`")
    for name, (seed, of, text, description) in PARTS.items():
        bench = commands.add_parser(name, help=text, description=description)
        bench.add_argument("--only", default="", metavar="PART,...", help="these parts only (default: all)")
        if name in QUICK:
            bench.add_argument("--quick", action="store_true", help=QUICK[name])
        bench.add_argument("--seed", type=int, default=seed, metavar="N", help=f"{of} (default: %(default)s)")
        bench.add_argument("--results", metavar="FILE", help="write the figures, controls among them, as JSON" + (
            ", and a picture beside it" if name == "simulate" else ""))
    shown = commands.add_parser("results", help="tables of what benchmarks have written, in Markdown",
                                description="Prints what benchmarks have written with --results as Markdown, as in "
                                            "docs/results.md.")
    shown.add_argument("folder", nargs="?", default="results", metavar="DIR", help="of JSON files (%(default)s)")
    paper = commands.add_parser("paper", help="the experiments of the papers behind slurmdl, published beside ours",
                                description="For each paper behind slurmdl the experiment that stands for it, with "
                                            "its published figures beside ours: dltap, zones, adaptive-gossip, "
                                            "heterogeneous, frameworks (most need root).")
    paper.add_argument("names", nargs="*", metavar="PAPER", help="these alone (default: all)")
    paper.add_argument("--seed", type=int, default=1, metavar="N", help="the first one (default: %(default)s)")
    paper.add_argument("--results", metavar="FILE", help="write the figures, controls among them, as JSON")
    exact = commands.add_parser("exact", help="the choice of nodes beside the exact optimum",
                                description="The choice of nodes beside the exact optimum, on small random clusters.")
    exact.add_argument("--clusters", type=int, default=2000, metavar="N", help="cases that count (%(default)s)")
    exact.add_argument("--seed", type=int, default=1, metavar="N", help="of the clusters (default: %(default)s)")
    exact.add_argument("--results", metavar="FILE", help="write the figures, a control among them, as JSON")
    options = top.parse_args(argv)
    if options.command not in ("run", "report", "results") and options.results:
        check_file(options.results, "--results")
    # a benchmark that is ended takes its jobs, sandboxes and workers with it, as by Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.command == "exact":
        from slurmdl.bench import exact as bench_exact

        bench_exact.run(max(1, options.clusters), options.results, options.seed)
        return 0
    if options.command == "results":
        from slurmdl.bench.results import document

        print(document(Path(options.folder)), end="")
        return 0
    if options.command == "paper":
        from slurmdl.bench import papers

        papers.run(options.names, options.results, options.seed)
        return 0
    if options.command == "run":
        return _run(options.spec, options.results, options.again)
    if options.command == "report":
        return _report(options.results)
    if options.command in PARTS:
        further = [options.quick] if options.command in QUICK else []
        import_module(f"slurmdl.bench.{options.command}").run(
            [part for part in options.only.split(",") if part], options.results, options.seed, *further)
        return 0
    if options.repeats < 1:
        raise UsageError(f"--repeats {options.repeats}: at least 1 expected")
    import_module(f"slurmdl.bench.{options.command}").run(options.repeats, options.results)
    return 0


def _run(spec: str, results: str | None, again: bool) -> int:
    from slurmdl.bench.matrix import jobs
    from slurmdl.bench.matrix.spec import read

    folder = Path(results or Path(spec).with_suffix(""))
    try:
        jobs.run(read(spec), folder, again)
    except KeyboardInterrupt:
        warn(f"bench run: broken off; `slurmdl bench run {spec} --results {folder}` goes on")
        raise
    return _report(str(folder))


def _report(results: str) -> int:
    from slurmdl.bench.matrix import report

    folder = Path(results)
    files = report.write(folder)
    try:
        from slurmdl.bench.matrix import pictures
    except ImportError:
        warn("no pictures: they need matplotlib (pip install 'slurmdl[plot]')")
    else:
        files += pictures.draw(folder, report.lines(folder))
    show(files[0].read_text().rstrip("\n"))
    show("\n".join(map(str, files)))
    return 0
