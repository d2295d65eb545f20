"""store samples and publish link scores

Reads samples as JSON lines from files, a spool directory and the network, stores them in a database on a local disk,
and publishes a snapshot for `--dl-link-scores=auto`. Runs once, or with --listen or --interval until terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from time import time

from slurmdl import config, file_trust
from slurmdl.cli.address import parse_address, parse_networks
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import SlurmdlError, UnavailableError, UsageError, report_error, warn
from slurmdl.links.aggregate import AggregationRules
from slurmdl.links.collector import Collector
from slurmdl.links.receiver import SampleReceiver
from slurmdl.links.sample_store import SampleStore
from slurmdl.links.tcp_server import LOOPBACK
from slurmdl.slurm.slurm_conf import slurm_conf_path
from slurmdl.topology import load

DEFAULT_DATABASE = "/var/lib/slurmdl/samples.db"
DEFAULT_INTERVAL_S = 30.0


def run(argv: list[str]) -> int:
    options = _build_parser().parse_args(argv)
    if options.interval is not None and not 0 < options.interval < float("inf"):
        raise UsageError(f"--interval {options.interval:g}: expected a number of seconds greater than 0")
    networks = parse_networks(options.allow, "--allow") if options.allow is not None else LOOPBACK
    address = parse_address(options.listen, "--listen") if options.listen else None
    settings = config.load_config().link_scores
    trusted_users = _trusted_users(options.users, settings.trusted_owner)
    rules = AggregationRules(settings.max_age, settings.half_life, settings.tolerance)
    with SampleStore.open(options.database) as store:
        collector = Collector(store, options.snapshot or settings.file, rules, options.textfile, trusted_users,
                              _known_link_names())
        for file in options.files:
            lines = file_trust.read_trusted_lines(file, trusted_users)
            collector.store_samples(collector.parse_samples(lines, time()))
        if address is None and options.interval is None:
            _ingest_and_publish(collector, options.spool_dir)
            return 0

        def ingest_once() -> None:
            # in a thread with its own database connection, so that senders need not wait
            with SampleStore.open(options.database) as own_store:
                _ingest_and_publish(replace(collector, store=own_store, rejected=Counter()), options.spool_dir)

        receiver = SampleReceiver(collector.store_batches, warn, networks, _accepted_uids(options, trusted_users),
                                  options.allow_unprivileged_ports)
        asyncio.run(_serve_until_signal(collector, ingest_once, options.interval or DEFAULT_INTERVAL_S, receiver,
                                        address))
        _ingest_and_publish(collector, options.spool_dir)
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
    parser.add_argument("--listen", metavar="HOST:PORT",
                        help="receive samples over TCP (`slurmdl links counters --collector`)")
    parser.add_argument("--allow", metavar="NET,...",
                        help="addresses and networks of senders, e.g. 10.0.0.0/8,fd00::/8 (default: this host)")
    proof = parser.add_mutually_exclusive_group()
    proof.add_argument("--auth", choices=("munge", "port"),
                       help="required of senders: a munge credential of a trusted user, or a source port below 1024 "
                            "(default: munge if it answers on this host)")
    proof.add_argument("--allow-unprivileged-ports", action="store_true",
                       help="accept senders without authentication")
    parser.add_argument("--users", metavar="NAME,...",
                        help="trusted users, in addition to root, SlurmUser, link_scores.trusted_owner and the user "
                             "of this process")
    parser.add_argument("--interval", type=float, metavar="SECONDS",
                        help="keep running and publish periodically (default with --listen: "
                             f"{DEFAULT_INTERVAL_S:g})")
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
            _report_rejections(collector)


def _report_rejections(collector: Collector) -> None:
    if text := collector.rejection_summary():
        warn(text)


async def _serve_until_signal(collector: Collector, ingest_once: Callable[[], None], interval_s: float,
                              receiver: SampleReceiver, address: tuple[str, int] | None) -> None:
    """Receive samples and publish link scores until SIGTERM or SIGINT.

    Raises
    ------
    UnavailableError : the address cannot be bound.
    """
    async def ingest_periodically() -> None:
        while True:
            try:
                await asyncio.to_thread(ingest_once)
            except Exception as error:  # the next cycle may succeed, e.g. if the disk was full
                report_error(error)
            _report_rejections(collector)
            await asyncio.sleep(interval_s)

    tasks = [asyncio.ensure_future(ingest_periodically())]
    if address is not None:
        tasks.append(asyncio.ensure_future(receiver.serve(
            *address, on_listening=lambda port: warn(f"listening on port {port}{_sender_proof_text(receiver)}"))))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: [task.cancel() for task in tasks])
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        return
    except OSError as error:
        raise UnavailableError(f"--listen: cannot listen ({error.strerror})") from error


def _sender_proof_text(receiver: SampleReceiver) -> str:
    if receiver.trusted_uids is not None:
        return f"; senders need a munge credential of user {', '.join(map(str, sorted(receiver.trusted_uids)))}"
    return "" if receiver.allow_unprivileged else "; senders need a port below 1024"


def _trusted_users(users: str | None, owner: str) -> str:
    """Comma-separated users that are trusted in addition to root and the user of this process."""
    for name in users.split(",") if users is not None else ():
        if not file_trust.resolve_uids(name):
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


def _accepted_uids(options: argparse.Namespace, trusted_users: str) -> frozenset[int] | None:
    """Users whose munge credentials are accepted; None if no credential is required.

    Raises
    ------
    UnavailableError : --auth=munge, and munge does not answer.
    """
    from slurmdl.links import munge

    if options.allow_unprivileged_ports or options.auth == "port" or options.listen is None:
        return None
    if not munge.is_munge_available():
        if options.auth == "munge":
            raise UnavailableError("--auth munge: munge does not answer on this host; start it or use --auth port")
        return None
    return frozenset(file_trust.resolve_uids(trusted_users) | {0, os.geteuid()})


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
