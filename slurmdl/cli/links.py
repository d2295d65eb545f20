"""measure links, store the samples, show link scores"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from time import time
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, SlurmdlError, UnavailableError, UsageError, report_error, warn
from slurmdl.text import pluralize, print_escaped

# `counters` runs every minute on every node: all that it does not need is imported by the other commands
if TYPE_CHECKING:
    import argparse

    from slurmdl.links.collector import Collector
    from slurmdl.topology.topology import Topology

DEFAULT_DATABASE = "/var/lib/slurmdl/samples.db"
#: option of `counters` -> metavar and help
_COUNTERS_OPTIONS = {
    "spool-dir": ("DIR", "directory for samples, read by `slurmdl links ingest` (default: spool in the state "
                         "directory)"),
    "state-dir": ("DIR", "directory of the last reading (default: /var/lib/slurmdl for root)"),
    "node-name": ("NAME", "name of this node in Slurm (default: its host name)"),
    "interface": ("IF", "network interface whose speed is reported (default: the fastest)"),
}


def build_parser() -> argparse.ArgumentParser:
    from slurmdl import units
    from slurmdl.cli.arguments import CliParser, duration_between

    top = CliParser(prog="slurmdl links", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, more: str = "", epilog: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text}{more}", epilog=epilog)

    probe = command("probe", "measure links by a short job",
                    " with one task per node, or inside a job on its own nodes",
                    "Options after -- are passed to srun, e.g. `-- --partition=debug`.")
    selection = probe.add_mutually_exclusive_group()
    selection.add_argument("--nodes", metavar="LIST", help="hostlist, e.g. n[1-8] (default in a job: all its nodes)")
    selection.add_argument("--all", action="store_true", help="all idle nodes")
    probe.add_argument("--budget", default="30s", type=duration_between(1, 3600), metavar="TIME",
                       help="time for all rounds (default: %(default)s)")
    probe.add_argument("--rate-limit", default=0.0, type=lambda text: units.parse_bytes(text, "--rate-limit"),
                       metavar="RATE", help="bytes/s of one stream, e.g. 100M; throughput at the limit is not "
                                            "reported")
    probe.add_argument("--interface", default="", metavar="IF",
                       help="network interface (default: that of the route to the leader)")
    probe.add_argument("--output", metavar="FILE",
                       help="file for the samples as JSON lines, - for stdout (default: the user's own samples)")

    counters = command("counters", "sample this node's kernel counters", """

Writes nothing to stdout and exits with 0 even after errors (unless --strict), so it can run as Slurm's
HealthCheckProgram, in a Prolog or from a systemd timer. A state file keeps the last reading.""")
    for name, (metavar, text) in _COUNTERS_OPTIONS.items():
        counters.add_argument(f"--{name}", dest=name, default="", metavar=metavar, help=text)
    counters.add_argument("--strict", action="store_true", help="exit with an error status if anything fails")

    ingest = command("ingest", "store samples and publish link scores", """

