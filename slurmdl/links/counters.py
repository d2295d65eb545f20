"""Kernel counters of this node's links: interface speeds, TCP retransmissions, RDMA ports.

Two readings give a sample. Its loss is the fraction of segments retransmitted in between, less the spurious ones
(DSACKs, RFC 2883), or the fraction that the RDMA ports report as lost. Throughput is not measured: the speed of a
physical interface is an upper bound, which reveals links that came up too slow.

Runs every minute on every node, so it imports only a few modules of the standard library.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from slurmdl.errors import InputError
from slurmdl.links.samples import LinkSample

MIN_SEGMENTS = 1000  # segments (packets of RDMA ports) below which a loss fraction is meaningless
#: seconds after which a reading is replaced even if fewer segments were sent
MAX_INTERVAL_S = 3600.0
_BYTES_PER_MEGABIT, _BYTES_PER_GIGABIT = 125_000.0, 125_000_000.0


class RdmaPort(NamedTuple):
    """Counters of an RDMA port: packets sent and received, packets lost, bytes/s of its link (0 if unknown)."""

    packets: int
    packets_lost: int
    bandwidth: float


class CounterReading(NamedTuple):
    """All counters at one time.

    Attributes:
        boot_id: of the running kernel; counters start at 0 at boot.
        uptime_s: seconds since boot, monotonic.
        segments_sent, segments_retransmitted, spurious_retransmits: TCP segments.
        bandwidth: bytes/s of the fastest physical interface that is up, 0 if unknown.
        rdma_ports: active RDMA ports by name.
    """

    boot_id: str
    uptime_s: float
    segments_sent: int
    segments_retransmitted: int
    spurious_retransmits: int
    bandwidth: float
    rdma_ports: dict[str, RdmaPort]

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "rdma_ports": {name: list(port) for name, port in self.rdma_ports.items()}}


def read_counters(root: str = "/", interface: str = "") -> CounterReading:
    """Read the current counters and the speed of `interface` ("": the fastest); InputError without TCP counters."""
    tcp = _read_proc_table(os.path.join(root, "proc/net/snmp")).get("Tcp", {})
    extended = _read_proc_table(os.path.join(root, "proc/net/netstat")).get("TcpExt", {})
    if "OutSegs" not in tcp or "RetransSegs" not in tcp:
        raise InputError("OutSegs or RetransSegs of Tcp is missing", file=os.path.join(root, "proc/net/snmp"))
    uptime = _read_text(os.path.join(root, "proc/uptime")).split()
    return CounterReading(_read_text(os.path.join(root, "proc/sys/kernel/random/boot_id")),
                          float(uptime[0]) if uptime else 0.0, tcp["OutSegs"], tcp["RetransSegs"],
                          extended.get("TCPDSACKRecv", 0),
                          _interface_bandwidth(os.path.join(root, "sys/class/net"), interface),
                          _read_rdma_ports(os.path.join(root, "sys/class/infiniband")))


def sample_from_counters(previous: CounterReading | None, current: CounterReading,
                         node: str, timestamp: float) -> LinkSample | None:
    """Sample of a node's link from two readings; None if neither loss nor bandwidth is known.

    Counters that decrease (reboot, reloaded driver, wrap) give no loss. If the node has RDMA ports, TCP counters are
    ignored: TCP uses another path. `previous` is None for the first reading; `timestamp` is in s since the epoch.
    """
    if previous is not None and (previous.boot_id != current.boot_id or previous.uptime_s > current.uptime_s):
        previous = None
    loss: float | None = None
    if current.rdma_ports:
        bandwidth = max(port.bandwidth for port in current.rdma_ports.values())
        old_ports = previous.rdma_ports if previous is not None else {}
        pairs = [(old_ports[name], port) for name, port in current.rdma_ports.items() if name in old_ports]
        if all(port.packets_lost >= old.packets_lost and port.packets >= old.packets for old, port in pairs):
            loss = _loss_ratio(sum(port.packets_lost - old.packets_lost for old, port in pairs),
                               sum(port.packets - old.packets for old, port in pairs))
    else:
        bandwidth = current.bandwidth
        if previous is not None:
            sent = current.segments_sent - previous.segments_sent
            retransmitted = current.segments_retransmitted - previous.segments_retransmitted
            spurious = current.spurious_retransmits - previous.spurious_retransmits
            if min(sent, retransmitted, spurious) >= 0:
                loss = _loss_ratio(retransmitted - min(retransmitted, spurious), sent)
    if loss is None and not bandwidth:
        return None
    return LinkSample("node", node, timestamp, "counters", bandwidth or None, loss=loss,
                      rdma=bool(current.rdma_ports))


def should_replace(previous: CounterReading | None, current: CounterReading) -> bool:
    """Whether the current reading replaces the previous one as the base; not if too few segments were sent since."""
    if previous is None or previous.boot_id != current.boot_id \
            or not 0 <= current.uptime_s - previous.uptime_s <= MAX_INTERVAL_S:
        return True
    if current.rdma_ports:
        old, new = (sum(port.packets for port in reading.rdma_ports.values()) for reading in (previous, current))
    else:
        old, new = previous.segments_sent, current.segments_sent
    return not 0 <= new - old < MIN_SEGMENTS


def load_reading(path: str) -> CounterReading | None:
    """Reading of a file with `CounterReading.to_json`; None if the file is missing or not valid."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        ports = {name: RdmaPort(int(port[0]), int(port[1]), float(port[2]))
                 for name, port in data["rdma_ports"].items()}
        return CounterReading(str(data["boot_id"]), float(data["uptime_s"]), int(data["segments_sent"]),
                              int(data["segments_retransmitted"]), int(data["spurious_retransmits"]),
                              float(data["bandwidth"]), ports)
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None


