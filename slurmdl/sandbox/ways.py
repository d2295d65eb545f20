"""The way between two leaf zones of a sandbox by itself: what else crosses their uplinks stays as it is.

At each of the two zones, packets to the other one first take a cable of their own, both of whose ends are on the
zone's host, and from its far end the uplink. So such a way is shaped by the means by which all links are, and comes
on top of what the uplinks are like.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurmdl.errors import UsageError
from slurmdl.network.model import inter_leaf_name
from slurmdl.sandbox import fabric, hosts
from slurmdl.sandbox.bucket import MTU
from slurmdl.sandbox.fabric import LinkShape, VethLink
from slurmdl.sandbox.spec import SandboxSpec

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
        means = fabric.set_link_shape(pids, cable, old, new, [f"link set {cable.upper_interface} address {address}"])
        if new == UNSHAPED:
            _remove_detour(pids[here], cable, number)
    return means


def _detour_link(spec: SandboxSpec, zone: str, other_zone: str) -> tuple[VethLink, int]:
    """The cable at a zone that leads to another one, and its number there: that of the other zone's subnet."""
    number = fabric.leaf_subnet(spec, spec.topology.zone_index[other_zone])
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
    hosts.run_on_host(pid, ["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
