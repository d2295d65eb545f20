"""run a real Slurm cluster on this machine, with several hosts and shaped links"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from slurmdl import units
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import UsageError
from slurmdl.text import pluralize, print_escaped

if TYPE_CHECKING:
    from slurmdl.sandbox.lifecycle import Sandbox
    from slurmdl.sandbox.spec import SandboxSpec


def build_parser() -> argparse.ArgumentParser:
    parser = CliParser(prog="slurmdl sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--name", default="sandbox", help="name of the sandbox (default: %(default)s)")
        return sub

    up = command("up", "start a cluster; returns when all nodes are idle")
    up.add_argument("--nodes", type=int, default=8, metavar="N", help="number of nodes (default: %(default)s)")
    up.add_argument("--zones", type=int, default=2, metavar="N",
                    help="number of leaf switches, filled round-robin (default: %(default)s)")
    up.add_argument("--topology", metavar="FILE",
                    help="read zones and nodes from a topology.conf, .yaml or .json, or text of "
                         "`scontrol show topology`")
    up.add_argument("--node-rate", default="1gbit", metavar="RATE", help="rate of node links (default: %(default)s)")
    up.add_argument("--zone-rate", default="50mbit", metavar="RATE",
                    help="rate of the uplinks of zones (default: %(default)s)")
    up.add_argument("--cpus", type=int, default=2, metavar="N", help="CPUs per node (default: %(default)s)")
    up.add_argument("--memory", type=int, default=4000, metavar="MB", help="memory per node (default: %(default)s)")
    up.add_argument("--gres", default="", help="generic resources per node, e.g. gpu:2 (only counted)")
    up.add_argument("--features", action="append", default=[], metavar="[NODE=]LIST",
                    help="further features of all nodes or of one")
    up.add_argument("--no-zone-features", action="store_true", help="do not add each node's zone as a feature")
    up.add_argument("--slurm-conf", action="append", default=[], metavar="KEY=VALUE", help="line of slurm.conf")
    up.add_argument("--bind-mount", action="append", default=[], metavar="DIR",
                    help="directory that every host sees under its own path")
    command("status", "print hosts, zones, links and the bytes that crossed zones").add_argument(
        "--json", action="store_true", help="print JSON")
    link = command("link", "reshape the link of a node or the uplink of a zone")
    link.add_argument("target", metavar="NODE|ZONE")
    link.add_argument("--rate", metavar="RATE", help="bandwidth limit, e.g. 10mbit; 0 removes it")
    link.add_argument("--delay", metavar="TIME", help="delay per packet in each direction, e.g. 10ms")
    link.add_argument("--loss", metavar="FRACTION", help="packet loss between nodes, each way, e.g. 0.02 or 2%%")
    cpu_limit = command("cpu-limit", "limit all processes of a node, including its jobs, to a fraction of a core")
    cpu_limit.add_argument("node", metavar="NODE")
    cpu_limit.add_argument("fraction", metavar="FRACTION", help="fraction of a core, e.g. 0.25 or 25%%; 0 removes it")
    shell = command("shell", "open a shell on a host, as the ordinary user")
    execute = command("exec", "run a command on a host, as the ordinary user")
    for sub in (shell, execute):
        sub.add_argument("--host", default="login", help="host to use (default: %(default)s)")
        sub.add_argument("--as-root", action="store_true", help="run as root, e.g. for scontrol update")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD ...")
    command("down", "end the cluster and remove all its remains")
    listing = "print the sandboxes of this machine, one a line"
    commands.add_parser("list", help=listing, description=listing)
    return parser


def run(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    # these modules import NumPy, which the help does not need
    from slurmdl.sandbox import lifecycle

    if options.command == "up":
        sandbox = lifecycle.sandbox_up(_build_spec(options))
        print_escaped(f"sandbox {sandbox.spec.name}: {_describe(sandbox, ', all idle')}")
        return 0
    if options.command == "list":
        for name, found in lifecycle.list_sandboxes():
            print_escaped(f"{name}: " + (_describe(found) if found else
                                         f"incomplete; remove it: slurmdl sandbox down --name {name}"))
        return 0
    if options.command == "down":
        ended = lifecycle.sandbox_down(options.name)
        print_escaped(f"sandbox {options.name}: {'down' if ended else 'was not running'}")
        return 0
    sandbox = lifecycle.find_sandbox(options.name)
    if options.command == "status":
        return _print_status(sandbox, options.json)
    if options.command == "link":
        parsers = {"rate": lambda text: 0.0 if text == "0" else units.parse_bit_rate(text),
                   "delay": units.parse_duration, "loss": units.parse_fraction}
        shape = {key: parse(vars(options)[key]) for key, parse in parsers.items() if vars(options)[key] is not None}
        print_escaped(f"{options.target}: {sandbox.shape_link(options.target, **shape)}")
        return 0
    if options.command == "cpu-limit":
        fraction = units.parse_fraction(options.fraction)
        sandbox.limit_cpu(options.node, fraction)
        print_escaped(f"{options.node}: " + (f"{fraction:.0%} of a core" if fraction else "no CPU limit"))
        return 0
    args = ["bash", "-i"] if options.command == "shell" else options.argv
    args = args[1:] if args[:1] == ["--"] else args
    if not args:
        raise UsageError("slurmdl sandbox exec: no command; expected e.g. `slurmdl sandbox exec sinfo`")
    command_line = sandbox.command(args, options.host, as_root=options.as_root)
    sys.stdout.flush()
    os.execvp(command_line[0], command_line)


def _describe(sandbox: Sandbox, states: str = "") -> str:
    spec = sandbox.spec
    return (f"{pluralize(len(spec.topology.nodes), 'node')} in {pluralize(len(spec.leaf_indices()), 'zone')}{states}"
            f"; user {sandbox.user.name}, shared directory {sandbox.shared}")


def _build_spec(options: argparse.Namespace) -> SandboxSpec:
    from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

    if options.topology:
        from slurmdl.topology import load
        topology = load.load_topology(options.topology)
    else:
        topology = round_robin_topology(options.nodes, options.zones)
    features: dict[str, str] = {}
    for text in options.features:
        node, _, names = text.rpartition("=")
        features[node] = ",".join(filter(None, (features.get(node), names)))
    for line in options.slurm_conf:
        if "=" not in line:
            raise UsageError(f"--slurm-conf={line}: expected KEY=VALUE")
    return SandboxSpec(options.name, topology, node_rate=units.parse_bit_rate(options.node_rate),
                       zone_rate=units.parse_bit_rate(options.zone_rate), cpus=options.cpus, memory=options.memory,
                       zone_features=not options.no_zone_features, features=features, gres=options.gres,
                       slurm_conf_lines=tuple(options.slurm_conf), bind_mounts=tuple(options.bind_mount))


def _print_status(sandbox: Sandbox, as_json: bool) -> int:
    from slurmdl.sandbox import namespaces
    from slurmdl.topology.topology import nodes_by_leaf

    spec, shapes = sandbox.spec, sandbox.link_shapes()
    counters, states = sandbox.zone_byte_counters(), sandbox.node_states()
    if as_json:
        print(json.dumps({"name": spec.name, "user": sandbox.user.name, "shared": str(sandbox.shared),
                          "topology": spec.topology.to_json(), "states": states, "counters": counters,
                          "link_shapes": {name: vars(shape) for name, shape in shapes.items()}}))
        return 0
    print_escaped(f"sandbox {spec.name}: user {sandbox.user.name}, shared directory {sandbox.shared}, "
                  f"node links {units.format_bit_rate(spec.node_rate / 8)}, "
                  f"zone uplinks {units.format_bit_rate(spec.zone_rate / 8)}")
    for leaf, nodes in sorted(nodes_by_leaf(spec.topology).items()):
        zone, line = spec.topology.zones[leaf], " ".join(f"{node}({states.get(node, 'off')})" for node in nodes)
        print_escaped(f"  {zone}: {line}  out {counters[zone]['out']:,} B  in {counters[zone]['in']:,} B")
    for name, shape in shapes.items():
        rate = units.format_bit_rate(shape.rate / 8) if shape.rate else "no rate limit"
        print_escaped(f"  link of {name}, each way: {rate}, "
                      f"delay {units.format_duration(shape.delay)}, loss {shape.loss:g}")
    for node, fraction in namespaces.cpu_quotas(spec.name).items():
        print_escaped(f"  CPU of {node}: {fraction:.0%} of a core")
    return 0