Reads samples as JSON lines from files and a spool directory, stores them in a database on a local disk, and publishes
a score file for `--dl-link-scores=auto`. Runs once, or with --interval until terminated.""")
    ingest.add_argument("files", nargs="*", metavar="FILE", help="samples as JSON lines; - for stdin")
    ingest.add_argument("--database", default=DEFAULT_DATABASE, metavar="FILE",
                        help="database of samples, on a local disk (default: %(default)s)")
    ingest.add_argument("--score-file", metavar="FILE",
                        help="published link scores (default: link_scores.file of slurmdl.yaml)")
    ingest.add_argument("--textfile", default="", metavar="FILE", help="publish link scores as Prometheus text, too")
    ingest.add_argument("--spool-dir", metavar="DIR", help="store the samples of its *.jsonl files and remove them")
    ingest.add_argument("--users", metavar="NAME,...",
                        help="trusted users, in addition to root, SlurmUser, link_scores.trusted_owner and the user "
                             "of this process")
    ingest.add_argument("--interval", type=float, metavar="SECONDS",
                        help="keep running, and read the spool and publish periodically")

    show = command("show", "show link scores as a table, worst links first")
    show.add_argument("--link-scores", default="auto", metavar="auto|FILE|URL",
                      help="source, as for --dl-link-scores (default: %(default)s)")
    show.add_argument("--topology", metavar="FILE",
                      help="topology file, or text of `scontrol show topology` (default: the cluster's topology)")
    show.add_argument("--all", action="store_true", help="all links (default: as many as fit the terminal)")
    show.add_argument("--json", action="store_true", help="JSON output, worst links first")
    return top


def run(argv: list[str]) -> int:
    if argv[:1] == ["counters"]:
        return _run_counters(argv[1:])
    srun_args: list[str] = []
    if argv[:1] == ["probe"] and "--" in argv:
        separator = argv.index("--")
        argv, srun_args = argv[:separator], argv[separator + 1:]
    options = build_parser().parse_args(argv)
    if options.command == "probe":
        return _probe(options, srun_args)
    return _ingest(options) if options.command == "ingest" else _show(options)


def load_topology_or_flat(path: str | None, nodes: Sequence[str], consequence: str) -> Topology:
    """The topology; if the cluster's cannot be read, one zone of these nodes, and a warning with the consequence."""
    from slurmdl.topology import load

    if path:
        return load.load_topology(path)
    topology, reason = load.topology_or_flat(nodes)
    if reason:
        warn(f"{reason}; {consequence}")
    return topology


def _probe(options: argparse.Namespace, srun_args: Sequence[str]) -> int:
    from slurmdl.links import aggregate, capacity
    from slurmdl.links.probe.pair_probe import ProbeConfig
    from slurmdl.links.probe.probe_step import ProbeStep, run_probe_step
    from slurmdl.links.samples import format_sample_lines, merge_into_sample_file
    from slurmdl.links.score_sources import user_probe_file
    from slurmdl.slurm.slurm_conf import cluster_name

    nodes = _select_nodes(options)
    if len(nodes) < 2:
        raise UsageError(f"slurmdl links probe: {pluralize(len(nodes), 'node')}; expected at least two")
    topology = load_topology_or_flat(None, nodes, "all nodes count as one zone")
    immediate = () if "SLURM_JOB_ID" in os.environ else ("--immediate=30",)
    step = ProbeStep(nodes, topology, ProbeConfig(rate_limit=options.rate_limit), options.budget,
                     interface=options.interface, srun_args=(*immediate, *srun_args))
    samples = run_probe_step(step, os.environ, warn).samples
    if options.output == "-":
        print(format_sample_lines(samples), end="")
        return 0
    rows = capacity.link_rows(aggregate.aggregate_scores(samples, time()), topology)
    print_escaped(capacity.format_link_table(rows, len(rows)))
    path = options.output or user_probe_file(os.environ, cluster_name(os.environ))
    try:
        merge_into_sample_file(path, samples)
    except OSError as error:
        raise UsageError(f"--output={path}: cannot be used ({error.strerror})") from error
    return 0


def _select_nodes(options: argparse.Namespace) -> tuple[str, ...]:
    from slurmdl.slurm import hostlist

    if options.nodes:
        return tuple(dict.fromkeys(hostlist.expand_hostlist(options.nodes)))
    if options.all:
        from slurmdl import config
        from slurmdl.cluster.load import query_cluster

        idle: list[str] = []
        skipped: dict[str, str] = {}
        for node in query_cluster(config.load_config().cluster_backend)[0].nodes:
            if node.state == ("IDLE",) and node.responding:
                idle.append(node.name)
            else:
                skipped[node.name] = "+".join(node.state) if node.responding else "not responding"
        if skipped:
            warn(f"--all: {len(skipped)} of {pluralize(len(idle) + len(skipped), 'node')} skipped, not idle: "
                 f"{hostlist.fold_hostlist(list(skipped))} ({', '.join(sorted(set(skipped.values())))})")
        return tuple(idle)
    if "SLURM_JOB_NODELIST" in os.environ:
        return tuple(hostlist.expand_hostlist(os.environ["SLURM_JOB_NODELIST"]))
    raise UsageError("slurmdl links probe: no nodes; expected --nodes LIST or --all outside of a job")


