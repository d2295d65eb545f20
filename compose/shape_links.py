#!/usr/bin/python3
"""Show or change the links between the zones of the containerized cluster; runs on its router.

    links                                          every zone's link: its shape, and the bytes that crossed it
    links zoneA --rate 10mbit --delay 5ms --loss 1%    each way; what is not given stays as it is
    links --lay                                    all links as ZONES and ZONE_RATE say, once, when the router starts

ZONES says which networks are a zone, such as "zoneA=1,3 zoneB=2,4": network N is 10.77.N.0/24. What leaves a zone or
comes to it crosses a cable: a pair of virtual interfaces NAME (the zone's end) and up-NAME (the core's), led there by
rules for policy routing. Each end has a token bucket (tc-tbf(8)) on what it sends, and netem (tc-netem(8)) before it
where the link has a delay; where the kernel has no netem, a relay in user space holds the frames on the cable.
Packets between nodes are lost, and counted, by nftables; what Slurm's controller and the login host send is neither.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from slurmdl.errors import UsageError
from slurmdl.sandbox import delay_relay
from slurmdl.sandbox.qdisc import MTU, tbf_args
from slurmdl.units import parse_bit_rate, parse_duration, parse_fraction

STATE = Path("/run/links.json")
#: the networks 1 to 4 hold the nodes, 0 the other hosts
NODES = "10.77.1.0-10.77.4.255"


def run(argv: list[str], text: str = "", check: bool = True) -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise UsageError(f"{' '.join(argv)}: {' '.join(done.stderr.split())}")
    return done.stdout


def zones() -> dict[str, list[int]]:
    """Zone -> its networks, in order."""
    words = (word.split("=") for word in os.environ["ZONES"].split())
    return {name: [int(number) for number in numbers.split(",")] for name, numbers in words}


def interface(network: int) -> str:
    """The router's interface in a network."""
    for row in json.loads(run(["ip", "-j", "-4", "address"])):
        if any(address["local"].startswith(f"10.77.{network}.") for address in row["addr_info"]):
            return str(row["ifname"])
    raise UsageError(f"the router is not in network 10.77.{network}.0/24")


def has_netem() -> bool:
    try:
        run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except UsageError:
        return False
    run(["tc", "qdisc", "del", "dev", "lo", "root"])
    return True


def lay(name: str, shape: dict[str, float]) -> None:
    """Lay the cable of a zone anew, with the shape given: rate in bits/s, delay in seconds, loss as a share."""
    networks, number = zones()[name], list(zones()).index(name)
    below, above = name, f"up-{name}"
    relayed = bool(shape["delay"]) and not has_netem()
    for end in (below, above):
        run(["ip", "link", "del", end], check=False)
    pairs = [(below, f"held-{name}"), (f"wire-{name}", above)] if relayed else [(below, above)]
    lines = [f"link add {a} mtu {MTU} type veth peer name {b} mtu {MTU}" for a, b in pairs]
    lines += [f"link set {end} up" for pair in pairs for end in pair]
    run(["ip", "-batch", "-"], "\n".join(lines))
    hardware = {row["ifname"]: row["address"] for row in json.loads(run(["ip", "-j", "link"]))}
    lower, upper = f"169.254.{number}.1", f"169.254.{number}.2"
    # the neighbours are told, as both would be asked for by the same host
    lines = [f"neigh replace {upper} lladdr {hardware[above]} nud permanent dev {below}",
             f"neigh replace {lower} lladdr {hardware[below]} nud permanent dev {above}",
             f"route replace default via {upper} dev {below} onlink table {100 + number}"]
    for network in networks:
        subnet = f"10.77.{network}.0/24"
        # in the core the way to a zone is its cable; in the zone it is the network itself
        lines += [f"route replace {subnet} via {lower} dev {above} onlink table 50",
                  f"route replace {subnet} dev {interface(network)} table {100 + number}"]
    run(["ip", "-batch", "-"], "\n".join(lines))
    for end in (below, above):
        root = "root"
        if shape["delay"] and not relayed:
            run(["tc", "qdisc", "add", "dev", end, "root", "handle", "1:", "netem", "delay",
                 f"{shape['delay'] * 1e6:.0f}us", "limit", "100000"])
            root = "parent 1:1"
        if shape["rate"]:
            limit = tbf_args(shape["rate"], single_segments=bool(shape["loss"]))
            run(["tc", "qdisc", "add", "dev", end, *root.split(), *limit.split()])
        # packets of 64 KB are cut to frames before one of them is lost
        run(["ip", "link", "set", end, "gso_max_segs", "1" if shape["loss"] else "65535"])
    lose = "".join(f'iifname "{end}" ip saddr {NODES} ip daddr {NODES} '
                   f"numgen random mod 1000000 < {round(shape['loss'] * 1e6)} drop\n" for end in (below, above))
    table = f"table ip loss-{name}"
    rules = f"{table} {{\nchain lose {{ type filter hook prerouting priority 0;\n{lose}}}\n}}\n"
    run(["nft", "-f", "-"], f"{table} {{ }}\ndelete {table}\n{rules if shape['loss'] else ''}")
    if relayed:
        run([sys.executable, "-IS", delay_relay.__file__, f"wire-{name}", f"held-{name}", repr(shape["delay"])])


