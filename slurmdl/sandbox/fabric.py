"""The links of a sandbox: every zone a host of its own that switches or routes, every link shaped.

A leaf zone is a bridge with its nodes; its uplink leads to the host of the zone above, which routes, and so
on up to the login host, which joins the roots. What goes from zone to zone therefore crosses the uplinks,
and each end of a link has a token bucket (tc-tbf(8)) on what it sends.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmdl.errors import SandboxError, UsageError
from slurmdl.sandbox import delay, hosts
from slurmdl.sandbox.bucket import MTU, bucket
from slurmdl.sandbox.spec import LOGIN, Spec


@dataclass(frozen=True)
class Link:
    """One cable: the host below and its interface, the host above and its interface, bits/s (0 = unshaped)."""

    below: str
    below_if: str
    above: str
    above_if: str
    rate: float


def subnet(spec: Spec, leaf: int) -> int:
    """Second byte of the addresses in a leaf zone."""
    return spec.leaves().index(leaf) + 1


def addresses(spec: Spec) -> dict[str, str]:
    """Address of every node and of the login host."""
    found = {LOGIN: "10.0.0.1"}
    if spec.cloud:
        return found
    count: dict[int, int] = {}
    for name, leaf in zip(spec.topology.nodes, spec.topology.leaf, strict=True):
        count[int(leaf)] = count.get(int(leaf), 0) + 1
        found[name] = f"10.{subnet(spec, int(leaf))}.0.{count[int(leaf)]}"
    return found


def links(spec: Spec) -> list[Link]:
    """All cables, those of the nodes first. Interfaces downward are named d0, d1, ... in this order."""
    topology, found = spec.topology, []
    down: dict[str, int] = {}

    def cable(below: str, below_if: str, above: str, rate: float) -> None:
        down[above] = down.get(above, -1) + 1
        found.append(Link(below, below_if, above, f"d{down[above]}", rate))

    for name, leaf in zip(topology.nodes, topology.leaf, strict=True):
        cable(name, "eth0", topology.zones[leaf], spec.node_rate)
    for name, parent in zip(topology.zones, topology.parent, strict=True):
        above, rate = (topology.zones[parent], spec.zone_rate) if parent >= 0 else (LOGIN, 0.0)
        cable(name, "uplink", above, rate)
    return found


def lay(spec: Spec, pids: dict[str, int]) -> None:
    """Make all links, addresses, routes, shapes and counters. `pids` as `hosts.start` returns them."""
    if spec.cloud:
        hosts.run(pids[LOGIN], ["ip", "address", "add", f"{addresses(spec)[LOGIN]}/32", "dev", "lo"])
        return
    cables = links(spec)
    batch = "".join(
        f"link add {c.below_if} mtu {MTU} netns {pids[c.below]} type veth "
        f"peer name {c.above_if} mtu {MTU} netns {pids[c.above]}\n" for c in cables)
    done = subprocess.run(["ip", "-batch", "-"], input=batch, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SandboxError(f"ip link: {' '.join(done.stderr.split())[:300]}")
    for host, lines in _addressing(spec, cables).items():
        hosts.run(pids[host], ["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
    for host in (LOGIN, *spec.topology.zones):
        hosts.run(pids[host], ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
    shapes: dict[str, list[str]] = {}
    for c in cables:
        if c.rate:
            for host, interface in ((c.below, c.below_if), (c.above, c.above_if)):
                shapes.setdefault(host, []).append(f"qdisc add dev {interface} root {bucket(c.rate)}")
    for host, lines in shapes.items():
        hosts.run(pids[host], ["tc", "-batch", "-"], stdin="\n".join(lines) + "\n")
    for zone in spec.topology.zones:
        hosts.run(pids[zone], ["nft", "-f", "-"], stdin=_RULES)


def _addressing(spec: Spec, cables: list[Link]) -> dict[str, list[str]]:
    topology, address = spec.topology, addresses(spec)
    batch: dict[str, list[str]] = {LOGIN: [f"address add {address[LOGIN]}/32 dev lo"]}
    for leaf in spec.leaves():
        batch[topology.zones[leaf]] = ["link add br0 type bridge", f"link set br0 mtu {MTU} up",
                                       f"address add 10.{subnet(spec, leaf)}.255.254/16 dev br0"]
    below: dict[str, list[int]] = {}  # host -> leaves reached through it
    for leaf in spec.leaves():
        zone = leaf
        while zone >= 0:
            below.setdefault(topology.zones[zone], []).append(leaf)
            zone = int(topology.parent[zone])
    for number, c in enumerate(cables):
        lower, upper = batch.setdefault(c.below, []), batch.setdefault(c.above, [])
        lower.append(f"link set {c.below_if} up")
        upper.append(f"link set {c.above_if} up")
        if c.below in address:
            gateway = subnet(spec, int(topology.leaf[topology.node_index[c.below]]))
            upper.append(f"link set {c.above_if} master br0")
            lower += [f"address add {address[c.below]}/16 dev {c.below_if}",
                      f"route add default via 10.{gateway}.255.254"]
        else:
            ends = _ends(number)
            lower += [f"address add {ends[0]}/30 dev {c.below_if}", f"route add default via {ends[1]}"]
            upper.append(f"address add {ends[1]}/30 dev {c.above_if}")
            upper += [f"route add 10.{subnet(spec, leaf)}.0.0/16 via {ends[0]}" for leaf in below.get(c.below, [])]
    return batch


def _ends(number: int) -> tuple[str, str]:
    """Addresses of the two ends of a cable between zones, the lower end's first."""
    network = f"172.{16 + number // 8192}.{number // 32 % 256}"
    return f"{network}.{number % 32 * 8 + 1}", f"{network}.{number % 32 * 8 + 2}"