def _run_counters(argv: Sequence[str]) -> int:
    """Sample the counters; after an error the status is 0 without --strict, which drains no node."""
    try:
        _collect_sample(_parse_fast(argv) or vars(build_parser().parse_args(["counters", *argv])))
    except (SlurmdlError, OSError) as error:
        if "--strict" in argv:
            raise
        if isinstance(error, UsageError):
            warn(str(error))
    return 0


def _parse_fast(argv: Sequence[str]) -> dict[str, str]:
    """Options by name; empty if argparse is needed for abbreviations, --help or errors.

    Importing argparse takes longer than reading the counters.
    """
    options, args = dict.fromkeys([*_COUNTERS_OPTIONS, "strict"], ""), iter(argv)
    for arg in args:
        name, equals, value = arg.removeprefix("--").partition("=")
        if arg != "--strict" and (not arg.startswith("--") or name not in _COUNTERS_OPTIONS):
            return {}
        options[name] = value if equals or arg == "--strict" else next(args, "-")
        if options[name].startswith("-"):
            return {}
    return options


def _collect_sample(options: Mapping[str, str]) -> None:
    import json

    from slurmdl import files
    from slurmdl.links import counters, samples

    directory = options["state-dir"] or state_dir()
    path = os.path.join(directory, "counters.json")
    current, previous = counters.read_counters(interface=options["interface"]), counters.load_reading(path)
    node = options["node-name"] or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    sample = counters.sample_from_counters(previous, current, node, time())
    if counters.should_replace(previous, current):
        try:
            os.makedirs(directory, mode=0o755, exist_ok=True)
            files.write_atomic(path, json.dumps(current.to_json()))
        except OSError as error:
            raise UnavailableError(f"{path}: cannot be written ({error.strerror})") from error
    if sample is not None:
        samples.spool_samples(options["spool-dir"] or os.path.join(directory, "spool"), [sample])


def state_dir() -> str:
    """Default state directory of `counters`."""
    from slurmdl.config import user_dir

    return user_dir(os.environ, "state") if os.geteuid() else "/var/lib/slurmdl"


def _ingest(options: argparse.Namespace) -> int:
    from slurmdl import config, files
    from slurmdl.links.collector import Collector, SampleStore

    if options.interval is not None and not 0 < options.interval < float("inf"):
        raise UsageError(f"--interval {options.interval:g}: expected a number of seconds greater than 0")
    settings = config.load_config().link_scores
    trusted_users = _trusted_users(options.users, settings.trusted_owner)
    with SampleStore.open(options.database) as store:
        collector = Collector(store, options.score_file or settings.file, settings, options.textfile,
                              trusted_users, _known_link_names())
        for file in options.files:
            store.add(collector.parse_samples(files.read_trusted_lines(file, trusted_users), time()))
        if options.interval is None:
            _ingest_and_publish(collector, options.spool_dir)
        else:
            _ingest_until_signal(collector, options.spool_dir, options.interval)
    return 0


def _ingest_and_publish(collector: Collector, spool_dir: str | None) -> None:
    """Ingest the spool, publish link scores and report rejections; an error in the spool does not stop the rest."""
    try:
        if spool_dir:
            collector.ingest_spool(spool_dir)
    finally:
        try:
            collector.publish_scores()
        finally:
            collector.report_rejections()


