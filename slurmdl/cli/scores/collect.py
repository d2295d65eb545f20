"""read this node's own counters, and hand on what they say of its link

Says nothing on stdout and exits with 0 whatever happens (unless --strict), so that it serves as Slurm's
HealthCheckProgram, in a Prolog and in a systemd timer alike. A state file keeps the last reading.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress

from slurmdl.cli.parser import Parser, address
from slurmdl.errors import SlurmdlError, UnavailableError, UsageError, warn


def run(argv: list[str]) -> int:
    parser = Parser(prog="slurmdl score collect", description=__doc__)
    parser.add_argument("--to", metavar="HOST:PORT", help="the collector, `slurmdl score ingest --listen`")
    parser.add_argument("--spool", metavar="DIR",
                        help="where samples go, or with --to wait for the collector (default: beside the state)")
    parser.add_argument("--state", metavar="DIR", help="of the last reading (default: /var/lib/slurmdl for root)")
    parser.add_argument("--node", metavar="NAME", help="this node's name in Slurm (default: its host name)")
    parser.add_argument("--interface", default="", metavar="IF", help="whose speed counts (default: the fastest)")
    parser.add_argument("--strict", action="store_true", help="exit with a status of its own where anything fails")
    try:
        _collect(parser.parse_args(argv))
    except (SlurmdlError, OSError) as error:
        if "--strict" in argv:
            raise
        if isinstance(error, UsageError):
            warn(str(error))  # a mistake in the set-up is worth a line, but not a drained node
    return 0


def _collect(options: argparse.Namespace) -> None:
    from slurmdl.network import counters, outbox

    where = address(options.to, "--to") if options.to else None
    state = options.state or state_directory()
    now, path = counters.read(interface=options.interface), os.path.join(state, "counters.json")
    before = counters.load(path)
    sample = counters.sample(before, now, options.node or this_node(), time.time())
    if counters.due(before, now):
        _write(path, json.dumps(now.to_json()))
    samples = [sample] if sample is not None else []
    spool = options.spool or os.path.join(state, "spool")
    if where is None:
        outbox.put(spool, samples)
    else:
        outbox.send(where, samples, spool)


def this_node() -> str:
    """The name that Slurm has for this node, as far as the environment tells it, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def state_directory() -> str:
    """Where this node keeps what it will want to know next time (XDG Base Directory Specification)."""
    if not os.geteuid():
        return "/var/lib/slurmdl"
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "slurmdl")


def _write(path: str, text: str) -> None:
    part = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(part)
        raise UnavailableError(f"{path}: cannot be written ({error.strerror})") from error
