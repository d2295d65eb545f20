"""measure links by a short job, one task a node; inside a job, those of its own nodes"""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmdl import config, wholefile
from slurmdl.cli.parser import Parser
from slurmdl.errors import SlurmdlError, UsageError, warn
from slurmdl.output import show

if TYPE_CHECKING:
    from slurmdl.network.samples import LinkSample
    from slurmdl.topology.model import Topology

#: seconds that samples of earlier probes stay in the file
KEPT = 3600.0


def run(argv: list[str]) -> int:
    own, further = (argv[:argv.index("--")], argv[argv.index("--") + 1:]) if "--" in argv else (argv, [])
    parser = Parser(prog="slurmdl score probe", description=__doc__,
                    epilog="Options of srun may follow after --, e.g. `-- --partition=debug`.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--nodes", metavar="LIST", help="a hostlist, e.g. n[1-8] (default in a job: all of its nodes)")
    which.add_argument("--all", action="store_true", help="all nodes that are idle now")
    parser.add_argument("--budget", default="30s", type=_seconds, metavar="TIME",
                        help="for all rounds together (default: %(default)s)")
    parser.add_argument("--rate-limit", default=0.0, type=_rate, metavar="RATE",
                        help="of one stream, in bytes/s, e.g. 100M; what reaches it is not reported as throughput")
    parser.add_argument("--transport", default="tcp", choices=("tcp", "mpi"),
                        help="what carries the probes; mpi takes the path of the training (default: %(default)s)")
    parser.add_argument("--interface", default="", metavar="IF",
                        help="to probe over (tcp only; default: that by which the nodes reach each other's names)")
    parser.add_argument("--out", metavar="FILE",
                        help="where the samples go, as JSON lines; - for stdout (default: the user's own score file)")
    options = parser.parse_args(own)
    if options.interface and options.transport == "mpi":
        raise UsageError("--interface: with --transport=mpi the interface is MPI's choice (for Open MPI "
                         "OMPI_MCA_btl_tcp_if_include)")
    return _probe(options, [*further, *(_mpi_option(further) if options.transport == "mpi" else ())])


def _mpi_option(further: list[str]) -> list[str]:
    """--mpi for the MPI that PATH has, where none is given, as `slurmdl srun` chooses it."""
    from slurmdl import getopt
    from slurmdl.launch import srun, srun_options

    line = getopt.parse(further, srun_options.SHORT, srun_options.LONG)
    return srun.mpi_option(line, srun.Controller.ask, os.environ)


def _probe(options: argparse.Namespace, further: list[str]) -> int:
    from slurmdl.launch import probing
    from slurmdl.network import hygiene, table
    from slurmdl.network.live import own_file
    from slurmdl.network.probe.pair import Effort
    from slurmdl.network.samples import to_lines

    nodes = _nodes(options)
    if len(nodes) < 2:
        raise UsageError(f"slurmdl score probe: {len(nodes)} node{'s' * (len(nodes) != 1)}; valid: at least two")
    topology = _topology(nodes)
    probe = probing.Probe(nodes, topology, replace(Effort(), rate_limit=options.rate_limit), options.budget,
                          transport=options.transport, interface=options.interface,
                          options=(*(() if "SLURM_JOB_ID" in os.environ else ("--immediate=30",)), *further))
    samples = probing.run(probe, os.environ, warn)
    if options.out == "-":
        print(to_lines(samples), end="")
        return 0
    rows = table.rows(hygiene.scores(samples, time.time()).scores, topology)
    show(table.text(rows, len(rows)))
    _keep(options.out or own_file(os.environ), samples)
    return 0


def _nodes(options: argparse.Namespace) -> tuple[str, ...]:
    from slurmdl.topology import hostlist

    if options.nodes:
        return tuple(dict.fromkeys(hostlist.expand(options.nodes)))
    if options.all:
        from slurmdl.cluster.read import from_controller

        idle: list[str] = []
        others: dict[str, str] = {}
        for node in from_controller(config.load().cluster_backend)[0].nodes:
            if node.state == ("IDLE",) and node.responding:
                idle.append(node.name)
            else:
                others[node.name] = "+".join(node.state) if node.responding else "not responding"
        if others:
            warn(f"--all: {len(others)} of {len(idle) + len(others)} nodes are not idle and left out: "
                 f"{hostlist.fold(list(others))} ({', '.join(sorted(set(others.values())))})")
        return tuple(idle)
    if "SLURM_JOB_NODELIST" in os.environ:
        return tuple(hostlist.expand(os.environ["SLURM_JOB_NODELIST"]))
    raise UsageError("slurmdl score probe: which nodes? valid: --nodes LIST, --all, or neither inside a job")


def _topology(nodes: tuple[str, ...]) -> Topology:
    """The cluster's zones; where they cannot be read all nodes count as one zone, and one line says so."""
    from slurmdl.topology import read
    from slurmdl.topology.model import Topology

    try:
        return read.read()
    except SlurmdlError as error:
        warn(f"{error}; all nodes count as one zone")
        return Topology.flat(nodes)


def _keep(path: str, samples: list[LinkSample]) -> None:
    """Write the samples, and those that earlier probes left there not long ago, by an atomic rename."""
    from slurmdl.network.samples import from_lines, to_lines

    earlier: list[LinkSample] = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            earlier = [s for s in from_lines(file) if not isinstance(s, Exception) and s.time > time.time() - KEPT]
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"--out={path}: cannot be read ({error.strerror})") from error
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        wholefile.write(path, to_lines([*earlier, *samples]))
    except OSError as error:
        raise UsageError(f"--out={path}: cannot be written ({error.strerror})") from error


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+)(s|m)?", text)
    try:
        seconds = float(match[1]) * (60 if match[2] == "m" else 1) if match else 0.0
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid: 1s to 60m")
    return seconds


def _rate(text: str) -> float:
    from slurmdl import dl_options

    return dl_options.bytes_of(text, "--rate-limit")