def _ingest_until_signal(collector: Collector, spool_dir: str | None, interval_s: float) -> None:
    """Ingest the spool and publish link scores periodically until SIGTERM or SIGINT."""
    import signal
    from queue import Empty, SimpleQueue

    stop: SimpleQueue[int] = SimpleQueue()  # whose `put` is safe in a signal handler
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stop.put(number))
    while True:
        try:
            _ingest_and_publish(collector, spool_dir)
        except Exception as error:  # the next cycle may succeed, e.g. if the disk was full
            report_error(error)
        try:
            stop.get(timeout=interval_s)
        except Empty:
            continue
        return


def _trusted_users(users: str | None, owner: str) -> str:
    """Comma-separated users that are trusted in addition to root and the user of this process."""
    from slurmdl import files

    for name in users.split(",") if users is not None else ():
        if not files.resolve_uids(name):
            raise UsageError(f"--users {users}: {name!r} is not a user of this host; expected comma-separated names "
                             "or numbers")
    return ",".join(filter(None, (users, owner, _slurm_user())))


def _slurm_user() -> str:
    """SlurmUser of slurm.conf; "" if it is not set or the file cannot be read."""
    import re

    from slurmdl.slurm.slurm_conf import slurm_conf_path

    try:
        with open(slurm_conf_path(), encoding="utf-8", errors="replace") as file:
            users = re.findall(r"(?im)^\s*SlurmUser\s*=\s*([^\s#]+)", file.read())
    except OSError:
        return ""
    return users[-1].partition("(")[0] if users else ""


def _known_link_names() -> frozenset[str] | None:
    """Names of all nodes and zones; None if no topology file of Slurm exists or can be read."""
    from slurmdl.topology import load

    try:
        topologies = load.load_slurm_topology_file()
    except SlurmdlError as error:
        warn(f"{error}; samples of all names are accepted")
        return None
    if topologies is None:
        return None
    return frozenset(name for each in topologies.topologies for name in (*each.nodes, *each.zones))


def _show(options: argparse.Namespace) -> int:
    import json
    import shutil

    from slurmdl import config, records
    from slurmdl.links import capacity
    from slurmdl.links.score_sources import load_from_sources
    from slurmdl.placement.explain import unmeasured_link_assumption
    from slurmdl.slurm.slurm_conf import cluster_name

    def own_cluster_name() -> str:
        try:
            return cluster_name(os.environ)
        except SlurmdlError as error:
            warn(f"link scores: your own probes are not shown, because the cluster's name is unknown: {error}")
            return ""

    settings = config.load_config()
    loaded = load_from_sources(settings, options.link_scores, os.environ, own_cluster_name)
    for warning in loaded.warnings:
        warn(f"link scores: {warning}")
    if not loaded.scores.link_count and options.link_scores != "auto":
        return InputError.exit_status
    topology = load_topology_or_flat(options.topology, (), "no zones are shown")
    rows = capacity.link_rows(loaded.scores, topology)
    node_count, scored = len(topology.nodes), sum(name in loaded.scores.nodes for name in topology.nodes)
    if options.json:
        links = [{**records.to_json(row.score), "kind": row.kind, "name": row.name, "zone": row.zone,
                  "slowdown": row.slowdown} for row in rows]
        print(json.dumps({"links": links, "time": time(), "nodes": node_count, "nodes_with_score": scored}, indent=1))
        return 0
    if node_count:
        max_age = capacity.format_age(settings.link_scores.max_age)
        print_escaped(f"{scored} of {pluralize(node_count, 'node')} ({scored / node_count:.1%}) with a link "
                      f"score younger than {max_age}\n")
    max_rows = len(rows) if options.all else max(8, shutil.get_terminal_size().lines - 4)
    print_escaped(capacity.format_link_table(rows, max_rows))
    if rows:
        print_escaped(f"x1: same as a link without a score ({unmeasured_link_assumption(topology, loaded.scores)})")
    return 0
