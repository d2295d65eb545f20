"""store samples and publish the scores made of them

Takes samples as JSON lines, from files, a spool directory and the network, keeps them in a history on a local disk,
and publishes a snapshot for `--dl-scores=auto`. Runs once, and with --listen or --every until it is ended.
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

from slurmdl import config
from slurmdl.cli.address import address, networks
from slurmdl.cli.parser import Parser
from slurmdl.errors import SlurmdlError, UnavailableError, UsageError, report, warn
from slurmdl.network import hygiene, inlet, trust
from slurmdl.network.access import LOOPBACK
from slurmdl.network.collector import Collector
from slurmdl.network.store import Store
from slurmdl.slurm.conf_files import slurm_conf_path
from slurmdl.topology import read

HISTORY = "/var/lib/slurmdl/samples.db"
#: seconds between two snapshots where nothing is said
EVERY = 30.0


def run(argv: list[str]) -> int:
    parser = Parser(prog="slurmdl score ingest", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="samples as JSON lines; - for stdin")
    parser.add_argument("--history", default=HISTORY, metavar="FILE", help="on a local disk (default: %(default)s)")
    parser.add_argument("--publish", metavar="FILE", help="the snapshot (default: scores.file of slurmdl.yaml)")
    parser.add_argument("--textfile", default="", metavar="FILE", help="Prometheus text, too")
    parser.add_argument("--spool", metavar="DIR", help="take its *.jsonl and remove them once they are stored")
    parser.add_argument("--listen", metavar="HOST:PORT", help="take samples over TCP (`slurmdl score collect --to`)")
    parser.add_argument("--allow", metavar="NET,...",
                        help="addresses and networks that may send, e.g. 10.0.0.0/8,fd00::/8 (default: this host)")
    proof = parser.add_mutually_exclusive_group()
    proof.add_argument("--auth", choices=("munge", "port"),
                       help="what senders show to prove that no ordinary user sends: a munge credential of a trusted "
                            "user, or a port below 1024 (default: munge if it answers on this host)")
    proof.add_argument("--any-port", action="store_true", help="senders need not prove anything")
    parser.add_argument("--users", metavar="NAME,...",
                        help="users whose samples are taken, beside root, SlurmUser, scores.owner and the user who "
                             "runs this")
    parser.add_argument("--every", type=float, metavar="SECONDS",
                        help=f"stay, and publish so often (default with --listen: {EVERY:g})")
    options = parser.parse_args(argv)
    if options.every is not None and not 0 < options.every < float("inf"):
        raise UsageError(f"--every {options.every:g}: more than 0 seconds expected")
    allowed = networks(options.allow, "--allow") if options.allow is not None else LOOPBACK
    where = address(options.listen, "--listen") if options.listen else None
    given = config.load()
    owner = _trusted(options.users, given.scores.owner)
    rules = hygiene.Rules(given.scores.max_age, given.scores.half_life, given.scores.margin)
    with Store.open(options.history) as store:
        collector = Collector(store, options.publish or given.scores.file, rules, options.textfile,
                              owner, _known())
        for file in options.files:
            text = trust.trusted_lines(file, owner)
            collector.keep(collector.lines(text, time()))
        if where is None and options.every is None:
            _cycle(collector, options.spool)
            return 0

        def cycle() -> None:
            # in a thread and by a connection of its own: senders do not wait for it
            with Store.open(options.history) as own:
                _cycle(replace(collector, store=own, refused=Counter()), options.spool)

        listener = inlet.Inlet(collector.take, warn, allowed, _credentials(options, owner), options.any_port)
        asyncio.run(_stay(collector, cycle, options.every or EVERY, listener, where))
        _cycle(collector, options.spool)
    return 0


def _cycle(collector: Collector, spool: str | None) -> None:
    """Take what is in the spool, publish, and say what was refused. A spool that fails keeps nobody from the rest."""
    try:
        if spool:
            collector.spool(spool)
    finally:
        try:
            collector.publish()
        finally:
            _report(collector)


def _report(collector: Collector) -> None:
    text = collector.report()
    if text:
        warn(text)


async def _stay(collector: Collector, cycle: Callable[[], None], every: float, listener: inlet.Inlet,
                where: tuple[str, int] | None) -> None:
    """Take and publish until a signal ends it.

    Raises
    ------
    UnavailableError : the address cannot be listened on.
    """
    async def cycles() -> None:
        while True:
            try:
                await asyncio.to_thread(cycle)
            except Exception as error:  # a full disk may have room again
                report(error)
            _report(collector)
            await asyncio.sleep(every)

    tasks = [asyncio.ensure_future(cycles())]
    if where is not None:
        tasks.append(asyncio.ensure_future(listener.serve(
            *where, ready=lambda port: warn(f"listening on port {port}{_proof(listener)}"))))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: [task.cancel() for task in tasks])
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        return
    except OSError as error:
        raise UnavailableError(f"--listen: cannot listen ({error.strerror})") from error


def _proof(listener: inlet.Inlet) -> str:
    if listener.users is not None:
        return f"; senders need a munge credential of user {', '.join(map(str, sorted(listener.users)))}"
    return "" if listener.any_port else "; senders need a port below 1024"


def _trusted(users: str | None, owner: str) -> str:
    """The users whose samples are taken, beside root and the one who runs this, with commas between."""
    for name in users.split(",") if users is not None else ():
        if not trust.numbers(name):
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


def _credentials(options: argparse.Namespace, owner: str) -> frozenset[int] | None:
    """Numbers of the users of whom a munge credential is accepted; None where no credential is asked for.

    Raises
    ------
    UnavailableError : --auth=munge, and munge does not answer.
    """
    from slurmdl.network import munge

    if options.any_port or options.auth == "port" or options.listen is None:
        return None
    if not munge.available():
        if options.auth == "munge":
            raise UnavailableError("--auth munge: munge does not answer on this host; valid: --auth port")
        return None
    return frozenset(trust.numbers(owner) | {0, os.geteuid()})


def _known() -> frozenset[str] | None:
    """Names of all nodes and zones, where a file of Slurm's tells them."""
    try:
        topologies = read.from_files()
    except SlurmdlError as error:
        warn(f"{error}; samples of any name are taken")
        return None
    if topologies is None:
        return None
    return frozenset(name for each in topologies.each for name in (*each.nodes, *each.zones))
