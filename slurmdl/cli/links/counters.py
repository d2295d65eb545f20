"""read this node's own counters, and hand on what they say of its link

Says nothing on stdout and exits with 0 whatever happens (unless --strict), so that it serves as Slurm's
HealthCheckProgram, in a Prolog and in a systemd timer alike. A state file keeps the last reading.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence

from slurmdl import files
from slurmdl.cli.address import parse_address
from slurmdl.errors import SlurmdlError, UnavailableError, UsageError, warn

#: option -> its value and its line in the help
OPTIONS = {
    "to": ("HOST:PORT", "the collector, `slurmdl links ingest --listen`"),
    "spool": ("DIR", "where samples go, or with --to wait for the collector (default: beside the state)"),
    "state": ("DIR", "of the last reading (default: /var/lib/slurmdl for root)"),
    "node": ("NAME", "this node's name in Slurm (default: its host name)"),
    "interface": ("IF", "whose speed counts (default: the fastest)"),
}


def run(argv: list[str]) -> int:
    try:
        _collect_sample(_parse_fast(argv) or _parse_with_argparse(argv))
    except (SlurmdlError, OSError) as error:
        if "--strict" in argv:
            raise
        if isinstance(error, UsageError):
            warn(str(error))  # a mistake in the set-up is worth a line, but not a drained node
    return 0


def _parse_fast(argv: Sequence[str]) -> dict[str, str]:
    """The options by name, where all are spelled out; empty where argparse must look at them.

    argparse takes longer to import than the counters to read.
    """
    found, words = {"strict": ""}, iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word != "--strict" and (not word.startswith("--") or name not in OPTIONS):
            return {}
        found[name] = value if equals or word == "--strict" else next(words, "-")
        if found[name].startswith("-"):
            return {}
    return found


def _parse_with_argparse(argv: Sequence[str]) -> dict[str, str]:
    from slurmdl.cli.arguments import CliParser

    parser = CliParser(prog="slurmdl links counters", description=__doc__)
    for name, (value, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", default="", metavar=value, help=text)
    parser.add_argument("--strict", action="store_const", const="", default="",
                        help="exit with a status of its own where anything fails")
    return dict(vars(parser.parse_args(argv)))


def _collect_sample(given: Mapping[str, str]) -> None:
    from slurmdl.links import counters, sender

    options = {**dict.fromkeys(OPTIONS, ""), **given}
    where = parse_address(options["to"], "--to") if options["to"] else None
    state = options["state"] or state_dir()
    now, path = counters.read_counters(interface=options["interface"]), os.path.join(state, "counters.json")
    before = counters.load_reading(path)
    sample = counters.sample_from_counters(before, now, options["node"] or slurm_node_name(), time.time())
    if counters.should_replace(before, now):
        _write_state(path, json.dumps(now.to_json()))
    samples = [sample] if sample is not None else []
    spool = options["spool"] or os.path.join(state, "spool")
    if where is None:
        sender.spool_samples(spool, samples)
    else:
        sender.send_samples(where, samples, spool)


def slurm_node_name() -> str:
    """The name that Slurm has for this node, as far as the environment tells it, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def state_dir() -> str:
    """Where this node keeps what it will want to know next time (XDG Base Directory Specification)."""
    if not os.geteuid():
        return "/var/lib/slurmdl"
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "slurmdl")


def _write_state(path: str, text: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        files.write_atomic(path, text)
    except OSError as error:
        raise UnavailableError(f"{path}: cannot be written ({error.strerror})") from error