def lay_all() -> None:
    """The routes that never change, the counters, and all cables."""
    rules = [f"address replace 10.77.{network}.1/24 dev {interface(network)}"
             for network in (0, *(n for group in zones().values() for n in group))]
    chains = ""
    for number, (name, networks) in enumerate(zones().items()):
        for entry in (*map(interface, networks), name):
            rules.append(f"rule add pref 100 iif {entry} lookup {100 + number}")
        chains += (f'oifname "{name}" ip saddr {NODES} ip daddr {NODES} counter name {name}-out\n'
                   f'iifname "{name}" ip saddr {NODES} ip daddr {NODES} counter name {name}-in\n')
    rules.append("rule add pref 200 lookup 50")
    run(["ip", "-batch", "-"], "\n".join(rules))
    counters = "".join(f"counter {name}-{way} {{ }}\n" for name in zones() for way in ("out", "in"))
    run(["nft", "-f", "-"], f"table ip links {{\n{counters}chain count {{ type filter hook forward priority 0;\n"
                            f"{chains}}}\n}}\n")
    shape = {"rate": parse_bit_rate(os.environ["ZONE_RATE"]), "delay": 0.0, "loss": 0.0}
    for name in zones():
        lay(name, shape)
    STATE.write_text(json.dumps(dict.fromkeys(zones(), shape)))


def counters() -> dict[str, int]:
    rows = json.loads(run(["nft", "-j", "list", "counters", "table", "ip", "links"]))["nftables"]
    return {row["counter"]["name"]: row["counter"]["bytes"] for row in rows if "counter" in row}


def main() -> int:
    parser = argparse.ArgumentParser(prog="links", description="links between the zones of the cluster")
    parser.add_argument("zone", nargs="?", help="the zone whose link changes")
    parser.add_argument("--rate", type=parse_bit_rate, help="such as 10mbit")
    parser.add_argument("--delay", type=parse_duration, help="each way, such as 5ms")
    parser.add_argument("--loss", type=parse_fraction, help="share of the packets between nodes, such as 1%%")
    parser.add_argument("--lay", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lay:
        lay_all()
        return 0
    shapes, counted = json.loads(STATE.read_text()), counters()
    if options.zone:
        if options.zone not in shapes:
            raise UsageError(f"no zone {options.zone!r} (zones: {', '.join(shapes)})")
        given = {key: getattr(options, key) for key in ("rate", "delay", "loss")}
        shapes[options.zone].update({key: value for key, value in given.items() if value is not None})
        lay(options.zone, shapes[options.zone])
        STATE.write_text(json.dumps(shapes))
    for name, shape in shapes.items():
        print(f"{name}: {shape['rate'] / 1e6:g} Mbit/s, {shape['delay'] * 1e3:g} ms, {shape['loss']:.3%} lost; "
              f"{counted[f'{name}-out']} bytes out, {counted[f'{name}-in']} in")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"links: {error}", file=sys.stderr)
        sys.exit(64)
