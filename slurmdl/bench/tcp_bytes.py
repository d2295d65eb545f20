"""Bytes that a process sends over TCP, by peer: one measure for all frameworks.

Shared memory and transports that bypass the kernel, such as InfiniBand verbs, are not counted.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

#: offset of tcpi_bytes_acked in tcp_info (linux/tcp.h): bytes that the peer has acknowledged, 64 bits
_ACKED = 120
#: loopback addresses
_LOCAL = ("127.0.0.1", "::1")


class TcpBytesSent:
    """Counts the bytes that this process sends over TCP from now on, by address of the peer.

    Attributes
    ----------
    local_addresses : local addresses of these connections.
    """

    def __init__(self) -> None:
        self.local_addresses: set[str] = set()
        self._before = self._now()

    def bytes(self) -> dict[str, int]:
        """Return peer -> bytes, of the connections that are open now."""
        sent: dict[str, int] = {}
        for (inode, peer), count in self._now().items():
            grown = count - self._before.get((inode, peer), 0)
            if grown:
                sent[peer] = sent.get(peer, 0) + grown
        return sent

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
    """Yield a duplicate socket of a file descriptor, and its inode.

    Raises
    ------
    OSError : not a socket.
    """
    status = os.stat(number)
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(f"descriptor {number} is not a socket")  # socket() would leave its duplicate open
    with socket.socket(fileno=os.dup(number)) as sock:
        yield sock, status.st_ino


def by_locality(ranks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Sum the bytes of all ranks by locality, as p2p.LOCALITY_LEVELS.

    Parameters
    ----------
    ranks : for each "node", "zone" ("" if unknown), and "local_addresses" and "sent" of its `TcpBytesSent`.
    """
    home = {address: rank for rank in ranks for address in rank["local_addresses"] if address not in _LOCAL}
    by_level = {"intra_node": 0, "intra_zone": 0, "inter_zone": 0}
    for rank in ranks:
        for peer, count in rank["sent"].items():
            other = home.get(peer)
            if peer in _LOCAL or (other and other["node"] == rank["node"]):
                by_level["intra_node"] += count
            elif other and other["zone"] == rank["zone"]:
                by_level["intra_zone"] += count
            else:
                by_level["inter_zone"] += count
    return by_level
