"""What a process has sent over TCP, by peer: the same measure for all frameworks, whatever they tell of themselves.

What goes through shared memory, or past the kernel as InfiniBand's verbs do, is not among it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

#: where tcp_info (linux/tcp.h) has tcpi_bytes_acked, a 64-bit number: bytes that have arrived at the peer
_ACKED = 120
#: of each host itself
_LOCAL = ("127.0.0.1", "::1")


class Sent:
    """Bytes that this process has sent over TCP since this was made, by the address of the peer.

    Attributes
    ----------
    own : addresses of this process's ends of these connections.
    """

    def __init__(self) -> None:
        self.own: set[str] = set()
        self._before = self._now()

    def bytes(self) -> dict[str, int]:
        """Of connections that are open now."""
        found: dict[str, int] = {}
        for (inode, peer), count in self._now().items():
            grown = count - self._before.get((inode, peer), 0)
            if grown:
                found[peer] = found.get(peer, 0) + grown
        return found

    def _now(self) -> dict[tuple[int, str], int]:
        """(inode of the socket, peer) -> bytes."""
        found = {}
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError), _duplicate(int(number)) as (sock, inode):  # not of TCP: no such option
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= _ACKED + 8:
                    found[inode, _host(sock.getpeername())] = struct.unpack_from("=Q", info, _ACKED)[0]
                    self.own.add(_host(sock.getsockname()))
        return found


def _host(address: Any) -> str:
    """IPv4 as such, also from a socket of IPv6."""
    return str(address[0]).removeprefix("::ffff:")


@contextmanager
def _duplicate(number: int) -> Iterator[tuple[socket.socket, int]]:
    """A socket of its own for a descriptor of this process, and its inode.

    Raises
    ------
    OSError : it is none.
    """
    its = os.stat(number)
    if not stat.S_ISSOCK(its.st_mode):
        raise OSError(f"descriptor {number} is no socket")  # a duplicate of it would stay open
    with socket.socket(fileno=os.dup(number)) as sock:
        yield sock, its.st_ino


def by_level(ranks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of all ranks by how far they went, as messages.LEVELS.

    Parameters
    ----------
    ranks : each has "node", "zone" ("" where none is known), and of its `Sent` "own" and "sent".
    """
    home = {address: rank for rank in ranks for address in rank["own"] if address not in _LOCAL}
    found = {"node": 0, "zone": 0, "across": 0}
    for rank in ranks:
        for peer, count in rank["sent"].items():
            other = home.get(peer)
            if peer in _LOCAL or (other and other["node"] == rank["node"]):
                found["node"] += count
            elif other and other["zone"] == rank["zone"]:
                found["zone"] += count
            else:
                found["across"] += count
    return found
