"""The way between two leaf zones of a sandbox by itself: what else crosses their uplinks stays as it is.

At each of the two zones, packets to the other one first take a cable of their own, both of whose ends are on the
zone's host, and from its far end the uplink. So such a way is shaped by the means by which all links are, and comes
on top of what the uplinks are like.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurmdl.errors import UsageError
from slurmdl.network.model import trunk
from slurmdl.sandbox import fabric, hosts
from slurmdl.sandbox.bucket import MTU
from slurmdl.sandbox.fabric import Link, Shape
from slurmdl.sandbox.spec import Spec

#: what may stand between the names of two zones
_BETWEEN = "|:"
#: the shape of a way that was not changed
UNCHANGED = Shape(0.0)


def find(spec: Spec, name: str) -> tuple[str, str] | None:
    """The two zones of `zoneA|zoneB` or `zoneA:zoneB`, None for any name without a mark between.

    Raises
    ------
    UsageError : one of them is no leaf zone, or both are the same.
    """
    mark = next((each for each in _BETWEEN if each in name), "")
    if not mark:
        return None
    leaves = [spec.topology.zones[leaf] for leaf in spec.leaves()]
    one, _, other = name.partition(mark)
    for zone in (one, other):
        if zone not in leaves:
            raise UsageError(f"{name}: no leaf zone {zone!r} (leaf zones {', '.join(leaves[:8])})")
    if one == other:
        raise UsageError(f"{name}: two different zones expected")
    return one, other


def label(ends: tuple[str, str]) -> str:
    """The name of a way, whichever of its zones is first."""
    return trunk(*ends)


def change(spec: Spec, pids: Mapping[str, int], ends: tuple[str, str], old: Shape, new: Shape) -> str:
    """Give a way another shape, each way, and return the means in words, as `fabric.change` does.

    `UNCHANGED` takes away all that it had for itself.
    """
    means = ""
    for here, there in (ends, ends[::-1]):
        cable, number = _cable(spec, here, there)
        address = f"02:00:00:00:00:{number:02x}"
        if old == UNCHANGED:
            _lay(pids[here], cable, number, address)
        means = fabric.change(pids, cable, old, new, [f"link set {cable.above_if} address {address}"])
        if new == UNCHANGED:
            _take(pids[here], cable, number)
    return means


def _cable(spec: Spec, here: str, there: str) -> tuple[Link, int]:
    """The cable at a zone that leads to another one, and its number there: that of the other zone's subnet."""
    number = fabric.subnet(spec, spec.topology.zone_index[there])
    return Link(here, f"to{number}", here, f"from{number}", 0.0), number


def _lay(pid: int, cable: Link, number: int, address: str) -> None:
    # the ends have one address, so that what leaves the one is meant for the other without anybody asking
    to, end = cable.below_if, cable.above_if
    _ip(pid, [f"link add name {to} address {address} mtu {MTU} type veth "
              f"peer name {end} address {address} mtu {MTU}",
              f"link set {to} arp off up", f"link set {end} up", f"route add default dev {to} table {number}",
              f"rule add iif br0 to 10.{number}.0.0/16 lookup {number}"])


def _take(pid: int, cable: Link, number: int) -> None:
    _ip(pid, [f"rule del iif br0 to 10.{number}.0.0/16 lookup {number}", f"link del {cable.below_if}"])


def _ip(pid: int, lines: list[str]) -> None:
    hosts.run(pid, ["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