def _loss_ratio(lost: int, sent: int) -> float | None:
    return min(1.0, max(0, lost) / sent) if sent >= MIN_SEGMENTS else None


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:  # EINVAL for the speed of a link that is down
        return ""


def _read_int(path: str) -> int:
    text = _read_text(path)
    return int(text) if text.lstrip("-").isdigit() else 0


def _read_proc_table(path: str) -> dict[str, dict[str, int]]:
    """Parse /proc/net/snmp or netstat: for each protocol a line of names, then a line of numbers."""
    table: dict[str, dict[str, int]] = {}
    lines = _read_text(path).splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        protocol, *keys = names.split()
        numbers = values.split()
        if numbers[:1] == [protocol]:
            table[protocol.rstrip(":")] = {key: int(value) for key, value in zip(keys, numbers[1:], strict=False)
                                           if value.lstrip("-").isdigit()}
    return table


def _list_dir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _interface_bandwidth(class_dir: str, interface: str) -> float:
    """Bytes/s of the fastest interface with a device; bridges, bonds and veth report arbitrary speeds."""
    speeds = [0]
    for name in [interface] if interface else _list_dir(class_dir):
        if os.path.exists(os.path.join(class_dir, name, "device")):
            speeds.append(_read_int(os.path.join(class_dir, name, "speed")))
    return max(speeds) * _BYTES_PER_MEGABIT


def _read_rdma_ports(class_dir: str) -> dict[str, RdmaPort]:
    ports = {}
    for device in _list_dir(class_dir):
        for number in _list_dir(os.path.join(class_dir, device, "ports")):
            port_dir = os.path.join(class_dir, device, "ports", number)
            if "ACTIVE" not in _read_text(os.path.join(port_dir, "state")):
                continue
            count = {name: _read_int(os.path.join(port_dir, "counters", name)) for name in (
                "port_rcv_packets", "port_xmit_packets", "port_rcv_errors", "port_xmit_discards")}
            rate = _read_text(os.path.join(port_dir, "rate")).split()  # such as "100 Gb/sec (4X EDR)"
            is_number = bool(rate) and rate[0].replace(".", "", 1).isdigit()
            ports[f"{device}/{number}"] = RdmaPort(
                count["port_rcv_packets"] + count["port_xmit_packets"],
                count["port_rcv_errors"] + count["port_xmit_discards"],
                float(rate[0]) * _BYTES_PER_GIGABIT if is_number else 0.0)
    return ports
