"""Links of a sandbox: each zone is a host that switches or routes, each link is shaped.

A leaf zone is a bridge with its nodes; its uplink leads to the host of the parent zone, which routes, and so on up to
the login host, which joins the root zones. Traffic between zones thus crosses their uplinks, and each end of a link
has a token bucket (tc-tbf(8)) on outgoing packets.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmdl.errors import SandboxError, UsageError
from slurmdl.sandbox import delay_relay, namespaces
from slurmdl.sandbox.spec import LOGIN, SandboxSpec, host_addresses, leaf_subnet
from slurmdl.text import sample_names


@dataclass(frozen=True)
class VethLink:
    """One veth pair: the lower and upper host with their interfaces, bits/s (0 = unshaped)."""

    lower_host: str
    lower_interface: str
    upper_host: str
    upper_interface: str
    rate: float


@dataclass(frozen=True)
class LinkShape:
    """Shape of a link in each direction: bits/s (0: unshaped), delay in seconds, fraction of lost packets."""

    rate: float
    delay: float = 0.0
    loss: float = 0.0


MTU = 9000  # jumbo frames, as in HPC fabrics; headers are under 1 % of the traffic
#: of each bridge: by default it is the lowest one of its ports, so it changes when a node dies, and the other nodes
#: lose their gateway until their ARP entries expire
_BRIDGE_MAC = "02:00:00:00:00:01"
_BURST_S, _QUEUE_S = 0.002, 0.2  # size of the bucket and of its queue at full rate
_NETEM_LIMIT = 100_000  # packets; more than any bandwidth-delay product here
RELAY_DESCRIPTION = "a relay in user space, as this kernel has no netem"
#: counters and losses apply to packets between nodes only, not to those of the controller
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


def all_links(spec: SandboxSpec) -> list[VethLink]:
    """Return all links, node links first. The upper interfaces of a host are named d0, d1, ... in this order."""
    topology, links = spec.topology, list[VethLink]()
    counts: Counter[str] = Counter()

    def add(lower: str, interface: str, upper: str, rate: float) -> None:
        links.append(VethLink(lower, interface, upper, f"d{counts[upper]}", rate))
        counts[upper] += 1

    for name, leaf in zip(topology.nodes, topology.leaf, strict=True):
        add(name, "eth0", topology.zones[leaf], spec.node_rate)
    for name, parent in zip(topology.zones, topology.parent, strict=True):
        upper, rate = (topology.zones[parent], spec.zone_rate) if parent >= 0 else (LOGIN, 0.0)
        add(name, "uplink", upper, rate)
    return links


def create_links(spec: SandboxSpec, pids: dict[str, int]) -> None:
    """Create all links, addresses, routes, shapes and counters; `pids` as from `start_hosts`."""
    if spec.cloud_nodes:
        namespaces.run_batch(pids[LOGIN], "ip", [f"address add {host_addresses(spec)[LOGIN]}/32 dev lo"])
        return
    links = all_links(spec)
    batch = "".join(
        f"link add {link.lower_interface} mtu {MTU} netns {pids[link.lower_host]} type veth "
        f"peer name {link.upper_interface} mtu {MTU} netns {pids[link.upper_host]}\n" for link in links)
    result = subprocess.run(["ip", "-batch", "-"], input=batch, text=True, capture_output=True, check=False)
    if result.returncode:
        raise SandboxError(f"ip link: {' '.join(result.stderr.split())[:300]}")
    shapes: dict[str, list[str]] = {}
    for link in links:
        if link.rate:
            for host, interface in _ends(link):
                shapes.setdefault(host, []).append(f"qdisc add dev {interface} root {tbf_args(link.rate)}")
    for host, lines in _address_commands(spec, links).items():
        script = _here_document("ip -batch -", lines)
        if host == LOGIN or host in spec.topology.zones:
            script += "echo 1 >/proc/sys/net/ipv4/ip_forward\n"
        if host in shapes:
            script += _here_document("tc -batch -", shapes[host])
        if host in spec.topology.zones:
            script += _here_document("nft -f -", [_COUNTER_RULES])
        namespaces.run_on_host(pids[host], ["sh", "-e"], stdin=script)


def _here_document(command: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{command} <<'END'", *lines, "END\n"])


def _ends(link: VethLink) -> tuple[tuple[str, str], tuple[str, str]]:
    return (link.lower_host, link.lower_interface), (link.upper_host, link.upper_interface)


def _address_commands(spec: SandboxSpec, links: list[VethLink]) -> dict[str, list[str]]:
    topology, address = spec.topology, host_addresses(spec)
    batch: dict[str, list[str]] = {LOGIN: [f"address add {address[LOGIN]}/32 dev lo"]}
    for leaf in spec.leaf_indices():
        batch[topology.zones[leaf]] = [f"link add br0 address {_BRIDGE_MAC} type bridge",
                                       f"link set br0 mtu {MTU} up",
                                       f"address add 10.{leaf_subnet(spec, leaf)}.255.254/16 dev br0"]
    leaves_below: dict[str, list[int]] = {}
    for leaf in spec.leaf_indices():
        for zone in topology.zone_path(leaf):
            leaves_below.setdefault(zone, []).append(leaf)
    for number, link in enumerate(links):
        lower, upper = batch.setdefault(link.lower_host, []), batch.setdefault(link.upper_host, [])
        lower.append(f"link set {link.lower_interface} up")
        upper.append(f"link set {link.upper_interface} up")
        if link.lower_host in address:
            gateway = leaf_subnet(spec, int(topology.leaf[topology.node_index[link.lower_host]]))
            upper.append(f"link set {link.upper_interface} master br0")
            lower += [f"address add {address[link.lower_host]}/16 dev {link.lower_interface}",
                      f"route add default via 10.{gateway}.255.254"]
        else:
            ends = _uplink_addresses(number)
            lower += [f"address add {ends[0]}/30 dev {link.lower_interface}", f"route add default via {ends[1]}"]
            upper.append(f"address add {ends[1]}/30 dev {link.upper_interface}")
            upper += [f"route add 10.{leaf_subnet(spec, leaf)}.0.0/16 via {ends[0]}"
                      for leaf in leaves_below.get(link.lower_host, [])]
    return batch


def _uplink_addresses(number: int) -> tuple[str, str]:
    """Return the addresses of the lower and upper end of a link between zones."""
    network = f"172.{16 + number // 8192}.{number // 32 % 256}"
    return f"{network}.{number % 32 * 8 + 1}", f"{network}.{number % 32 * 8 + 2}"


def zone_byte_counters(pids: dict[str, int], zones: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Return the bytes that nodes sent out of and into each zone: zone -> {"out": bytes, "in": bytes}."""
    counters: dict[str, dict[str, int]] = {}
    for zone in zones:
        rows = json.loads(namespaces.run_on_host(pids[zone], ["nft", "-j", "list", "counters"]))["nftables"]
        counters[zone] = {row["counter"]["name"]: int(row["counter"]["bytes"]) for row in rows if "counter" in row}
    return counters


