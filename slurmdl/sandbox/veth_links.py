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
from slurmdl.links.link_scores import inter_leaf_name
from slurmdl.sandbox import namespaces, qdisc
from slurmdl.sandbox.qdisc import MTU, tbf_args
from slurmdl.sandbox.spec import LOGIN, SandboxSpec


@dataclass(frozen=True)
class VethLink:
    """One cable: the host below and its interface, the host above and its interface, bits/s (0 = unshaped)."""

    lower_host: str
    lower_interface: str
    upper_host: str
    upper_interface: str
    rate: float


def leaf_subnet(spec: SandboxSpec, leaf: int) -> int:
    """Second byte of the addresses in a leaf zone."""
    return spec.leaf_indices().index(leaf) + 1


def host_addresses(spec: SandboxSpec) -> dict[str, str]:
    """Address of every node and of the login host."""
    found = {LOGIN: "10.0.0.1"}
    if spec.cloud_nodes:
        return found
    count: dict[int, int] = {}
    for name, leaf in zip(spec.topology.nodes, spec.topology.leaf, strict=True):
        count[int(leaf)] = count.get(int(leaf), 0) + 1
        found[name] = f"10.{leaf_subnet(spec, int(leaf))}.0.{count[int(leaf)]}"
    return found


def all_links(spec: SandboxSpec) -> list[VethLink]:
    """All cables, those of the nodes first. Interfaces downward are named d0, d1, ... in this order."""
    topology, found = spec.topology, []
    down: dict[str, int] = {}

    def cable(below: str, below_if: str, above: str, rate: float) -> None:
        down[above] = down.get(above, -1) + 1
        found.append(VethLink(below, below_if, above, f"d{down[above]}", rate))

    for name, leaf in zip(topology.nodes, topology.leaf, strict=True):
        cable(name, "eth0", topology.zones[leaf], spec.node_rate)
    for name, parent in zip(topology.zones, topology.parent, strict=True):
        above, rate = (topology.zones[parent], spec.zone_rate) if parent >= 0 else (LOGIN, 0.0)
        cable(name, "uplink", above, rate)
    return found


