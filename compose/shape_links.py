#!/usr/bin/python3
"""Show or change the links between the zones of the containerized cluster; runs on its router.

    shape-links                                       print shape and byte counters of all links
    shape-links zoneA --rate 10mbit --delay 5ms --loss 1%    in each direction; other properties do not change
    shape-links --init                                create all links from ZONES and ZONE_RATE (router start)

ZONES maps zones to networks, e.g. "zoneA=1,3 zoneB=2,4"; network N is 10.77.N.0/24. Policy routing sends the traffic
of a zone through a veth pair: NAME is the zone's end, up-NAME the core's. Each end has a token bucket (tc-tbf(8))
and, for a delay, netem (tc-netem(8)) or, without netem in the kernel, a relay in user space. nftables drops and
counts packets between nodes; packets of Slurm's controller and the login host are exempt.
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
from slurmdl.sandbox.veth_links import MTU, tbf_args
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
    pairs = (pair.split("=") for pair in os.environ["ZONES"].split())
    return {name: [int(number) for number in numbers.split(",")] for name, numbers in pairs}


def interface(network: int) -> str:
    """Name of the router's interface in a network."""
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


def set_link(name: str, shape: dict[str, float]) -> None:
    """Recreate the veth pair of a zone with a shape: rate in bits/s, delay in seconds, loss as a fraction."""
    networks, number = zones()[name], list(zones()).index(name)
    below, above = name, f"up-{name}"
    relayed = bool(shape["delay"]) and not has_netem()
    for end in (below, above):
        run(["ip", "link", "del", end], check=False)
    pairs = [(below, f"relay-{name}"), (f"phys-{name}", above)] if relayed else [(below, above)]
    lines = [f"link add {a} mtu {MTU} type veth peer name {b} mtu {MTU}" for a, b in pairs]
    lines += [f"link set {end} up" for pair in pairs for end in pair]
    run(["ip", "-batch", "-"], "\n".join(lines))
    hardware = {row["ifname"]: row["address"] for row in json.loads(run(["ip", "-j", "link"]))}
    lower, upper = f"169.254.{number}.1", f"169.254.{number}.2"
    # static neighbours, because both ends are on this host
    lines = [f"neigh replace {upper} lladdr {hardware[above]} nud permanent dev {below}",
             f"neigh replace {lower} lladdr {hardware[below]} nud permanent dev {above}",
             f"route replace default via {upper} dev {below} onlink table {100 + number}"]
    for network in networks:
        subnet = f"10.77.{network}.0/24"
        # the core reaches a zone through its veth pair, the zone its networks directly
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
        # with loss, split 64 KB packets into frames, so that single frames are dropped
        run(["ip", "link", "set", end, "gso_max_segs", "1" if shape["loss"] else "65535"])
    drops = "".join(f'iifname "{end}" ip saddr {NODES} ip daddr {NODES} '
                   f"numgen random mod 1000000 < {round(shape['loss'] * 1e6)} drop\n" for end in (below, above))
    table = f"table ip loss-{name}"
    rules = f"{table} {{\nchain lose {{ type filter hook prerouting priority 0;\n{drops}}}\n}}\n"
    run(["nft", "-f", "-"], f"{table} {{ }}\ndelete {table}\n{rules if shape['loss'] else ''}")
    if relayed:
        run([sys.executable, "-IS", delay_relay.__file__, f"phys-{name}", f"relay-{name}", repr(shape["delay"])])


def init_links() -> None:
    """Create the fixed routes, the counters and all links."""
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
    counters = "".join(f"counter {name}-{direction} {{ }}\n" for name in zones() for direction in ("out", "in"))
    run(["nft", "-f", "-"], f"table ip links {{\n{counters}chain count {{ type filter hook forward priority 0;\n"
                            f"{chains}}}\n}}\n")
    shape = {"rate": parse_bit_rate(os.environ["ZONE_RATE"]), "delay": 0.0, "loss": 0.0}
    for name in zones():
        set_link(name, shape)
    STATE.write_text(json.dumps(dict.fromkeys(zones(), shape)))


def counters() -> dict[str, int]:
    rows = json.loads(run(["nft", "-j", "list", "counters", "table", "ip", "links"]))["nftables"]
    return {row["counter"]["name"]: row["counter"]["bytes"] for row in rows if "counter" in row}


def main() -> int:
    parser = argparse.ArgumentParser(prog="shape-links", description="show or change the links between zones")
    parser.add_argument("zone", nargs="?", help="zone of the link to change")
    parser.add_argument("--rate", type=parse_bit_rate, help="e.g. 10mbit")
    parser.add_argument("--delay", type=parse_duration, help="in each direction, e.g. 5ms")
    parser.add_argument("--loss", type=parse_fraction, help="fraction of packets between nodes, e.g. 1%%")
    parser.add_argument("--init", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.init:
        init_links()
        return 0
    shapes, bytes_by_counter = json.loads(STATE.read_text()), counters()
    if options.zone:
        if options.zone not in shapes:
            raise UsageError(f"no zone {options.zone!r}; expected {', '.join(shapes)}")
        changes = {key: getattr(options, key) for key in ("rate", "delay", "loss")}
        shapes[options.zone].update({key: value for key, value in changes.items() if value is not None})
        set_link(options.zone, shapes[options.zone])
        STATE.write_text(json.dumps(shapes))
    for name, shape in shapes.items():
        print(f"{name}: {shape['rate'] / 1e6:g} Mbit/s, {shape['delay'] * 1e3:g} ms, {shape['loss']:.3%} lost; "
              f"{bytes_by_counter[f'{name}-out']} bytes out, {bytes_by_counter[f'{name}-in']} in")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"shape-links: {error}", file=sys.stderr)
        sys.exit(64)
