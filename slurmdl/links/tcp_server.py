"""Building blocks of TCP services: listener, peer addresses, connection slots and rate-limited logs."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOPBACK: tuple[IPNetwork, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_ACCEPT_BACKLOG = 1024


def create_listener(host: str, port: int) -> socket.socket:
    """Create a listening TCP socket; OSError if the address cannot be bound.

    Parameters
    ----------
    host : "" for all addresses of this host, IPv4 and IPv6.
    port : 0 for any.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_ACCEPT_BACKLOG)
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = infos[0]
    return socket.create_server(address[:2], family=family, backlog=_ACCEPT_BACKLOG)


def parse_peer_address(host: str) -> IPAddress:
    """Address from accept(2), without its scope; IPv4-mapped IPv6 addresses become IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def is_in_networks(address: IPAddress, networks: Sequence[IPNetwork]) -> bool:
    """Whether an address is in one of the networks."""
    return any(address in network for network in networks)


class ConnectionSlots:
    """Bounded number of connections, shared fairly among peer addresses.

    One peer may use all slots. If all are in use, a new peer evicts the oldest connection of the peer with the most
    connections, unless it would then have as many itself.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections, self._in_use, self._lock = max_connections, 0, threading.Lock()
        #: peer -> start time and eviction callback of each connection, oldest first
        self._slots_by_peer: dict[str, list[tuple[float, Callable[[], object]]]] = {}

    def acquire(self, address: IPAddress, on_evict: Callable[[], object]) -> bool:
        """Take a slot; return whether one is available.

        Parameters
        ----------
        on_evict : ends the connection when it is evicted, possibly in another thread; `release` is optional then.
        """
        # a local process can send from any loopback address
        peer, evicted = "loopback" if address.is_loopback else str(address), None
        with self._lock:
            if self._in_use >= self._max_connections:
                busiest = max(self._slots_by_peer, key=lambda each: len(self._slots_by_peer[each]))
                if len(self._slots_by_peer[busiest]) <= len(self._slots_by_peer.get(peer, ())) + 1:
                    return False
                _, evicted = self._slots_by_peer[busiest].pop(0)
                self._in_use -= 1
            self._slots_by_peer.setdefault(peer, []).append((time.monotonic(), on_evict))
            self._in_use += 1
        if evicted is not None:
            evicted()
        return True

    def release(self, on_evict: Callable[[], object]) -> None:
        """Return the slot that was acquired with this callback, if it was not evicted."""
        with self._lock:
            for peer, slots in self._slots_by_peer.items():
                for slot in slots:
                    if slot[1] == on_evict:
                        slots.remove(slot)
                        self._in_use -= 1
                        if not slots:
                            del self._slots_by_peer[peer]
                        return

    def evict_older_than(self, seconds: float) -> None:
        """End all connections older than `seconds`; their owners release the slots."""
        oldest_start = time.monotonic() - seconds
        with self._lock:
            expired = [on_evict for slots in self._slots_by_peer.values()
                       for start, on_evict in slots if start < oldest_start]
        for on_evict in expired:
            on_evict()


@dataclass
class RateLimitedLog:
    """Log of events caused by peers: at most one line per kind and interval, with the number of suppressed events."""

    emit: Callable[[str], None]
    interval_s: float = 10.0
    #: kind -> earliest time of its next line, number of pending events, text of the last one
    _pending_by_kind: dict[str, tuple[float, int, str]] = field(default_factory=dict)

    def __call__(self, kind: str, text: str) -> None:
        """Log an event now or in a later `flush`."""
        due, count, _ = self._pending_by_kind.get(kind, (0.0, 0, ""))
        self._pending_by_kind[kind] = due, count + 1, text
        self.flush()

    def flush(self, force: bool = False) -> None:
        """Emit the pending events that are due."""
        now = time.monotonic()
        for kind, (due, count, text) in self._pending_by_kind.items():
            if count and (now >= due or force):
                self._pending_by_kind[kind] = now + self.interval_s, 0, ""
                self.emit(text if count == 1 else f"{text} (and {count - 1} more of this kind)")
