"""sample this node's kernel counters

Writes nothing to stdout and exits with 0 even after errors (unless --strict), so it can run as Slurm's
HealthCheckProgram, in a Prolog or from a systemd timer. A state file keeps the last reading.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence

from slurmdl import files
from slurmdl.errors import SlurmdlError, UnavailableError, UsageError, warn

#: option -> metavar and help
OPTIONS = {
    "spool-dir": ("DIR", "directory for samples, read by `slurmdl links ingest` (default: spool in the state "
                         "directory)"),
    "state-dir": ("DIR", "directory of the last reading (default: /var/lib/slurmdl for root)"),
    "node-name": ("NAME", "name of this node in Slurm (default: its host name)"),
    "interface": ("IF", "network interface whose speed is reported (default: the fastest)"),
}


def run(argv: list[str]) -> int:
    try:
        _collect_sample(_parse_fast(argv) or _parse_with_argparse(argv))
    except (SlurmdlError, OSError) as error:
        if "--strict" in argv:
            raise
        if isinstance(error, UsageError):
            warn(str(error))  # report a wrong option, but do not drain the node
    return 0


def _parse_fast(argv: Sequence[str]) -> dict[str, str]:
    """Options by name; empty if argparse is needed for abbreviations, --help or errors.

    Importing argparse takes longer than reading the counters.
    """
    options, args = dict.fromkeys([*OPTIONS, "strict"], ""), iter(argv)
    for arg in args:
        name, equals, value = arg.removeprefix("--").partition("=")
        if arg != "--strict" and (not arg.startswith("--") or name not in OPTIONS):
            return {}
        options[name] = value if equals or arg == "--strict" else next(args, "-")
        if options[name].startswith("-"):
            return {}
    return options


def _parse_with_argparse(argv: Sequence[str]) -> dict[str, str]:
    from slurmdl.cli.arguments import CliParser

    parser = CliParser(prog="slurmdl links counters", description=__doc__)
    for name, (metavar, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", dest=name, default="", metavar=metavar, help=text)
    parser.add_argument("--strict", action="store_const", const="", default="",
                        help="exit with an error status if anything fails")
    return dict(vars(parser.parse_args(argv)))


def _collect_sample(options: Mapping[str, str]) -> None:
    from slurmdl.links import counters, samples

    directory = options["state-dir"] or state_dir()
    path = os.path.join(directory, "counters.json")
    current, previous = counters.read_counters(interface=options["interface"]), counters.load_reading(path)
    node = options["node-name"] or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    sample = counters.sample_from_counters(previous, current, node, time.time())
    if counters.should_replace(previous, current):
        try:
            os.makedirs(directory, mode=0o755, exist_ok=True)
            files.write_atomic(path, json.dumps(current.to_json()))
        except OSError as error:
            raise UnavailableError(f"{path}: cannot be written ({error.strerror})") from error
    if sample is not None:
        samples.spool_samples(options["spool-dir"] or os.path.join(directory, "spool"), [sample])


def state_dir() -> str:
    """Default state directory."""
    from slurmdl.config import user_dir

    return user_dir(os.environ, "state") if os.geteuid() else "/var/lib/slurmdl"
