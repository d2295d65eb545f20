"""Queueing disciplines of a link: rate by a token bucket (tc-tbf(8)), delay by netem (tc-netem(8)) or by a relay in
user space if the kernel has no netem.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurmdl.errors import SandboxError
from slurmdl.sandbox import delay_relay, namespaces

MTU = 9000  # jumbo frames, as in HPC fabrics; headers are under 1 % of the traffic
_BURST_S, _QUEUE_S = 0.002, 0.2  # size of the bucket and of its queue at full rate
_NETEM_LIMIT = 100_000  # packets; more than any bandwidth-delay product here
RELAY_DESCRIPTION = "a relay in user space, as this kernel has no netem"


def tbf_args(rate: float, single_segments: bool = False) -> str:
    """Return the tc arguments of a token bucket for `rate` bits/s.

    `single_segments`: segments arrive one by one, as on a link with loss.
    """
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


def insert_relay(pid: int, interface: str, mtu: int, delay_s: float, restore: Sequence[str]) -> None:
    """Put a relay behind an interface of a host, which delays its traffic in both directions.

    The interface is renamed and keeps its shape. A veth pair replaces it: one end has the old name, the other is the
    relay's. `restore` are lines for `ip -batch` that restore the old interface's settings on the new one.
    """
    physical, inner = physical_name(interface), _relay_name(interface)
    lines = [f"link set {interface} nomaster", f"address flush dev {interface}", f"link set {interface} down",
             f"link set {interface} name {physical}",
             f"link add {interface} mtu {mtu} type veth peer name {inner} mtu {mtu}"]
    lines += [f"link set {name} up" for name in (physical, inner, interface)]
    namespaces.run_batch(pid, "ip", [*lines, *restore])
    # drop frames for the host after the relay captured them
    rules = ("table netdev relay-{0} {{\n"
             "chain mute {{ type filter hook ingress device \"{0}\" priority 0; policy drop; }}\n}}\n")
    namespaces.run_on_host(pid, ["nft", "-f", "-"], stdin=rules.format(physical) + rules.format(inner))
    namespaces.run_on_host(pid, [sys.executable, "-IS", delay_relay.__file__, physical, inner, repr(delay_s)])


def remove_relay(pid: int, interface: str, restore: Sequence[str]) -> None:
    """Undo `insert_relay`; the relay ends with its interface."""
    physical = physical_name(interface)
    lines = [f"link del {interface}", f"link set {physical} down", f"link set {physical} name {interface}",
             f"link set {interface} up"]
    namespaces.run_on_host(pid, ["nft", "-f", "-"], stdin="".join(
        f"table netdev relay-{name} {{ }}\ndelete table netdev relay-{name}\n"
        for name in (physical, _relay_name(interface))))
    namespaces.run_batch(pid, "ip", [*lines, *restore])


def physical_name(interface: str) -> str:
    """Name of the renamed interface in front of a relay."""
    return f"phys-{interface}"


def _relay_name(interface: str) -> str:
    return f"relay-{interface}"
