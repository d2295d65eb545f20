"""What the kernel has counted of this node's links, busy or not: interfaces, TCP's retransmissions, RDMA ports.

Two readings make a sample: what was retransmitted between them, of what was sent, is the loss on the ways that the
node's traffic took (DSACKs, RFC 2883, tell which retransmissions were needless), and an RDMA port counts what it lost
itself. Nothing here measures throughput: the speed at which an interface of real hardware runs is what the link can
carry at most, and is worth knowing where it came up slower than it should.

Read every minute on every node, so only the standard library is imported, and little of it.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from slurmdl.errors import InputError
from slurmdl.links.samples import LinkSample

#: segments (packets of an RDMA port) that must have been sent before the share that got lost says anything
MIN_SEGMENTS = 1000
#: seconds after which fewer are no longer added up
MAX_INTERVAL_S = 3600.0
#: bytes/s per Mbit/s, and per Gbit/s
_BYTES_PER_MEGABIT, _BYTES_PER_GIGABIT = 125_000.0, 125_000_000.0


class RdmaPort(NamedTuple):
    """An RDMA port: packets in and out, those lost, and bytes/s of its link (0 where not known)."""

    packets: int
    packets_lost: int
    bandwidth: float


class CounterReading(NamedTuple):
    """What was counted up to one moment.

    Attributes
    ----------
    boot : names the run of the kernel, whose counters began at 0.
    time : seconds since it began, by a clock that nobody sets.
    sent, again, needless : TCP segments sent, sent again, and sent again though they had arrived.
    speed : bytes/s of the fastest interface of real hardware that is up, 0 for none that tells.
    ports : RDMA ports that are up.
    """

    boot_id: str
    uptime_s: float
    segments_sent: int
    segments_retransmitted: int
    spurious_retransmits: int
    bandwidth: float
    rdma_ports: dict[str, RdmaPort]

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "ports": {name: list(port) for name, port in self.rdma_ports.items()}}

    @classmethod
    def from_json(cls, data: Any) -> CounterReading:
        """The inverse of `to_json`; InputError where it does not fit."""
        try:
            ports = {str(name): RdmaPort(int(port[0]), int(port[1]), float(port[2]))
                     for name, port in data["ports"].items()}
            return cls(str(data["boot"]), float(data["time"]), int(data["sent"]), int(data["again"]),
                       int(data["needless"]), float(data["speed"]), ports)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(f"reading of counters: malformed ({error})") from error


def read_counters(root: str = "/", interface: str = "") -> CounterReading:
    """The counters now.

    Parameters
    ----------
    root : where /sys and /proc are.
    interface : the one whose speed counts, "" for the fastest.

    Raises
    ------
    InputError : the kernel does not tell what TCP has sent.
    """
    tcp = _read_proc_table(os.path.join(root, "proc/net/snmp")).get("Tcp", {})
    extended = _read_proc_table(os.path.join(root, "proc/net/netstat")).get("TcpExt", {})
    if "OutSegs" not in tcp or "RetransSegs" not in tcp:
        raise InputError("no OutSegs and RetransSegs of Tcp in it", file=os.path.join(root, "proc/net/snmp"))
    uptime = _read_text(os.path.join(root, "proc/uptime")).split()
    return CounterReading(_read_text(os.path.join(root, "proc/sys/kernel/random/boot_id")), float(uptime[0]) if uptime else 0.0,
                   tcp["OutSegs"], tcp["RetransSegs"], extended.get("TCPDSACKRecv", 0),
                   _interface_bandwidth(os.path.join(root, "sys/class/net"), interface),
                   _read_rdma_ports(os.path.join(root, "sys/class/infiniband")))


def sample_from_counters(previous: CounterReading | None, current: CounterReading,
                         node: str, timestamp: float) -> LinkSample | None:
    """What two readings say of a node's link; None where they say nothing.

    Counters that went backwards (another boot, a driver that was loaded anew, a wrap) say nothing. Where the node
    has RDMA ports, they count and TCP does not, whose way is another one.

    Parameters
    ----------
    before : None where there was no earlier reading.
    time : seconds since the epoch.
    """
    same = previous is not None and previous.boot_id == current.boot_id and previous.uptime_s <= current.uptime_s
    if current.rdma_ports:
        speed = max(port.bandwidth for port in current.rdma_ports.values())
        old = previous.rdma_ports if previous is not None and same else {}
        both = [(old[name], port) for name, port in current.rdma_ports.items() if name in old]
        loss = _loss_ratio(sum(port.packets_lost - was.packets_lost for was, port in both),
                      sum(port.packets - was.packets for was, port in both)) \
            if all(port.packets_lost >= was.packets_lost and port.packets >= was.packets for was, port in both) else None
    else:
        speed, loss = current.bandwidth, None
        if previous is not None and same:
            sent, again = current.segments_sent - previous.segments_sent, current.segments_retransmitted - previous.segments_retransmitted
            needless = current.spurious_retransmits - previous.spurious_retransmits
            loss = _loss_ratio(again - min(again, needless), sent) if min(sent, again, needless) >= 0 else None
    if loss is None and not speed:
        return None
    return LinkSample("node", node, timestamp, "counters", speed or None, loss=loss, rdma=bool(current.rdma_ports))


def should_replace(previous: CounterReading | None, current: CounterReading) -> bool:
    """Whether the new reading takes the place of the old one, from which too little was sent until now to tell."""
    if previous is None or previous.boot_id != current.boot_id or not 0 <= current.uptime_s - previous.uptime_s <= MAX_INTERVAL_S:
        return True
    if current.rdma_ports:
        sent = sum(port.packets for port in current.rdma_ports.values()) - \
                   sum(port.packets for port in previous.rdma_ports.values())
    else:
        sent = current.segments_sent - previous.segments_sent
    return not 0 <= sent < MIN_SEGMENTS


def load_reading(path: str) -> CounterReading | None:
    """The reading in a file; None where there is none, or none that can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return CounterReading.from_json(json.load(file))
    except (OSError, ValueError, RecursionError, InputError):
        return None


