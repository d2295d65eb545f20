"""store samples and publish the scores made of them

Takes samples as JSON lines, from files, a spool directory and the network, keeps them in a history on a local disk,
and publishes a snapshot for `--dl-link-scores=auto`. Runs once, and with --listen or --every until it is ended.
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
from slurmdl.links import aggregate
from slurmdl.links import receiver as receiver_module
from slurmdl.links.collector import Collector
from slurmdl.links.sample_store import SampleStore
from slurmdl.links.tcp_server import LOOPBACK
from slurmdl.slurm.slurm_conf import slurm_conf_path
from slurmdl.topology import load

DEFAULT_DATABASE = "/var/lib/slurmdl/samples.db"
#: seconds between two snapshots where nothing is said
DEFAULT_INTERVAL_S = 30.0


def run(argv: list[str]) -> int:
    parser = CliParser(prog="slurmdl links ingest", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="samples as JSON lines; - for stdin")
    parser.add_argument(
    "--history",
    default=DEFAULT_DATABASE,
    metavar="FILE",
     help="on a local disk (default: %(default)s)")
    parser.add_argument("--publish", metavar="FILE", help="the snapshot (default: link_scores.file of slurmdl.yaml)")
    parser.add_argument("--textfile", default="", metavar="FILE", help="Prometheus text, too")
    parser.add_argument("--spool", metavar="DIR", help="take its *.jsonl and remove them once they are stored")
    parser.add_argument("--listen", metavar="HOST:PORT", help="take samples over TCP (`slurmdl links counters --to`)")
    parser.add_argument("--allow", metavar="NET,...",
                        help="addresses and networks that may send, e.g. 10.0.0.0/8,fd00::/8 (default: this host)")
    proof = parser.add_mutually_exclusive_group()
    proof.add_argument("--auth", choices=("munge", "port"),
                       help="what senders show to prove that no ordinary user sends: a munge credential of a trusted "
                            "user, or a port below 1024 (default: munge if it answers on this host)")
    proof.add_argument("--any-port", action="store_true", help="senders need not prove anything")
    parser.add_argument("--users", metavar="NAME,...",
                        help="users whose samples are taken, beside root, SlurmUser, link_scores.trusted_owner and the user who "
                             "runs this")
    parser.add_argument("--every", type=float, metavar="SECONDS",
                        help=f"stay, and publish so often (default with --listen: {DEFAULT_INTERVAL_S:g})")
    options = parser.parse_args(argv)
    if options.every is not None and not 0 < options.every < float("inf"):
        raise UsageError(f"--every {options.every:g}: more than 0 seconds expected")
    allowed = parse_networks(options.allow, "--allow") if options.allow is not None else LOOPBACK
    where = parse_address(options.listen, "--listen") if options.listen else None
    given = config.load_config()
    owner = _trusted_users(options.users, given.link_scores.trusted_owner)
    rules = aggregate.AggregationRules(
    given.link_scores.max_age,
    given.link_scores.half_life,
     given.link_scores.tolerance)
    with SampleStore.open(options.history) as store:
        collector = Collector(store, options.publish or given.link_scores.file, rules, options.textfile,
                              owner, _known_link_names())
        for file in options.files:
            text = file_trust.read_trusted_lines(file, owner)
            collector.store_samples(collector.parse_samples(text, time()))
        if where is None and options.every is None:
            _ingest_and_publish(collector, options.spool)
            return 0

        def cycle() -> None:
            # in a thread and by a connection of its own: senders do not wait for it
            with SampleStore.open(options.history) as own:
                _ingest_and_publish(replace(collector, store=own, rejected=Counter()), options.spool)

        listener = receiver_module.SampleReceiver(
    collector.store_batches, warn, allowed, _accepted_uids(
        options, owner), options.any_port)
        asyncio.run(_serve_until_signal(collector, cycle, options.every or DEFAULT_INTERVAL_S, listener, where))
        _ingest_and_publish(collector, options.spool)
    return 0


def _ingest_and_publish(collector: Collector, spool_dir: str | None) -> None:
    """Take what is in the spool, publish, and say what was refused. A spool that fails keeps nobody from the rest."""
    try:
        if spool_dir:
            collector.ingest_spool(spool_dir)
    finally:
        try:
            collector.publish_scores()
        finally:
            _report_rejections(collector)


def _report_rejections(collector: Collector) -> None:
    text = collector.rejection_summary()
    if text:
        warn(text)


async def _serve_until_signal(collector: Collector, ingest_once: Callable[[], None], interval_s: float, receiver: receiver_module.SampleReceiver,
                address: tuple[str, int] | None) -> None:
    """Take and publish until a signal ends it.

    Raises
    ------
    UnavailableError : the address cannot be listened on.
    """
    async def cycles() -> None:
        while True:
            try:
                await asyncio.to_thread(ingest_once)
            except Exception as error:  # a full disk may have room again
                report_error(error)
            _report_rejections(collector)
            await asyncio.sleep(interval_s)

    tasks = [asyncio.ensure_future(cycles())]
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


def _sender_proof_text(receiver: receiver_module.SampleReceiver) -> str:
    if receiver.trusted_uids is not None:
        return f"; senders need a munge credential of user {', '.join(map(str, sorted(receiver.trusted_uids)))}"
    return "" if receiver.allow_unprivileged else "; senders need a port below 1024"


def _trusted_users(users: str | None, owner: str) -> str:
    """The users whose samples are taken, beside root and the one who runs this, with commas between."""
    for name in users.split(",") if users is not None else ():
        if not file_trust.resolve_uids(name):
            raise UsageError(f"--users {users}: {name!r} is not a user of this host; valid: names or numbers, with "
                             "commas between")
    return ",".join(filter(None, (users, owner, _slurm_user())))


def _slurm_user() -> str:
    """SlurmUser of slurm.conf, "" where that does not name one or cannot be read."""
    try:
        with open(slurm_conf_path(), encoding="utf-8", errors="replace") as file:
            found = re.findall(r"(?im)^\s*SlurmUser\s*=\s*([^\s#]+)", file.read())
    except OSError:
        return ""
    return found[-1].partition("(")[0] if found else ""


def _accepted_uids(options: argparse.Namespace, owner: str) -> frozenset[int] | None:
    """Numbers of the users of whom a munge credential is accepted; None where no credential is asked for.

    Raises
    ------
    UnavailableError : --auth=munge, and munge does not answer.
    """
    from slurmdl.links import munge

    if options.any_port or options.auth == "port" or options.listen is None:
        return None
    if not munge.is_munge_available():
        if options.auth == "munge":
            raise UnavailableError("--auth munge: munge does not answer on this host; valid: --auth port")
        return None
    return frozenset(file_trust.resolve_uids(owner) | {0, os.geteuid()})


def _known_link_names() -> frozenset[str] | None:
    """Names of all nodes and zones, where a file of Slurm's tells them."""
    try:
        topologies = load.load_slurm_topology_file()
    except SlurmdlError as error:
        warn(f"{error}; samples of any name are taken")
        return None
    if topologies is None:
        return None
    return frozenset(name for each in topologies.topologies for name in (*each.nodes, *each.zones))
