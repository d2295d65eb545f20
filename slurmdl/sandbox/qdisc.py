"""The rate of a link: a token bucket (tc-tbf(8))."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurmdl.errors import SandboxError
from slurmdl.sandbox import delay_relay, namespaces

#: bytes of the longest packet: jumbo frames, as fabrics for HPC have; headers are then under 1 % of what is sent
MTU = 9000
#: a bucket holds what the rate brings in this time, its queue at most so much
_BURST_S, _QUEUE_S = 0.002, 0.2


def tbf_args(rate: float, single_segments: bool = False) -> str:
    """What tc is to put at an end of a link.

    Parameters
    ----------
    rate : bits/s.
    single : whether segments come one by one, as on a link with losses.
    """
    # A bucket smaller than one 64 KB super-packet would make the kernel cut it up, which costs CPU time only. Where
    # segments come one by one, two of them do: a sender that pauses after a loss finds the bucket full, and what a
    # large one lets through at once no real link would
    burst = max(2 * MTU + 100 if single_segments else 70_000, int(rate / 8 * _BURST_S))
    return f"tbf rate {rate:.0f}bit burst {burst} limit {max(4 * burst, int(rate / 8 * _QUEUE_S))}"


# MERGED: Delay on a link of a sandbox: netem (tc-netem(8)) where the kernel has it, else a relay in user space.

#: packets that netem holds back, more than any bandwidth-delay product here
_NETEM_LIMIT = 100_000
#: the other means, in words
RELAY_DESCRIPTION = "a relay in user space, as this kernel has no netem"


def has_netem(pid: int) -> bool:
    """Whether the kernel has netem; tried on the loopback of a host."""
    try:
        namespaces.run_on_host(pid, ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except SandboxError:
        return False
    namespaces.run_on_host(pid, ["tc", "qdisc", "del", "dev", "lo", "root"])
    return True


def netem_lines(interface: str, delay_s: float, tbf: str) -> list[str]:
    """Lines of a tc batch that delay what an interface sends, before the token bucket `bucket` ("" for none)."""
    lines = [f"qdisc replace dev {interface} root handle 1: netem delay {delay_s * 1e6:.0f}us limit {_NETEM_LIMIT}"]
    return [*lines, f"qdisc replace dev {interface} parent 1:1 {tbf}"] if tbf else lines


def insert_relay(pid: int, interface: str, mtu: int, delay_s: float, restore: Sequence[str]) -> None:
    """Put a relay behind an interface of a host: all that it sends and gets is held for `seconds`.

    The interface gets a new name, under which its shape goes on, and a pair of virtual interfaces takes its place:
    one end has its old name, the other is the relay's.

    Parameters
    ----------
    restore : lines for `ip -batch` that give the new interface what the old one had.
    """
    cable, inner = physical_name(interface), _relay_name(interface)
    lines = [f"link set {interface} nomaster", f"address flush dev {interface}", f"link set {interface} down",
             f"link set {interface} name {cable}",
             f"link add {interface} mtu {mtu} type veth peer name {inner} mtu {mtu}"]
    lines += [f"link set {name} up" for name in (cable, inner, interface)]
    namespaces.run_on_host(pid, ["ip", "-batch", "-"], stdin="\n".join([*lines, *restore]) + "\n")
    # the relay sees each frame before these rules, and the host itself must not see it there a second time
    rules = ("table netdev relay-{0} {{\n"
             "chain mute {{ type filter hook ingress device \"{0}\" priority 0; policy drop; }}\n}}\n")
    namespaces.run_on_host(pid, ["nft", "-f", "-"], stdin=rules.format(cable) + rules.format(inner))
    namespaces.run_on_host(pid, [sys.executable, "-IS", delay_relay.__file__, cable, inner, repr(delay_s)])


def remove_relay(pid: int, interface: str, restore: Sequence[str]) -> None:
    """Undo `insert`; the relay ends with its interface."""
    cable = physical_name(interface)
    lines = [f"link del {interface}", f"link set {cable} down", f"link set {cable} name {interface}",
             f"link set {interface} up"]
    namespaces.run_on_host(pid, ["nft", "-f", "-"], stdin="".join(
        f"table netdev relay-{name} {{ }}\ndelete table netdev relay-{name}\n"
        for name in (cable, _relay_name(interface))))
    namespaces.run_on_host(pid, ["ip", "-batch", "-"], stdin="\n".join([*lines, *restore]) + "\n")


def physical_name(interface: str) -> str:
    """Name of the interface at the cable once a relay stands behind it."""
    return f"wire-{interface}"


def _relay_name(interface: str) -> str:
    return f"held-{interface}"