def find_link(spec: SandboxSpec, name: str) -> VethLink:
    """Return the link of a node, or the uplink of a zone; UsageError for any other name."""
    link = next((link for link in all_links(spec) if link.lower_host == name), None)
    if link is None:
        raise UsageError(f"no node or zone {name!r}; nodes: {sample_names(spec.topology.nodes)}; "
                         f"zones: {sample_names(spec.topology.zones)}")
    return link


def set_link_shape(spec: SandboxSpec, pids: Mapping[str, int], link: VethLink, old: LinkShape, new: LinkShape) -> str:
    """Reshape a link and return a description of the mechanisms.

    Packets between nodes are dropped at the receiver, after 64 KB segments were split into frames, as on a real link;
    packets of the controller are not dropped.
    """
    upper, netem = link.upper_interface, False
    if new.delay or old.delay:
        netem = has_netem(pids[link.upper_host])
        if not netem and old.delay != new.delay:
            restore = _restore_commands(spec, link)
            if old.delay:
                remove_relay(pids[link.upper_host], upper, restore)
            if new.delay:
                insert_relay(pids[link.upper_host], upper, new.delay, restore)
    physical = _relay_names(upper)[0] if new.delay and not netem else upper
    for host, interface in ((link.lower_host, link.lower_interface), (link.upper_host, physical)):
        bucket = tbf_args(new.rate, single_segments=bool(new.loss)) if new.rate else ""
        lines = netem_lines(interface, new.delay, bucket) if new.delay and netem else \
            [f"qdisc replace dev {interface} root {bucket or 'noqueue'}"]
        if new.loss:  # the bucket shrinks: a 64 KB segment that is queued would never fit, and block the link
            lines.insert(0, f"qdisc replace dev {interface} root noqueue")  # drops what is queued
        namespaces.run_batch(pids[host], "tc", lines)
        namespaces.run_batch(pids[host], "ip", [f"link set {interface} gso_max_segs {1 if new.loss else 65535}"])
    for host, interface in _ends(link):
        namespaces.run_on_host(pids[host], ["nft", "-f", "-"], stdin=_loss_rules(interface, new.loss))
    parts = [f"{new.rate / 1e6:g} Mbit/s (tbf)" if new.rate else "no rate limit"]
    if new.delay:
        parts.append(f"{new.delay * 1e3:g} ms each way ({'netem' if netem else RELAY_DESCRIPTION})")
    if new.loss:
        parts.append(f"{new.loss:.3%} lost each way (nftables; segmentation offloads are off)")
    return ", ".join(parts)


