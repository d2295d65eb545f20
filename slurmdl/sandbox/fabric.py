"""The links of a sandbox: every zone a host of its own that switches or routes, every link shaped.

A leaf zone is a bridge with its nodes; its uplink leads to the host of the zone above, which routes, and so
on up to the login host, which joins the roots. What goes from zone to zone therefore crosses the uplinks,
and each end of a link has a token bucket (tc-tbf(8)) on what it sends.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from slurmdl.errors import SandboxError, UsageError
from slurmdl.sandbox import hosts
from slurmdl.sandbox.spec import LOGIN, Spec

#: jumbo frames, as fabrics for HPC have; they also keep headers under 1 % of the bytes on the wire
MTU = 9000
_BURST_SECONDS = 0.002
_QUEUE_SECONDS = 0.2


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
            shapes.setdefault(c.below, []).append(_tbf(c.below_if, c.rate))
            shapes.setdefault(c.above, []).append(_tbf(c.above_if, c.rate))
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
            ends = [f"172.{16 + number // 8192}.{number // 32 % 256}.{number % 32 * 8 + i}" for i in (1, 2)]
            lower += [f"address add {ends[0]}/30 dev {c.below_if}", f"route add default via {ends[1]}"]
            upper.append(f"address add {ends[1]}/30 dev {c.above_if}")
            upper += [f"route add 10.{subnet(spec, leaf)}.0.0/16 via {ends[0]}" for leaf in below.get(c.below, [])]
    return batch


def _tbf(interface: str, rate: float, verb: str = "add") -> str:
    # a bucket smaller than one 64 KB super-packet would make the kernel cut it up, which costs CPU time only
    burst = max(70_000, int(rate / 8 * _BURST_SECONDS))
    return (f"qdisc {verb} dev {interface} root tbf rate {rate:.0f}bit burst {burst} "
            f"limit {max(4 * burst, int(rate / 8 * _QUEUE_SECONDS))}")


# Counted and lost are only packets between nodes: what Slurm's controller sends is neither.
_RULES = """
table ip slurmdl {
  counter out { }
  counter in { }
  chain loss { type filter hook forward priority -10; }
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


def change(spec: Spec, pids: dict[str, int], name: str, *, rate: float | None = None,
           loss: float | None = None) -> None:
    """Change the link of a node, or the uplink of a zone.

    Parameters
    ----------
    rate : bits/s, both directions; 0 takes the shaping away.
    loss : fraction of the packets between zones that a zone's uplink loses, each way (zones only).
    """
    cable = next((c for c in links(spec) if c.below == name), None)
    if cable is None:
        raise UsageError(f"no node or zone {name!r} (nodes {', '.join(spec.topology.nodes[:8])}; "
                         f"zones {', '.join(spec.topology.zones[:8])})")
    if rate is not None:
        for host, interface in ((cable.below, cable.below_if), (cable.above, cable.above_if)):
            line = _tbf(interface, rate, "replace") if rate else f"qdisc replace dev {interface} root noqueue"
            hosts.run(pids[host], ["tc", "-batch", "-"], stdin=line + "\n")
    if loss is not None:
        if name not in spec.topology.zones or not 0 <= loss < 1:
            raise UsageError(f"loss {loss} of {name}: 0 <= loss < 1 on the uplink of a zone expected")
        rules = "flush chain ip slurmdl loss\n"
        if loss:
            for direction in ("oifname", "iifname"):
                rules += (f'add rule ip slurmdl loss {direction} "uplink" numgen random mod 100000 '
                          f"< {round(loss * 100000)} drop\n")
        hosts.run(pids[name], ["nft", "-f", "-"], stdin=rules)
