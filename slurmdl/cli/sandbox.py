"""a real Slurm cluster on this machine, several hosts, shaped links"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from slurmdl import units
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import UsageError
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.sandbox.lifecycle import Sandbox
    from slurmdl.sandbox.spec import SandboxSpec


def build_parser() -> argparse.ArgumentParser:
    top = CliParser(prog="slurmdl sandbox", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--name", default="sandbox", help="name of the sandbox (default: %(default)s)")
        return sub

    up = command("up", "bring a cluster up; returns when all nodes are idle")
    up.add_argument("--nodes", type=int, default=8, metavar="N", help="number of nodes (default: %(default)s)")
    up.add_argument("--zones", type=int, default=2, metavar="N",
                    help="leaf switches that the nodes are dealt to in turn (default: %(default)s)")
    up.add_argument("--topology", metavar="FILE", help="zones and nodes from a topology.conf, .yaml or .json instead")
    up.add_argument("--node-bandwidth", default="1gbit", metavar="RATE",
                    help="of a node's link (default: %(default)s)")
    up.add_argument("--zone-bandwidth", default="50mbit", metavar="RATE",
                    help="between a zone and the one above (default: %(default)s)")
    up.add_argument("--cpus", type=int, default=2, metavar="N", help="of each node (default: %(default)s)")
    up.add_argument("--memory", type=int, default=4000, metavar="MB", help="of each node (default: %(default)s)")
    up.add_argument("--gres", default="", help="of each node, e.g. gpu:2 (counted only)")
    up.add_argument("--features", action="append", default=[], metavar="[NODE=]LIST",
                    help="further features of all nodes or of one")
    up.add_argument("--no-zone-features", action="store_true", help="nodes do not carry their zone as a feature")
    up.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a line of slurm.conf")
    up.add_argument("--share", action="append", default=[], metavar="DIR",
                    help="a directory that every host sees under its own path")
    command("status", "hosts, zones, links and the bytes that crossed zones").add_argument(
        "--json", action="store_true")
    link = command("link", "change the link of a node, the uplink of a zone, or the way between two zones")
    link.add_argument("target", metavar="NODE|ZONE|ZONE:ZONE")
    link.add_argument("--rate", metavar="RATE", help="e.g. 10mbit; 0 takes the limit away")
    link.add_argument("--delay", metavar="TIME", help="that each packet is held each way, e.g. 10ms")
    link.add_argument("--loss", metavar="SHARE", help="of the packets between nodes, each way, e.g. 0.02 or 2%%")
    cpu = command("cpu", "let the processes of a node, its jobs among them, have only a share of a core")
    cpu.add_argument("node", metavar="NODE")
    cpu.add_argument("share", metavar="SHARE", help="of one core, e.g. 0.25 or 25%%; 0 takes the limit away")
    shell = command("shell", "a shell on a host, as the ordinary user")
    run = command("run", "run a command on a host, as the ordinary user")
    for sub in (shell, run):
        sub.add_argument("--host", default="login", help="where (default: %(default)s)")
        sub.add_argument("--as-root", action="store_true", help="as root, e.g. for scontrol update")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD ...")
    command("down", "end the cluster and leave nothing of it")
    return top


def run(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    # these imports need numpy, which the parser and its help do not
    from slurmdl.sandbox import lifecycle

    if options.command == "up":
        box = lifecycle.sandbox_up(_build_spec(options))
        zones = len(box.spec.leaf_indices())
        print_escaped(f"sandbox {box.spec.name}: {len(box.spec.topology.nodes)} nodes in {zones} zone{'s' * (zones != 1)} "
              f"are idle; jobs run as {box.user.name}; shared directory {box.shared}")
        return 0
    if options.command == "down":
        print_escaped(f"sandbox {options.name}: {'down' if lifecycle.sandbox_down(options.name) else 'was not up'}")
        return 0
    box = lifecycle.find_sandbox(options.name)
    if options.command == "status":
        return _print_status(box, options.json)
    if options.command == "link":
        from slurmdl.units import parse_duration, parse_fraction

        means = box.shape_link(options.target,
                                rate=None if options.rate is None else _parse_rate_or_zero(options.rate),
                                delay=None if options.delay is None else parse_duration(options.delay),
                                loss=None if options.loss is None else parse_fraction(options.loss))
        print_escaped(f"{options.target}: {means}")
        return 0
    if options.command == "cpu":
        from slurmdl.units import parse_fraction

        share = parse_fraction(options.share)
        box.limit_cpu(options.node, share)
        print_escaped(f"{options.node}: " + (f"{share:.0%} of a core" if share else "no limit of its CPU"))
        return 0
    words = ["bash", "-i"] if options.command == "shell" else options.argv
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise UsageError("slurmdl sandbox run: no command given, e.g. `slurmdl sandbox run sinfo`")
    line = box.command(words, options.host, as_root=options.as_root)
    sys.stdout.flush()
    os.execvp(line[0], line)


def _parse_rate_or_zero(text: str) -> float:
    from slurmdl.units import parse_bit_rate
    return 0.0 if text == "0" else parse_bit_rate(text)


def _build_spec(options: argparse.Namespace) -> SandboxSpec:
    from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
    from slurmdl.units import parse_bit_rate

    if options.topology:
        from slurmdl.topology import load
        topology = load.load_topology(options.topology)
    else:
        topology = round_robin_topology(options.nodes, options.zones)
    features: dict[str, str] = {}
    for text in options.features:
        node, _, names = text.rpartition("=")
        features[node] = ",".join(filter(None, (features.get(node), names)))
    for line in options.set:
        if "=" not in line:
            raise UsageError(f"--set {line!r}: KEY=VALUE of slurm.conf expected")
    return SandboxSpec(options.name, topology, node_rate=parse_bit_rate(options.node_bandwidth),
                zone_rate=parse_bit_rate(options.zone_bandwidth), cpus=options.cpus, memory=options.memory,
                zone_features=not options.no_zone_features, features=features, gres=options.gres,
                slurm_conf_lines=tuple(options.set), bind_mounts=tuple(options.share))


def _print_status(sandbox: Sandbox, as_json: bool) -> int:
    topology, counters, states = sandbox.spec.topology, sandbox.zone_byte_counters(), sandbox.node_states()
    if as_json:
        print(json.dumps({"name": sandbox.spec.name, "user": sandbox.user.name, "shared": str(sandbox.shared),
                          "topology": topology.to_json(), "states": states, "counters": counters,
                          "changed": {name: vars(shape) for name, shape in sandbox.link_shapes().items()}}))
        return 0
    print_escaped(f"sandbox {sandbox.spec.name}: user {sandbox.user.name}, shared directory {sandbox.shared}, "
          f"node links {units.format_bit_rate(sandbox.spec.node_rate / 8)}, zone uplinks {units.format_bit_rate(sandbox.spec.zone_rate / 8)}")
    for index, zone in enumerate(topology.zones):
        nodes = [n for n, leaf in zip(topology.nodes, topology.leaf, strict=True) if leaf == index]
        if nodes:
            line = " ".join(f"{n}({states.get(n, 'off')})" for n in nodes)
            print_escaped(f"  {zone}: {line}  out {counters[zone]['out']:,} B  in {counters[zone]['in']:,} B")
    for name, shape in sandbox.link_shapes().items():
        rate = units.format_bit_rate(shape.rate / 8) if shape.rate else "no limit of its rate"
        print_escaped(f"  {'way' if '|' in name else 'link of'} {name}, each way: {rate}, {units.format_duration(shape.delay)} more, "
              f"{shape.loss:g} lost")
    for node, share in sandbox.cpu_fractions().items():
        print_escaped(f"  CPU of {node}: {share:.0%} of a core")
    return 0