def _restore_commands(spec: SandboxSpec, link: VethLink) -> list[str]:
    """Return lines for `ip -batch` that restore the settings of a link's upper end."""
    links = all_links(spec)
    lower_address = _uplink_addresses(links.index(link))[0]
    return [line for line in _address_commands(spec, links)[link.upper_host]
            if f" {link.upper_interface} " in f"{line} " or f"via {lower_address}" in line]


def _loss_rules(interface: str, loss: float) -> str:
    table = f"table netdev loss-{interface}"
    clear = f"{table} {{ }}\ndelete {table}\n"
    if not loss:
        return clear
    return (f"{clear}{table} {{\nchain lose {{ type filter hook ingress device \"{interface}\" priority 0;\n"
            f"ip saddr {_NODE_ADDRESSES} ip daddr {_NODE_ADDRESSES} "
            f"numgen random mod 1000000 < {round(loss * 1e6)} drop\n}}\n}}\n")


def tbf_args(rate: float, single_segments: bool = False) -> str:
    """Return the tc arguments of a token bucket for `rate` bits/s; `single_segments` as on a link with loss."""
    # With a bucket smaller than a 64 KB super-packet the kernel segments it, which costs CPU time. Single segments
    # need a small bucket: after a pause due to loss, a full large one would pass an unrealistic burst.
    burst = max(2 * MTU + 100 if single_segments else 70_000, int(rate / 8 * _BURST_S))
    return f"tbf rate {rate:.0f}bit burst {burst} limit {max(4 * burst, int(rate / 8 * _QUEUE_S))}"


def has_netem(pid: int) -> bool:
    """Whether the kernel has netem; tested on the loopback interface of a host."""
    try:
        namespaces.run_on_host(pid, ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except SandboxError:
        return False
    namespaces.run_on_host(pid, ["tc", "qdisc", "del", "dev", "lo", "root"])
    return True


def netem_lines(interface: str, delay_s: float, tbf: str) -> list[str]:
    """Return tc batch lines that delay outgoing packets before the token bucket `tbf` ("" for none)."""
    lines = [f"qdisc replace dev {interface} root handle 1: netem delay {delay_s * 1e6:.0f}us limit {_NETEM_LIMIT}"]
    return [*lines, f"qdisc replace dev {interface} parent 1:1 {tbf}"] if tbf else lines


def _relay_names(interface: str) -> tuple[str, str]:
    """Return the names of the renamed interface in front of a relay, and of the relay's end behind it."""
    return f"phys-{interface}", f"relay-{interface}"


def insert_relay(pid: int, interface: str, delay_s: float, restore: Sequence[str]) -> None:
    """Put a relay behind an interface of a host, which delays its traffic in both directions.

    The interface is renamed and keeps its shape. A veth pair replaces it: one end has the old name, the other is the
    relay's. `restore` are lines for `ip -batch` that restore the old interface's settings on the new one.
    """
    physical, inner = _relay_names(interface)
    lines = [f"link set {interface} nomaster", f"address flush dev {interface}", f"link set {interface} down",
             f"link set {interface} name {physical}",
             f"link add {interface} mtu {MTU} type veth peer name {inner} mtu {MTU}"]
    lines += [f"link set {name} up" for name in (physical, inner, interface)]
    namespaces.run_batch(pid, "ip", [*lines, *restore])
    # drop frames for the host after the relay captured them
    rules = ("table netdev relay-{0} {{\n"
             "chain mute {{ type filter hook ingress device \"{0}\" priority 0; policy drop; }}\n}}\n")
    namespaces.run_on_host(pid, ["nft", "-f", "-"], stdin=rules.format(physical) + rules.format(inner))
    namespaces.run_on_host(pid, [sys.executable, "-IS", delay_relay.__file__, physical, inner, repr(delay_s)])


def remove_relay(pid: int, interface: str, restore: Sequence[str]) -> None:
    """Undo `insert_relay`; the relay ends with its interface."""
    names = physical, _ = _relay_names(interface)
    lines = [f"link del {interface}", f"link set {physical} down", f"link set {physical} name {interface}",
             f"link set {interface} up"]
    namespaces.run_on_host(pid, ["nft", "-f", "-"], stdin="".join(
        f"table netdev relay-{name} {{ }}\ndelete table netdev relay-{name}\n" for name in names))
    namespaces.run_batch(pid, "ip", [*lines, *restore])
