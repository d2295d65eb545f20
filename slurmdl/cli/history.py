"""Commands over past jobs: `slurmdl audit` and `slurmdl replay`."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from typing import TYPE_CHECKING

from slurmdl import units
from slurmdl.cli.arguments import MAX_SEED, CliParser, check_bounds, write_output_file
from slurmdl.errors import UsageError
from slurmdl.text import pluralize, print_escaped

if TYPE_CHECKING:
    from slurmdl.history.accounting import JobTable
    from slurmdl.history.audit import AuditOptions
    from slurmdl.history.replay import PolicyOutcome, ReplaySettings

_DEFAULT_PERIOD_S = 7 * 86_400  # of sacct, without --since
_DEFAULT_JOBS, _DEFAULT_LOAD = 2000, 0.85


def _audit_parser() -> argparse.ArgumentParser:
    parser = CliParser(prog="slurmdl audit",
                       description="Compare the leaf zones of past jobs with the fewest possible ones, and predict "
                                   "the communication time that better nodes would have saved (docs/audit.md).")
    parser.add_argument("records", nargs="?", metavar="FILE",
                        help="output of `sacct -P` or `sacct --json`, which may be compressed by gzip (columns: "
                             "docs/audit.md), - for stdin (default: run sacct)")
    parser.add_argument("--topology", metavar="FILE", help="topology file (default: the cluster's topology)")
    parser.add_argument("-S", "--since", metavar="TIME",
                        help="audit jobs that started at or after TIME, e.g. 2024-05-01 or now-7days (default: of a "
                             "file all, of sacct now-7days)")
    parser.add_argument("-E", "--until", metavar="TIME", help="audit jobs that started before TIME")
    parser.add_argument("-u", "--user", default="", metavar="LIST", help="audit the jobs of these users only")
    parser.add_argument("-r", "--partition", default="", metavar="LIST",
                        help="audit the jobs of these partitions only")
    parser.add_argument("--strategy", default="allreduce,gossip", metavar="LIST",
                        help="assumed strategies, allreduce or gossip; the first one ranks the jobs "
                             "(default: %(default)s)")
    parser.add_argument("--comm-share", type=float, default=0.3, metavar="SHARE",
                        help="share of the run time that jobs spend in communication, 0 to 0.95 "
                             "(default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.add_argument("--csv", metavar="FILE", help="also write all audited jobs, worst first")
    parser.add_argument("--html", metavar="FILE", help="also write a report with pictures, one file without scripts")
    return parser


def audit(argv: list[str]) -> int:
    arguments = _audit_parser().parse_args(argv)
    options = _audit_options(arguments)

    from slurmdl import config
    from slurmdl.history.audit import audit_jobs
    from slurmdl.history.audit_report import audit_to_json, format_audit, format_csv, format_html, summarize_audit
    from slurmdl.launch import cluster_state
    from slurmdl.topology import load

    topology = load.load_topology(arguments.topology)
    scores = cluster_state.load_link_scores(config.load_config(), "off")
    result = audit_jobs(_read_records(arguments.records, options), topology, scores, options)
    summary = summarize_audit(result)
    if arguments.csv:
        write_output_file(arguments.csv, "--csv", format_csv(result))
    if arguments.html:
        write_output_file(arguments.html, "--html", format_html(result, summary))
    if arguments.json:
        print(json.dumps(audit_to_json(result, summary)))
    else:
        print_escaped("\n".join(format_audit(result, summary)))
    return 0


def _audit_options(arguments: argparse.Namespace) -> AuditOptions:
    from slurmdl.history.audit import AuditOptions
    from slurmdl.history.sacct_format import parse_moment

    check_bounds(arguments, {"comm_share": (0, 0.95)})
    now_s = time.time()
    since_s, until_s = (None if text is None else parse_moment(text, option, now_s) for text, option in (
        (arguments.since, "--since"), (arguments.until, "--until")))
    if arguments.records is None and since_s is None:
        since_s = int(until_s or now_s) - _DEFAULT_PERIOD_S
    if since_s is not None and until_s is not None and since_s >= until_s:
        raise UsageError(f"--since {arguments.since}: expected a time before --until {arguments.until}")
    users, partitions, strategies = (tuple(dict.fromkeys(filter(None, text.split(",")))) for text in (
        arguments.user, arguments.partition, arguments.strategy))
    if not strategies:
        raise UsageError("--strategy: expected allreduce or gossip")
    return AuditOptions(strategies, comm_share=arguments.comm_share, since_s=since_s, until_s=until_s, users=users,
                        partitions=partitions)


def _read_records(path: str | None, options: AuditOptions) -> JobTable:
    from slurmdl.history import accounting

    if path is None:
        assert options.since_s is not None, "_audit_options sets the default period"
        return accounting.query_accounting(options.since_s, options.until_s or int(time.time()) + 1)
    if path == "-":
        if not sys.stdin:
            raise UsageError("-: standard input is closed")
        assert isinstance(sys.stdin.buffer, io.BufferedReader), "standard input is binary"
        return accounting.read_accounting_stream(sys.stdin.buffer, "standard input")
    return accounting.read_accounting_file(path)


def _replay_parser() -> argparse.ArgumentParser:
    parser = CliParser(prog="slurmdl replay",
                       description="Simulate the cluster over a job trace, with nodes chosen by Slurm's rule, by "
                                   "slurmdl, by both, and at random (docs/replay.md).")
    trace = parser.add_argument_group("jobs")
    trace.add_argument("file", nargs="?", metavar="FILE",
                       help="trace: output of sacct -P or --json, Standard Workload Format or CSV "
                            "(default: generated)")
    trace.add_argument("--format", default="", choices=("sacct", "swf", "csv"),
                       help="format of FILE (default: by its content)")
    trace.add_argument("--columns", default="", metavar="FIELD=COLUMN,...", help="columns of a CSV file")
    trace.add_argument("--cpus-per-node", type=int, default=0, metavar="N", help="convert processors to whole nodes")
    trace.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="convert GPUs to whole nodes")
    trace.add_argument("--jobs", type=int, metavar="N",
                       help=f"first N jobs of FILE (default: all), or generated jobs (default: {_DEFAULT_JOBS:,})")
    trace.add_argument("--load", type=float, metavar="SHARE",
                       help="scale the times between submissions to this load, 0.01 to 2 (default: as recorded, "
                            f"generated {_DEFAULT_LOAD:g})")
    trace.add_argument("--seed", type=int, default=0, metavar="N", help="first random seed (default: %(default)s)")
    trace.add_argument("--seeds", type=int, default=1, metavar="N",
                       help="generated traces, one per seed (default: %(default)s)")
    cluster = parser.add_argument_group("cluster and policies")
    cluster.add_argument("--topology", metavar="FILE", help="topology file (default: the cluster's topology)")
    cluster.add_argument("--policy", default="slurm,slurmdl,mixed,random", metavar="NAME,...",
                         help="slurm, slurmdl, mixed, random (default: all)")
    cluster.add_argument("--share", type=float, default=0.5, metavar="SHARE",
                         help="share of users with slurmdl in the policy mixed (default: %(default)g)")
    model = parser.add_argument_group("communication")
    model.add_argument("--strategy", default="allreduce", metavar="NAME",
                       help="allreduce (a ring) or gossip (all to all) (default: %(default)s)")
    model.add_argument("--model-bytes", default="100M", metavar="BYTES",
                       help="size of the model (default: %(default)s)")
    model.add_argument("--bound-share", type=float, default=0.5, metavar="SHARE",
                       help="share of the multi-node jobs that are bound by communication (default: %(default)g)")
    model.add_argument("--comm-share", type=float, default=0.3, metavar="SHARE",
                       help="share of communication in the recorded run time of such a job (default: %(default)g)")
    model.add_argument("--fixed-run-times", action="store_true",
                       help="report the resulting run times, but simulate the recorded ones")
    parser.add_argument("--processes", type=int, default=1, metavar="N",
                        help="processes for several seeds (default: %(default)s)")
    parser.add_argument("--svg", metavar="FILE", help="write a chart of the distributions")
    parser.add_argument("--json", action="store_true", help="JSON output")
    return parser


def replay(argv: list[str]) -> int:
    options = _replay_parser().parse_args(argv)
    _check_replay_options(options)
    from slurmdl.history.replay import draw_replay, format_replay, pool_outcomes, replay_to_json

    settings = _replay_settings(options)
    notes, by_seed = _replay(options, settings)
    outcomes = [pool_outcomes(of_policy) for of_policy in zip(*by_seed, strict=True)]
    communication = settings.communication
    assumed = (f"{communication.bound_share:.0%} of the multi-node jobs are bound by communication "
               f"({settings.strategy}), {communication.comm_share:.0%} of their run time; recorded run times are "
               "those on slurmdl's nodes of an empty cluster"
               + "; the simulation keeps them" * communication.fixed_run_times)
    if options.svg:
        write_output_file(options.svg, "--svg", draw_replay(f"{notes[0]}: share of the jobs up to each value",
                                                            outcomes))
    if options.json:
        print(json.dumps({"trace": notes, "assumed": assumed, "policies": replay_to_json(outcomes)}, indent=1))
        return 0
    print_escaped("\n".join([*notes, assumed, "", *format_replay(outcomes)]))
    return 0


def _check_replay_options(options: argparse.Namespace) -> None:
    check_bounds(options, {
        **dict.fromkeys(("share", "bound_share", "comm_share"), (0, 1)), "load": (0.01, 2), "jobs": (2, 10_000_000),
        "seeds": (1, 1000), "seed": (0, MAX_SEED), "processes": (1, 256),
        **dict.fromkeys(("cpus_per_node", "gpus_per_node"), (0, 10**6))})
    if options.file is not None and options.seeds > 1:
        raise UsageError("--seeds: expected without FILE, as only generated traces differ by seed")


def _replay_settings(options: argparse.Namespace) -> ReplaySettings:
    from slurmdl import config
    from slurmdl.history.replay import POLICIES, ReplaySettings
    from slurmdl.history.scheduler import Communication
    from slurmdl.launch import cluster_state
    from slurmdl.topology import load

    policies = tuple(dict.fromkeys(filter(None, options.policy.split(","))))
    if not policies or not {*policies} <= {*POLICIES}:
        raise UsageError(f"--policy {options.policy}: expected {', '.join(POLICIES)}")
    scores = cluster_state.load_link_scores(config.load_config(), "off")
    return ReplaySettings(load.load_topology(options.topology), policies, options.share, options.strategy,
                          units.parse_bytes(options.model_bytes, "--model-bytes"), scores,
                          Communication(options.bound_share, options.comm_share, options.fixed_run_times))


def _replay(options: argparse.Namespace,
            settings: ReplaySettings) -> tuple[list[str], list[list[PolicyOutcome]]]:
    """Notes on the trace, and the outcomes of the policies for each seed."""
    from slurmdl.history.replay import replay_policies, replay_seeds, usable_trace
    from slurmdl.history.traces import generate_lublin_trace, parse_column_map, read_trace

    machine = settings.machine()
    nodes = machine.leaves.nodes
    cluster = f"{settings.topology.source}: {nodes:,} nodes in {pluralize(len(machine.leaves.size), 'leaf zone')}"
    jobs, load = options.jobs or _DEFAULT_JOBS, options.load or _DEFAULT_LOAD
    columns = parse_column_map(options.columns)
    if options.file is None:
        trace = generate_lublin_trace(jobs, nodes, load, options.seed)
    else:
        trace = read_trace(options.file, options.format, columns, options.cpus_per_node,
                           options.gpus_per_node).first(options.jobs or 0)
    trace = usable_trace(trace, machine)
    if len(trace) < 2 or not trace.submit_s[-1]:
        raise UsageError(f"{trace.source}: expected at least two jobs, submitted at different times")
    if options.file is not None and options.load is not None:
        trace = trace.scaled_to_load(options.load, nodes)
    notes = [f"{trace.source}: {pluralize(len(trace), 'job')}, load {trace.load(nodes):.3g}; {cluster}",
             *trace.notes]
    if options.seeds > 1:
        notes.append(f"pooled over {options.seeds} seeds from {options.seed}")
        seeds = range(options.seed, options.seed + options.seeds)
        return notes, replay_seeds(settings, jobs, load, seeds, options.processes)
    return notes, [list(replay_policies(trace, machine, settings, options.seed))]
