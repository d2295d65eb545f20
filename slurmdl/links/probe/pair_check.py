"""Whether every pair of nodes can exchange data.

A wrong route, firewall or MTU breaks single pairs of nodes, and a program hangs in its first collective operation.
The few pairs whose links are measured may all be good. So all pairs are checked, each one by a short stream in both
directions: full packets show what small messages do not, e.g. a wrong MTU.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from slurmdl.links.probe.channel import Deadline, derive_secret
from slurmdl.links.probe.protocol import ControlChannel

#: peers that a node checks per request; names and addresses of so many fit in one message
PEERS_PER_REQUEST = 100
#: bytes per direction, and seconds after which a pair counts as broken: Linux repeats a lost SYN after 1 s
_STREAM_BYTES, _TIMEOUT_S = 65_536, 2.0
#: pairs that a node checks at once
_CONCURRENT_PAIRS = 8

#: a node: name, address and port of its reflector
Peer = tuple[str, str, int]


def peers_to_check(nodes: Sequence[str]) -> dict[str, list[str]]:
    """Node -> the peers that it checks: every pair once, and at most one pair more for some nodes than for others."""
    count = len(nodes)
    return {node: [nodes[(i + step) % count] for step in range(1, count // 2 + 1)
                   if 2 * step < count or i < count // 2]
            for i, node in enumerate(nodes)}


def unreachable_peers(peers: Sequence[Peer], secret: bytes, source: str = "") -> list[str]:
    """Names of the peers that do not exchange data with this node in time.

    Args:
        secret: of the probe.
        source: own address, "" for that of the route.
    """
    def is_reachable(peer: Peer) -> bool:
        name, address, port = peer
        try:
            _exchange_data((address, port), derive_secret(secret, name), source)
        except (OSError, KeyError, TypeError, ValueError):
            return False
        return True

    with ThreadPoolExecutor(_CONCURRENT_PAIRS) as pool:
        results = pool.map(is_reachable, peers)
        return [peer[0] for peer, reachable in zip(peers, results, strict=True) if not reachable]


def _exchange_data(address: tuple[str, int], secret: bytes, source: str) -> None:
    deadline = Deadline(_TIMEOUT_S)
    with socket.create_connection(address, timeout=_TIMEOUT_S, source_address=(source, 0)) as connection:
        control = ControlChannel(connection, secret, deadline, is_client=True)
        control.write_message(udp=0)
        control.read_message()
        control.write_message(op="receive_stream", size=_STREAM_BYTES)
        control.send_stream(_STREAM_BYTES, _TIMEOUT_S)
        control.read_message()
        control.write_message(op="send_stream", size=_STREAM_BYTES, seconds=_TIMEOUT_S)
        control.receive_stream()
