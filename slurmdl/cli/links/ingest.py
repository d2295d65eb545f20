"""store samples and publish link scores

Reads samples as JSON lines from files and a spool directory, stores them in a database on a local disk, and publishes
a snapshot for `--dl-link-scores=auto`. Runs once, or with --interval until terminated.
"""

from __future__ import annotations

import argparse
import re
import signal
from queue import Empty, SimpleQueue
from time import time

from slurmdl import config, files
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import SlurmdlError, UsageError, report_error, warn
from slurmdl.links.collector import Collector, SampleStore
from slurmdl.slurm.slurm_conf import slurm_conf_path
from slurmdl.topology import load

DEFAULT_DATABASE = "/var/lib/slurmdl/samples.db"


def run(argv: list[str]) -> int:
    options = _build_parser().parse_args(argv)
    if options.interval is not None and not 0 < options.interval < float("inf"):
        raise UsageError(f"--interval {options.interval:g}: expected a number of seconds greater than 0")
    settings = config.load_config().link_scores
    trusted_users = _trusted_users(options.users, settings.trusted_owner)
    with SampleStore.open(options.database) as store:
        collector = Collector(store, options.snapshot or settings.file, settings, options.textfile, trusted_users,
                              _known_link_names())
        for file in options.files:
            store.add(collector.parse_samples(files.read_trusted_lines(file, trusted_users), time()))
        if options.interval is None:
            _ingest_and_publish(collector, options.spool_dir)
        else:
            _ingest_until_signal(collector, options.spool_dir, options.interval)
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = CliParser(prog="slurmdl links ingest", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="samples as JSON lines; - for stdin")
    parser.add_argument("--database", default=DEFAULT_DATABASE, metavar="FILE",
                        help="database of samples, on a local disk (default: %(default)s)")
    parser.add_argument("--snapshot", metavar="FILE",
                        help="published link scores (default: link_scores.file of slurmdl.yaml)")
    parser.add_argument("--textfile", default="", metavar="FILE", help="publish link scores as Prometheus text, too")
    parser.add_argument("--spool-dir", metavar="DIR", help="store the samples of its *.jsonl files and remove them")
    parser.add_argument("--users", metavar="NAME,...",
                        help="trusted users, in addition to root, SlurmUser, link_scores.trusted_owner and the user "
                             "of this process")
    parser.add_argument("--interval", type=float, metavar="SECONDS",
                        help="keep running, and read the spool and publish periodically")
    return parser


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
    for name in users.split(",") if users is not None else ():
        if not files.resolve_uids(name):
            raise UsageError(f"--users {users}: {name!r} is no user of this host; expected comma-separated names or "
                             "numbers")
    return ",".join(filter(None, (users, owner, _slurm_user())))


def _slurm_user() -> str:
    """SlurmUser of slurm.conf; "" if it is not set or the file cannot be read."""
    try:
        with open(slurm_conf_path(), encoding="utf-8", errors="replace") as file:
            users = re.findall(r"(?im)^\s*SlurmUser\s*=\s*([^\s#]+)", file.read())
    except OSError:
        return ""
    return users[-1].partition("(")[0] if users else ""


def _known_link_names() -> frozenset[str] | None:
    """Names of all nodes and zones; None if no topology file of Slurm exists or can be read."""
    try:
        topologies = load.load_slurm_topology_file()
    except SlurmdlError as error:
        warn(f"{error}; samples of all names are accepted")
        return None
    if topologies is None:
        return None
    return frozenset(name for each in topologies.topologies for name in (*each.nodes, *each.zones))
