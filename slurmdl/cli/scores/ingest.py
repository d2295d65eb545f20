"""store samples and publish the scores made of them

Takes samples as JSON lines, from files, a spool directory and the network, keeps them in a history on a local disk,
and publishes a snapshot for `--dl-scores=auto`. Runs once, and with --listen or --every until it is ended.
"""

from __future__ import annotations

import ipaddress
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import time

from slurmdl import config
from slurmdl.cli.parser import Parser, address
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
            if options.spool:
                collector.spool(options.spool)
            _published(collector)
            return 0
        with suppress(KeyboardInterrupt):
            _stay(collector, options.spool, where, networks, options.any_port, options.every or EVERY)
    return 0


def _stay(collector: Collector, spool: str | None, where: tuple[str, int] | None,
          networks: tuple[inlet.Network, ...], any_port: bool, every: float) -> None:
    """Take and publish until a signal ends it; then publish once more."""
    import asyncio

    def take(senders: Sequence[Sequence[str]]) -> list[int]:
        good = [collector.lines(lines, time()) for lines in senders]
        collector.keep(sample for samples in good for sample in samples)
        return [len(samples) for samples in good]

    async def published() -> None:
        while True:
            try:
                if spool:
                    collector.spool(spool)
                _published(collector)
            except (SlurmdlError, OSError) as error:
                warn(str(error))  # a full disk may have room again
            await asyncio.sleep(every)

    async def both() -> None:
        tasks = [asyncio.ensure_future(published())]
        if where is not None:
            tasks.append(asyncio.ensure_future(inlet.Inlet(take, warn, networks, any_port).serve(
                *where, ready=lambda port: warn(f"listening on port {port}"))))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: [task.cancel() for task in tasks])
        await asyncio.gather(*tasks)

    try:
        asyncio.run(both())
    except asyncio.CancelledError:
        _published(collector)
    except OSError as error:
        raise UnavailableError(f"--listen: cannot listen ({error.strerror})") from error


def _published(collector: Collector) -> None:
    collector.publish()
    report = collector.report()
    if report:
        warn(report)


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
