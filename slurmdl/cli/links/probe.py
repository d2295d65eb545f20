"""measure links by a short job, one task a node; inside a job, those of its own nodes"""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmdl import config, files
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import SlurmdlError, UsageError, warn
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.links.samples import LinkSample
    from slurmdl.topology.topology import Topology

#: seconds that samples of earlier probes stay in the file
SAMPLE_RETENTION_S = 3600.0


def run(argv: list[str]) -> int:
    own, further = (argv[:argv.index("--")], argv[argv.index("--") + 1:]) if "--" in argv else (argv, [])
    parser = CliParser(prog="slurmdl links probe", description=__doc__,
                    epilog="Options of srun may follow after --, e.g. `-- --partition=debug`.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--nodes", metavar="LIST", help="a hostlist, e.g. n[1-8] (default in a job: all of its nodes)")
    which.add_argument("--all", action="store_true", help="all nodes that are idle now")
    parser.add_argument("--budget", default="30s", type=_parse_duration, metavar="TIME",
                        help="for all rounds together (default: %(default)s)")
    parser.add_argument("--rate-limit", default=0.0, type=_parse_byte_rate, metavar="RATE",
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
    return _run_probe(options, [*further, *(_mpi_type_options(further) if options.transport == "mpi" else ())])


def _mpi_type_options(srun_args: list[str]) -> list[str]:
    """--mpi for the MPI that PATH has, where none is given, as `slurmdl srun` chooses it."""
    from slurmdl.slurm import getopt, pmi, srun_options
    from slurmdl.slurm.slurm_conf import SlurmConfig

    line = getopt.parse_command_line(srun_args, srun_options.SHORT_OPTIONS, srun_options.LONG_OPTIONS)
    return pmi.mpi_type_option(line, SlurmConfig.query, os.environ)


def _run_probe(options: argparse.Namespace, srun_args: list[str]) -> int:
    from slurmdl.launch import probe_step
    from slurmdl.links import aggregate, link_table
    from slurmdl.links.probe.measurement import ProbeConfig
    from slurmdl.links.samples import format_sample_lines
    from slurmdl.links.score_sources import user_probe_file

    nodes = _select_nodes(options)
    if len(nodes) < 2:
        raise UsageError(f"slurmdl links probe: {len(nodes)} node{'s' * (len(nodes) != 1)}; valid: at least two")
    topology = _load_topology_or_flat(nodes)
    probe = probe_step.ProbeStep(nodes, topology, replace(ProbeConfig(), rate_limit=options.rate_limit), options.budget,
                          transport=options.transport, interface=options.interface,
                          srun_args=(*(() if "SLURM_JOB_ID" in os.environ else ("--immediate=30",)), *srun_args))
    samples = probe_step.run_probe_step(probe, os.environ, warn)
    if options.out == "-":
        print(format_sample_lines(samples), end="")
        return 0
    rows = link_table.link_rows(aggregate.aggregate_scores(samples, time.time()).scores, topology)
    print_escaped(link_table.format_link_table(rows, len(rows)))
    _merge_into_file(options.out or user_probe_file(os.environ), samples)
    return 0


def _select_nodes(options: argparse.Namespace) -> tuple[str, ...]:
    from slurmdl.slurm import hostlist

    if options.nodes:
        return tuple(dict.fromkeys(hostlist.expand_hostlist(options.nodes)))
    if options.all:
        from slurmdl.cluster.load import query_cluster

        idle: list[str] = []
        others: dict[str, str] = {}
        for node in query_cluster(config.load_config().cluster_backend)[0].nodes:
            if node.state == ("IDLE",) and node.responding:
                idle.append(node.name)
            else:
                others[node.name] = "+".join(node.state) if node.responding else "not responding"
        if others:
            warn(f"--all: {len(others)} of {len(idle) + len(others)} nodes are not idle and left out: "
                 f"{hostlist.fold_hostlist(list(others))} ({', '.join(sorted(set(others.values())))})")
        return tuple(idle)
    if "SLURM_JOB_NODELIST" in os.environ:
        return tuple(hostlist.expand_hostlist(os.environ["SLURM_JOB_NODELIST"]))
    raise UsageError("slurmdl links probe: which nodes? valid: --nodes LIST, --all, or neither inside a job")


def _load_topology_or_flat(nodes: tuple[str, ...]) -> Topology:
    """The cluster's zones; where they cannot be read all nodes count as one zone, and one line says so."""
    from slurmdl.topology import load
    from slurmdl.topology.topology import Topology

    try:
        return load.load_topology()
    except SlurmdlError as error:
        warn(f"{error}; all nodes count as one zone")
        return Topology.flat(nodes)


def _merge_into_file(path: str, samples: list[LinkSample]) -> None:
    """Write the samples, and those that earlier probes left there not long ago, by an atomic rename."""
    from slurmdl.links.samples import format_sample_lines, parse_sample_lines

    earlier: list[LinkSample] = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            earlier = [s for s in parse_sample_lines(file) if not isinstance(
                s, Exception) and s.time > time.time() - SAMPLE_RETENTION_S]
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"--out={path}: cannot be read ({error.strerror})") from error
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        files.write_atomic(path, format_sample_lines([*earlier, *samples]))
    except OSError as error:
        raise UsageError(f"--out={path}: cannot be written ({error.strerror})") from error


def _parse_duration(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+)(s|m)?", text)
    try:
        seconds = float(match[1]) * (60 if match[2] == "m" else 1) if match else 0.0
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid: 1s to 60m")
    return seconds


def _parse_byte_rate(text: str) -> float:
    from slurmdl.units import parse_bytes

    return parse_bytes(text, "--rate-limit")