def _loss_ratio(lost: int, sent: int) -> float | None:
    return min(1.0, max(0, lost) / sent) if sent >= MIN_SEGMENTS else None


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:  # a link that is down has no speed to read (EINVAL)
        return ""


def _read_int(path: str) -> int:
    text = _read_text(path)
    return int(text) if text.lstrip("-").isdigit() else 0


def _read_proc_table(path: str) -> dict[str, dict[str, int]]:
    """/proc/net/snmp and netstat: of each protocol a line of names, then one of numbers."""
    found: dict[str, dict[str, int]] = {}
    lines = _read_text(path).splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        protocol, *keys = names.split()
        numbers = values.split()
        if numbers[:1] == [protocol]:
            found[protocol.rstrip(":")] = {key: int(value) for key, value in zip(keys, numbers[1:], strict=False)
                                           if value.lstrip("-").isdigit()}
    return found


def _list_dir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _interface_bandwidth(folder: str, interface: str) -> float:
    """Of interfaces with a device behind them: bridges, bonds and virtual pairs tell a speed that is made up."""
    speeds = [0]
    for name in [interface] if interface else _list_dir(folder):
        if os.path.exists(os.path.join(folder, name, "device")):
            speeds.append(_read_int(os.path.join(folder, name, "speed")))
    return max(speeds) * _BYTES_PER_MEGABIT


def _read_rdma_ports(folder: str) -> dict[str, RdmaPort]:
    found = {}
    for device in _list_dir(folder):
        for number in _list_dir(os.path.join(folder, device, "ports")):
            port = os.path.join(folder, device, "ports", number)
            if "ACTIVE" not in _read_text(os.path.join(port, "state")):
                continue
            counters = os.path.join(port, "counters")

            def total(*names: str, where: str = counters) -> int:
                return sum(_read_int(os.path.join(where, name)) for name in names)

            rate = _read_text(os.path.join(port, "rate")).split()  # such as: 100 Gb/sec (4X EDR)
            speed = float(rate[0]) * _BYTES_PER_GIGABIT if rate and rate[0].replace(".", "", 1).isdigit() else 0.0
            found[f"{device}/{number}"] = RdmaPort(total("port_rcv_packets", "port_xmit_packets"),
                                               total("port_rcv_errors", "port_xmit_discards"), speed)
    return found
