"""Measurements of the kernel that are the same for all frameworks: idle CPUs, and bytes sent over TCP.

Shared memory and transports that bypass the kernel, such as InfiniBand verbs, are not counted.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from slurmdl.train.meters import LOCALITY_LEVELS

CPU_BOUND_IDLE = 0.2  # idle share of the CPUs below which a measurement counts as CPU-bound
#: offset of tcpi_bytes_acked in tcp_info (linux/tcp.h): bytes that the peer has acknowledged, 64 bits
_ACKED = 120
_LOCAL = ("127.0.0.1", "::1")


class CpuIdleMeter:
    """Measures the idle share of all CPUs since its creation; proc(5), /proc/stat."""

    def __init__(self) -> None:
        self._idle, self._total = _read_ticks()

    def idle_share(self) -> float:
        """Return the idle share of the CPU time so far; 1 before the first tick."""
        idle, total = _read_ticks()
        return (idle - self._idle) / (total - self._total) if total > self._total else 1.0


def _read_ticks() -> tuple[float, float]:
    """Return the idle and the total CPU time in ticks."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [float(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


class TcpBytesSent:
    """Counts the bytes that this process sends over TCP from now on, by peer; `local_addresses` are its own."""

    def __init__(self) -> None:
        self.local_addresses: set[str] = set()
        self._before = self._now()

    def bytes(self) -> dict[str, int]:
        """Return peer -> bytes, of the connections that are open now."""
        sent: Counter[str] = Counter()
        for (inode, peer), count in self._now().items():
            sent[peer] += count - self._before.get((inode, peer), 0)
        return dict(+sent)

    def _now(self) -> dict[tuple[int, str], int]:
        """Return (inode of the socket, peer) -> bytes."""
        acknowledged = {}
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError), _duplicate(int(number)) as (sock, inode):  # not a TCP socket
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= _ACKED + 8:
                    acknowledged[inode, _host(sock.getpeername())] = struct.unpack_from("=Q", info, _ACKED)[0]
                    self.local_addresses.add(_host(sock.getsockname()))
        return acknowledged


def _host(address: Any) -> str:
    """Return the address; IPv4 addresses of IPv6 sockets in IPv4 notation."""
    return str(address[0]).removeprefix("::ffff:")


@contextmanager
def _duplicate(number: int) -> Iterator[tuple[socket.socket, int]]:
    """Yield a duplicate socket of a file descriptor, and its inode; OSError if it is not a socket."""
    status = os.stat(number)
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(f"descriptor {number} is not a socket")  # socket() would leave its duplicate open
    with socket.socket(fileno=os.dup(number)) as sock:
        yield sock, status.st_ino


def bytes_by_locality(ranks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Sum the bytes of all ranks by locality, as p2p.LOCALITY_LEVELS.

    Each of `ranks` has "node", "zone" ("" if unknown), and "local_addresses" and "sent" of its `TcpBytesSent`.
    """
    home = {address: rank for rank in ranks for address in rank["local_addresses"] if address not in _LOCAL}
    by_level = dict.fromkeys(LOCALITY_LEVELS, 0)
    for rank in ranks:
        for peer, count in rank["sent"].items():
            other = rank if peer in _LOCAL else home.get(peer)
            if other and other["node"] == rank["node"]:
                level = "intra_node"
            else:
                level = "intra_zone" if other and other["zone"] == rank["zone"] else "inter_zone"
            by_level[level] += count
    return by_level
