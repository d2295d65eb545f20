"""Peers of a service: where it listens, who may connect, how many at once, and how often one is told of them."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

#: the machine itself
LOOPBACK: tuple[IPNetwork, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
#: connections that the kernel keeps while none is accepted
_ACCEPT_BACKLOG = 1024


def create_listener(host: str, port: int) -> socket.socket:
    """A TCP socket that listens at an address; OSError where that is not possible.

    Parameters
    ----------
    host : "" for all of this machine, by IPv4 and IPv6.
    port : 0 for any.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_ACCEPT_BACKLOG)
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = found[0]
    return socket.create_server(where[:2], family=family, backlog=_ACCEPT_BACKLOG)


def parse_peer_address(host: str) -> IPAddress:
    """The address that accept(2) gave: without a zone, and as IPv4 where it is an IPv4 address in IPv6's form."""
    given = ipaddress.ip_address(host.partition("%")[0])
    return getattr(given, "ipv4_mapped", None) or given


def is_in_networks(address: IPAddress, networks: Sequence[IPNetwork]) -> bool:
    """Whether an address is in one of the networks."""
    return any(address in network for network in networks)


class ConnectionSlots:
    """A bounded number of places for the connections of peers, shared fairly among their addresses.

    A peer may take all of them while nobody else comes. Once all are taken, a peer that comes gets the oldest place
    of the peer that has most, unless it would then have as many itself.

    Parameters
    ----------
    most : how many places there are.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections, self._in_use, self._lock = max_connections, 0, threading.Lock()
        #: peer -> when each of its places was taken, and what ends the connection, the oldest first
        self._slots_by_peer: dict[str, list[tuple[float, Callable[[], object]]]] = {}

    def acquire(self, address: IPAddress, on_evict: Callable[[], object]) -> bool:
        """Take a place, if there is one.

        Parameters
        ----------
        end : called, possibly by another thread, to end this connection for the sake of another one; it need not
            leave its place then.
        """
        # whoever is on this machine may send from any address of it
        peer, last = "loopback" if address.is_loopback else str(address), None
        with self._lock:
            if self._in_use >= self._max_connections:
                busiest = max(self._slots_by_peer, key=lambda each: len(self._slots_by_peer[each]))
                if len(self._slots_by_peer[busiest]) <= len(self._slots_by_peer.get(peer, ())) + 1:
                    return False
                _, last = self._slots_by_peer[busiest].pop(0)
                self._in_use -= 1
            self._slots_by_peer.setdefault(peer, []).append((time.monotonic(), on_evict))
            self._in_use += 1
        if last is not None:
            last()
        return True

    def release(self, on_evict: Callable[[], object]) -> None:
        """Give the place back that was taken with this `end`, where it was not taken away."""
        with self._lock:
            for peer, held in self._slots_by_peer.items():
                for place in held:
                    if place[1] == on_evict:
                        held.remove(place)
                        self._in_use -= 1
                        if not held:
                            del self._slots_by_peer[peer]
                        return

    def evict_older_than(self, seconds: float) -> None:
        """End the connections that have lasted for longer than that; they leave their places themselves."""
        past = time.monotonic() - seconds
        with self._lock:
            ends = [end for held in self._slots_by_peer.values() for since, end in held if since < past]
        for end in ends:
            end()


@dataclass
class RateLimitedLog:
    """Lines about events that others cause: of each kind at most one in some seconds, with the number of the others.

    Attributes
    ----------
    say : called with one line.
    seconds : between two lines of a kind.
    """

    emit: Callable[[str], None]
    interval_s: float = 10.0
    #: kind -> when its next line may come, how many events wait for it, and the last one's text
    _pending_by_kind: dict[str, tuple[float, int, str]] = field(default_factory=dict)

    def __call__(self, kind: str, text: str) -> None:
        """Tell of an event, now or later."""
        due, waiting, _ = self._pending_by_kind.get(kind, (0.0, 0, ""))
        self._pending_by_kind[kind] = due, waiting + 1, text
        self.flush()

    def flush(self, force: bool = False) -> None:
        """Tell what waits and is due."""
        now = time.monotonic()
        for kind, (due, waiting, text) in self._pending_by_kind.items():
            if waiting and (now >= due or force):
                self._pending_by_kind[kind] = now + self.interval_s, 0, ""
                self.emit(text if waiting == 1 else f"{text} (and {waiting - 1} more of the kind)")