# Counted and lost are only packets between nodes: what Slurm's controller sends is neither.
_NODES = "10.1.0.0-10.255.255.255"
_RULES = """
table ip slurmdl {
  counter out { }
  counter in { }
  chain count {
    type filter hook forward priority 0;
    oifname "uplink" ip saddr 10.0.0.0/8 ip daddr { 10.1.0.0-10.255.255.255 } ip saddr != 10.0.0.1 counter name out
    iifname "uplink" ip saddr != 10.0.0.1 ip saddr 10.0.0.0/8 ip daddr { 10.1.0.0-10.255.255.255 } counter name in
  }
}
"""


def counters(pids: dict[str, int], zones: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Bytes that nodes sent out of, and got into, each zone so far: zone -> {"out": bytes, "in": bytes}."""
    found: dict[str, dict[str, int]] = {}
    for zone in zones:
        rows = json.loads(hosts.run(pids[zone], ["nft", "-j", "list", "counters"]))["nftables"]
        found[zone] = {row["counter"]["name"]: int(row["counter"]["bytes"]) for row in rows if "counter" in row}
    return found


@dataclass(frozen=True)
class Shape:
    """What a link is like, each way: bits/s (0: unshaped), seconds that packets are held, share of them lost."""

    rate: float
    delay: float = 0.0
    loss: float = 0.0


def find(spec: Spec, name: str) -> Link:
    """The link of a node, or the uplink of a zone; UsageError for any other name."""
    cable = next((c for c in links(spec) if c.below == name), None)
    if cable is None:
        raise UsageError(f"no node, zone or pair of zones {name!r} (nodes {', '.join(spec.topology.nodes[:8])}; "
                         f"zones {', '.join(spec.topology.zones[:8])})")
    return cable


def change(pids: Mapping[str, int], cable: Link, old: Shape, new: Shape, restore: Sequence[str]) -> str:
    """Give a link another shape, and return the means by which it has it, in words.

    Packets between nodes are lost where they arrive, after the segments of 64 KB that hosts hand to their interfaces
    were cut to single frames, as on a cable; the controller's are spared.

    Parameters
    ----------
    restore : lines for `ip -batch` that give a new upper end what the cable's had (see `upper_end`).
    """
    ends = ((cable.below, cable.below_if), (cable.above, cable.above_if))
    held, netem = cable.above_if, False
    if new.delay or old.delay:
        netem = delay.has_netem(pids[cable.above])
        if not netem and old.delay != new.delay:
            if old.delay:
                delay.remove(pids[cable.above], held, restore)
            if new.delay:
                delay.insert(pids[cable.above], held, MTU, new.delay, restore)
    wire = delay.wire(held) if new.delay and not netem else held
    for host, interface in ((cable.below, cable.below_if), (cable.above, wire)):
        shape = bucket(new.rate, single=bool(new.loss)) if new.rate else ""
        lines = delay.netem(interface, new.delay, shape) if new.delay and netem else \
            [f"qdisc replace dev {interface} root {shape or 'noqueue'}"]
        hosts.run(pids[host], ["tc", "-batch", "-"], stdin="\n".join(lines) + "\n")
        hosts.run(pids[host], ["ip", "link", "set", interface, "gso_max_segs", "1" if new.loss else "65535"])
    for host, interface in ends:
        hosts.run(pids[host], ["nft", "-f", "-"], stdin=_loss_rules(interface, new.loss))
    words = [f"{new.rate / 1e6:g} Mbit/s (tbf)" if new.rate else "no limit of its rate"]
    if new.delay:
        words.append(f"{new.delay * 1e3:g} ms each way ({'netem' if netem else delay.RELAY})")
    if new.loss:
        words.append(f"{new.loss:.3%} lost each way (nftables; segmentation offloads are off)")
    return ", ".join(words)


def upper_end(spec: Spec, cable: Link) -> list[str]:
    """Lines for `ip -batch` that give the upper end of a cable its place in the host above."""
    number = links(spec).index(cable)
    return [line for line in _addressing(spec, links(spec))[cable.above]
            if f" {cable.above_if} " in f"{line} " or f"via {_ends(number)[0]}" in line]


def _loss_rules(interface: str, loss: float) -> str:
    table = f"table netdev loss-{interface}"
    clear = f"{table} {{ }}\ndelete {table}\n"
    if not loss:
        return clear
    return (f"{clear}{table} {{\nchain lose {{ type filter hook ingress device \"{interface}\" priority 0;\n"
            f"ip saddr {_NODES} ip daddr {_NODES} numgen random mod 1000000 < {round(loss * 1e6)} drop\n}}\n}}\n")
