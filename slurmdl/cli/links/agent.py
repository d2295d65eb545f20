"""answer probes on this node, and probe others now and then

A small service for every node, so that nodes have scores while jobs hold them. What it moves on average is bounded,
and so are its sessions; hosts that --allow does not name are refused.
"""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import suppress

from slurmdl.cli.address import parse_address, parse_networks
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import SlurmdlError, UnavailableError, UsageError, warn

DEFAULT_PORT = 6819


def run(argv: list[str]) -> int:
    parser = CliParser(prog="slurmdl links agent", description=__doc__)
    parser.add_argument(
    "--listen",
    default=f":{DEFAULT_PORT}",
    metavar="HOST:PORT",
     help="where (default: %(default)s)")
    parser.add_argument("--allow", required=True, metavar="NET,...",
                        help="addresses and networks of the nodes, e.g. 10.0.0.0/8,fd00::/8")
    parser.add_argument("--rate", default="4M", metavar="RATE",
                        help="bytes/s that answering may cost on average (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=4, metavar="N", help="at once (default: %(default)s)")
    parser.add_argument("--peers", type=int, default=3, metavar="N",
                        help="nodes of its zone that this one probes in turn, 0 for none (default: %(default)s)")
    parser.add_argument("--every", type=float, default=300.0, metavar="SECONDS",
                        help="in which all of them have their turn (default: %(default)g)")
    parser.add_argument("--topology", metavar="FILE", help="zones, instead of the cluster's own")
    parser.add_argument("--node", metavar="NAME", help="this node's name in Slurm (default: its host name)")
    parser.add_argument("--to", metavar="HOST:PORT", help="the collector, `slurmdl links ingest --listen`")
    parser.add_argument("--spool", metavar="DIR",
                        help="where samples go, or with --to wait for the collector (default: beside the state)")
    options = parser.parse_args(argv)
    if options.peers < 0 or options.sessions < 1 or not 1 <= options.every <= 86400:
        raise UsageError("slurmdl links agent: --peers from 0, --sessions from 1, --every 1 to 86400 expected")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        _run_agent(options)
    return 0


def _run_agent(options: argparse.Namespace) -> None:
    from slurmdl import units
    from slurmdl.cli.links.counters import slurm_node_name, state_dir
    from slurmdl.links import sender
    from slurmdl.links.probe.peer_prober import probe_peers, ring_peers
    from slurmdl.links.probe.reflector import Reflector
    from slurmdl.topology import load

    host, port = parse_address(options.listen, "--listen")
    allow, rate = parse_networks(options.allow, "--allow"), units.parse_bytes(options.rate, "--rate")
    where = parse_address(options.to, "--to") if options.to else None
    spool = options.spool or os.path.join(state_dir(), "spool")
    node = options.node or slurm_node_name()
    others = ring_peers(load.load_topology(options.topology), node, options.peers) if options.peers else []
    if options.peers and not others:
        warn(f"score serve: {node} is in no zone with others; it only answers")
    try:
        Reflector(host, port, allowed_networks=allow, max_sessions=options.sessions, rate_limit=rate)
    except OSError as error:
        raise UnavailableError(f"--listen {options.listen}: {error.strerror}") from error
    if not others:
        signal.pause()
    for sample in probe_peers(node, others, port, options.every, lambda text: warn(f"score serve: {text}")):
        try:
            if where is None:
                sender.spool_samples(spool, [sample])
            else:
                sender.send_samples(where, [sample], spool)
        except (SlurmdlError, OSError) as error:
            warn(f"score serve: {error}")

