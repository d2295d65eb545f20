"""answer probes on this node and periodically probe others

A service for every node, so that nodes have link scores while jobs occupy them. Its sessions and average data rate
are bounded; hosts outside --allow are rejected.
"""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import suppress

from slurmdl import units
from slurmdl.cli.address import parse_address, parse_networks
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import SlurmdlError, UnavailableError, UsageError, warn

DEFAULT_PORT = 6819


def run(argv: list[str]) -> int:
    parser = CliParser(prog="slurmdl links agent", description=__doc__)
    parser.add_argument("--listen", default=f":{DEFAULT_PORT}", metavar="HOST:PORT",
                        help="address to listen on (default: %(default)s)")
    parser.add_argument("--allow", required=True, metavar="NET,...",
                        help="addresses and networks of the nodes, e.g. 10.0.0.0/8,fd00::/8")
    parser.add_argument("--rate-limit", default="4M", metavar="RATE",
                        help="average bytes/s of all answers (default: %(default)s)")
    parser.add_argument("--max-sessions", type=int, default=4, metavar="N",
                        help="sessions at the same time (default: %(default)s)")
    parser.add_argument("--peers", type=int, default=3, metavar="N",
                        help="nodes of its zone that this node probes, 0 for none (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=300.0, metavar="SECONDS",
                        help="period in which each peer is probed once (default: %(default)g)")
    parser.add_argument("--topology", metavar="FILE", help="topology file (default: the cluster's topology)")
    parser.add_argument("--node-name", metavar="NAME", help="name of this node in Slurm (default: its host name)")
    parser.add_argument("--collector", metavar="HOST:PORT", help="address of `slurmdl links ingest --listen`")
    parser.add_argument("--spool-dir", metavar="DIR",
                        help="directory for samples, with --collector for unsent ones (default: spool in the state "
                             "directory)")
    options = parser.parse_args(argv)
    if options.peers < 0:
        raise UsageError(f"--peers {options.peers}: expected a number from 0")
    if options.max_sessions < 1:
        raise UsageError(f"--max-sessions {options.max_sessions}: expected a number from 1")
    if not 1 <= options.interval <= 86400:
        raise UsageError(f"--interval {options.interval:g}: expected 1 to 86400 seconds")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        _run_agent(options)
    return 0


def _run_agent(options: argparse.Namespace) -> None:
    from slurmdl.cli.links.counters import slurm_node_name, state_dir
    from slurmdl.links import sender
    from slurmdl.links.probe.peer_prober import probe_peers, ring_peers
    from slurmdl.links.probe.reflector import Reflector
    from slurmdl.topology import load

    host, port = parse_address(options.listen, "--listen")
    networks = parse_networks(options.allow, "--allow")
    rate_limit = units.parse_bytes(options.rate_limit, "--rate-limit")
    collector = parse_address(options.collector, "--collector") if options.collector else None
    spool_dir = options.spool_dir or os.path.join(state_dir(), "spool")
    node = options.node_name or slurm_node_name()
    peers = ring_peers(load.load_topology(options.topology), node, options.peers) if options.peers else []
    if options.peers and not peers:
        warn(f"links agent: {node} has no peers in the topology; it only answers probes")
    try:
        Reflector(host, port, allowed_networks=networks, max_sessions=options.max_sessions, rate_limit=rate_limit)
    except OSError as error:
        raise UnavailableError(f"--listen {options.listen}: {error.strerror}") from error
    if not peers:
        signal.pause()
    for sample in probe_peers(node, peers, port, options.interval, lambda text: warn(f"links agent: {text}")):
        try:
            if collector is None:
                sender.spool_samples(spool_dir, [sample])
            else:
                sender.send_samples(collector, [sample], spool_dir)
        except (SlurmdlError, OSError) as error:
            warn(f"links agent: {error}")
