"""store samples and publish the scores made of them

Takes samples as JSON lines, from files, a spool directory and the network, keeps them in a history on a local disk,
and publishes a snapshot for `--dl-scores=auto`. Runs once, and with --listen or --every until it is ended.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from time import time

from slurmdl import config
from slurmdl.cli.address import address
from slurmdl.cli.parser import Parser
from slurmdl.errors import InputError, SlurmdlError, UnavailableError, UsageError, warn
from slurmdl.network import hygiene, inlet
from slurmdl.network.collector import Collector
from slurmdl.network.store import Store

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
    parser.add_argument("--allow", default="", metavar="NET,...", help="networks that may send (default: this host)")
    parser.add_argument("--any-port", action="store_true", help="senders without root's privileges may send, too")
    parser.add_argument("--every", type=float, metavar="SECONDS",
                        help=f"stay, and publish so often (default with --listen: {EVERY:g})")
    options = parser.parse_args(argv)
    if options.every is not None and not 0 < options.every < float("inf"):
        raise UsageError(f"--every {options.every:g}: more than 0 seconds expected")
    networks = _networks(options.allow)
    where = address(options.listen, "--listen") if options.listen else None
    given = config.load()
    rules = hygiene.Rules(given.scores.max_age, given.scores.half_life, given.scores.margin)
    with Store.open(options.history) as store:
        collector = Collector(store, options.publish or given.scores.file, rules, options.textfile,
                              given.scores.owner, _known())
        for file in options.files:
            collector.keep(collector.lines(_lines(file), time()))
        if where is None and options.every is None:
            _cycle(collector, options.spool)
            return 0

        def cycle() -> None:
            # in a thread and by a connection of its own: senders do not wait for it
            with Store.open(options.history) as own:
                _cycle(replace(collector, store=own, refused=Counter()), options.spool)

        listener = inlet.Inlet(collector.take, warn, networks, options.any_port)
        asyncio.run(_stay(collector, cycle, options.every or EVERY, listener, where))
        _cycle(collector, options.spool)
    return 0


def _cycle(collector: Collector, spool: str | None) -> None:
    """Take what is in the spool, publish, and say what was refused."""
    if spool:
        collector.spool(spool)
    collector.publish()
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
            except (SlurmdlError, OSError) as error:
                warn(str(error))  # a full disk may have room again
            _report(collector)
            await asyncio.sleep(every)

    tasks = [asyncio.ensure_future(cycles())]
    if where is not None:
        tasks.append(asyncio.ensure_future(listener.serve(
            *where, ready=lambda port: warn(f"listening on port {port}"))))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: [task.cancel() for task in tasks])
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        return
    except OSError as error:
        raise UnavailableError(f"--listen: cannot listen ({error.strerror})") from error


def _lines(file: str) -> list[str]:
    try:
        if file == "-":
            return sys.stdin.buffer.read().decode(errors="replace").splitlines()
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read().splitlines()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=file) from error


def _networks(allow: str) -> tuple[inlet.Network, ...]:
    try:
        return tuple(ipaddress.ip_network(part, strict=False) for part in allow.split(",") if part) or inlet.LOOPBACK
    except ValueError as error:
        raise UsageError(f"--allow: {error}; valid: networks such as 10.0.0.0/8, with commas between") from error


def _known() -> frozenset[str] | None:
    """Names of all nodes and zones, where a file of Slurm's tells them."""
    from slurmdl.topology import read

    try:
        topologies = read.from_files()
    except SlurmdlError as error:
        warn(f"{error}; samples of any name are taken")
        return None
    if topologies is None:
        return None
    return frozenset(name for each in topologies.each for name in (*each.nodes, *each.zones))