def create_links(spec: SandboxSpec, pids: dict[str, int]) -> None:
    """Make all links, addresses, routes, shapes and counters. `pids` as `hosts.start` returns them."""
    if spec.cloud_nodes:
        namespaces.run_on_host(pids[LOGIN], ["ip", "address", "add", f"{host_addresses(spec)[LOGIN]}/32", "dev", "lo"])
        return
    cables = all_links(spec)
    batch = "".join(
        f"link add {c.lower_interface} mtu {MTU} netns {pids[c.lower_host]} type veth "
        f"peer name {c.upper_interface} mtu {MTU} netns {pids[c.upper_host]}\n" for c in cables)
    done = subprocess.run(["ip", "-batch", "-"], input=batch, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SandboxError(f"ip link: {' '.join(done.stderr.split())[:300]}")
    for host, lines in _address_commands(spec, cables).items():
        namespaces.run_on_host(pids[host], ["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
    for host in (LOGIN, *spec.topology.zones):
        namespaces.run_on_host(pids[host], ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
    shapes: dict[str, list[str]] = {}
    for c in cables:
        if c.rate:
            for host, interface in ((c.lower_host, c.lower_interface), (c.upper_host, c.upper_interface)):
                shapes.setdefault(host, []).append(f"qdisc add dev {interface} root {tbf_args(c.rate)}")
    for host, lines in shapes.items():
        namespaces.run_on_host(pids[host], ["tc", "-batch", "-"], stdin="\n".join(lines) + "\n")
    for zone in spec.topology.zones:
        namespaces.run_on_host(pids[zone], ["nft", "-f", "-"], stdin=_COUNTER_RULES)


def _address_commands(spec: SandboxSpec, veth_links: list[VethLink]) -> dict[str, list[str]]:
    topology, address = spec.topology, host_addresses(spec)
    batch: dict[str, list[str]] = {LOGIN: [f"address add {address[LOGIN]}/32 dev lo"]}
    for leaf in spec.leaf_indices():
        batch[topology.zones[leaf]] = ["link add br0 type bridge", f"link set br0 mtu {MTU} up",
                                       f"address add 10.{leaf_subnet(spec, leaf)}.255.254/16 dev br0"]
    below: dict[str, list[int]] = {}  # host -> leaves reached through it
    for leaf in spec.leaf_indices():
        zone = leaf
        while zone >= 0:
            below.setdefault(topology.zones[zone], []).append(leaf)
            zone = int(topology.parent[zone])
    for number, c in enumerate(veth_links):
        lower, upper = batch.setdefault(c.lower_host, []), batch.setdefault(c.upper_host, [])
        lower.append(f"link set {c.lower_interface} up")
        upper.append(f"link set {c.upper_interface} up")
        if c.lower_host in address:
            gateway = leaf_subnet(spec, int(topology.leaf[topology.node_index[c.lower_host]]))
            upper.append(f"link set {c.upper_interface} master br0")
            lower += [f"address add {address[c.lower_host]}/16 dev {c.lower_interface}",
                      f"route add default via 10.{gateway}.255.254"]
        else:
            ends = _uplink_addresses(number)
            lower += [f"address add {ends[0]}/30 dev {c.lower_interface}", f"route add default via {ends[1]}"]
            upper.append(f"address add {ends[1]}/30 dev {c.upper_interface}")
            upper += [f"route add 10.{leaf_subnet(spec, leaf)}.0.0/16 via {ends[0]}" for leaf in below.get(c.lower_host, [])]
    return batch


def _uplink_addresses(number: int) -> tuple[str, str]:
    """Addresses of the two ends of a cable between zones, the lower end's first."""
    network = f"172.{16 + number // 8192}.{number // 32 % 256}"
    return f"{network}.{number % 32 * 8 + 1}", f"{network}.{number % 32 * 8 + 2}"


# Counted and lost are only packets between nodes: what Slurm's controller sends is neither.
_NODE_ADDRESSES = "10.1.0.0-10.255.255.255"
_COUNTER_RULES = """
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


def zone_byte_counters(pids: dict[str, int], zones: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Bytes that nodes sent out of, and got into, each zone so far: zone -> {"out": bytes, "in": bytes}."""
    found: dict[str, dict[str, int]] = {}
    for zone in zones:
        rows = json.loads(namespaces.run_on_host(pids[zone], ["nft", "-j", "list", "counters"]))["nftables"]
        found[zone] = {row["counter"]["name"]: int(row["counter"]["bytes"]) for row in rows if "counter" in row}
    return found


@dataclass(frozen=True)
class LinkShape:
    """What a link is like, each way: bits/s (0: unshaped), seconds that packets are held, share of them lost."""

    rate: float
    delay: float = 0.0
    loss: float = 0.0


def find_link(spec: SandboxSpec, name: str) -> VethLink:
    """The link of a node, or the uplink of a zone; UsageError for any other name."""
    cable = next((c for c in all_links(spec) if c.lower_host == name), None)
    if cable is None:
        raise UsageError(f"no node, zone or pair of zones {name!r} (nodes {', '.join(spec.topology.nodes[:8])}; "
                         f"zones {', '.join(spec.topology.zones[:8])})")
    return cable


def set_link_shape(pids: Mapping[str, int], link: VethLink, old: LinkShape,
                   new: LinkShape, restore: Sequence[str]) -> str:
    """Give a link another shape, and return the means by which it has it, in words.

    Packets between nodes are lost where they arrive, after the segments of 64 KB that hosts hand to their interfaces
    were cut to single frames, as on a cable; the controller's are spared.

    Parameters
    ----------
    restore : lines for `ip -batch` that give a new upper end what the cable's had (see `upper_end`).
    """
    ends = ((link.lower_host, link.lower_interface), (link.upper_host, link.upper_interface))
    held, netem = link.upper_interface, False
    if new.delay or old.delay:
        netem = qdisc.has_netem(pids[link.upper_host])
        if not netem and old.delay != new.delay:
            if old.delay:
                qdisc.remove_relay(pids[link.upper_host], held, restore)
            if new.delay:
                qdisc.insert_relay(pids[link.upper_host], held, MTU, new.delay, restore)
    wire = qdisc.physical_name(held) if new.delay and not netem else held
    for host, interface in ((link.lower_host, link.lower_interface), (link.upper_host, wire)):
        shape = tbf_args(new.rate, single_segments=bool(new.loss)) if new.rate else ""
        lines = qdisc.netem_lines(interface, new.delay, shape) if new.delay and netem else \
            [f"qdisc replace dev {interface} root {shape or 'noqueue'}"]
        namespaces.run_on_host(pids[host], ["tc", "-batch", "-"], stdin="\n".join(lines) + "\n")
        namespaces.run_on_host(pids[host], ["ip", "link", "set", interface, "gso_max_segs", "1" if new.loss else "65535"])
    for host, interface in ends:
        namespaces.run_on_host(pids[host], ["nft", "-f", "-"], stdin=_loss_rules(interface, new.loss))
    words = [f"{new.rate / 1e6:g} Mbit/s (tbf)" if new.rate else "no limit of its rate"]
    if new.delay:
        words.append(f"{new.delay * 1e3:g} ms each way ({'netem' if netem else qdisc.RELAY_DESCRIPTION})")
    if new.loss:
        words.append(f"{new.loss:.3%} lost each way (nftables; segmentation offloads are off)")
    return ", ".join(words)


def restore_commands(spec: SandboxSpec, link: VethLink) -> list[str]:
    """Lines for `ip -batch` that give the upper end of a cable its place in the host above."""
    number = all_links(spec).index(link)
    return [line for line in _address_commands(spec, all_links(spec))[link.upper_host]
            if f" {link.upper_interface} " in f"{line} " or f"via {_uplink_addresses(number)[0]}" in line]


def _loss_rules(interface: str, loss: float) -> str:
    table = f"table netdev loss-{interface}"
    clear = f"{table} {{ }}\ndelete {table}\n"
    if not loss:
        return clear
    return (f"{clear}{table} {{\nchain lose {{ type filter hook ingress device \"{interface}\" priority 0;\n"
            f"ip saddr {_NODE_ADDRESSES} ip daddr {_NODE_ADDRESSES} numgen random mod 1000000 < {round(loss * 1e6)} drop\n}}\n}}\n")


# MERGED: The way between two leaf zones of a sandbox by itself: what else crosses their uplinks stays as it is.

#: what may stand between the names of two zones
_SEPARATORS = "|:"
#: the shape of a way that was not changed
UNSHAPED = LinkShape(0.0)


def find_inter_leaf(spec: SandboxSpec, name: str) -> tuple[str, str] | None:
    """The two zones of `zoneA|zoneB` or `zoneA:zoneB`, None for any name without a mark between.

    Raises
    ------
    UsageError : one of them is no leaf zone, or both are the same.
    """
    mark = next((each for each in _SEPARATORS if each in name), "")
    if not mark:
        return None
    leaves = [spec.topology.zones[leaf] for leaf in spec.leaf_indices()]
    one, _, other = name.partition(mark)
    for zone in (one, other):
        if zone not in leaves:
            raise UsageError(f"{name}: no leaf zone {zone!r} (leaf zones {', '.join(leaves[:8])})")
    if one == other:
        raise UsageError(f"{name}: two different zones expected")
    return one, other


def inter_leaf_label(ends: tuple[str, str]) -> str:
    """The name of a way, whichever of its zones is first."""
    return inter_leaf_name(*ends)


def set_inter_leaf_shape(spec: SandboxSpec, pids: Mapping[str, int],
                         ends: tuple[str, str], old: LinkShape, new: LinkShape) -> str:
    """Give a way another shape, each way, and return the means in words, as `fabric.change` does.

    `UNCHANGED` takes away all that it had for itself.
    """
    means = ""
    for here, there in (ends, ends[::-1]):
        cable, number = _detour_link(spec, here, there)
        address = f"02:00:00:00:00:{number:02x}"
        if old == UNSHAPED:
            _create_detour(pids[here], cable, number, address)
        means = set_link_shape(pids, cable, old, new, [f"link set {cable.upper_interface} address {address}"])
        if new == UNSHAPED:
            _remove_detour(pids[here], cable, number)
    return means


def _detour_link(spec: SandboxSpec, zone: str, other_zone: str) -> tuple[VethLink, int]:
    """The cable at a zone that leads to another one, and its number there: that of the other zone's subnet."""
    number = leaf_subnet(spec, spec.topology.zone_index[other_zone])
    return VethLink(zone, f"to{number}", zone, f"from{number}", 0.0), number


def _create_detour(pid: int, link: VethLink, number: int, address: str) -> None:
    # the ends have one address, so that what leaves the one is meant for the other without anybody asking
    to, end = link.lower_interface, link.upper_interface
    _ip_batch(pid, [f"link add name {to} address {address} mtu {MTU} type veth "
              f"peer name {end} address {address} mtu {MTU}",
              f"link set {to} arp off up", f"link set {end} up", f"route add default dev {to} table {number}",
              f"rule add iif br0 to 10.{number}.0.0/16 lookup {number}"])


def _remove_detour(pid: int, link: VethLink, number: int) -> None:
    _ip_batch(pid, [f"rule del iif br0 to 10.{number}.0.0/16 lookup {number}", f"link del {link.lower_interface}"])


def _ip_batch(pid: int, lines: list[str]) -> None:
    namespaces.run_on_host(pid, ["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
