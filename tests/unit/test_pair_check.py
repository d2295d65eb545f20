"""Which pairs of nodes cannot exchange data."""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.links.probe.channel import AuthenticatedChannel, derive_secret
from slurmdl.links.probe.pair_probe import Reflector, peers_to_check, unreachable_peers

SECRET = b"secret"


@given(st.integers(0, 60))
def test_every_pair_is_checked_once(count):
    checks = peers_to_check([str(i) for i in range(count)])
    pairs = [frozenset((node, peer)) for node, peers in checks.items() for peer in peers]
    assert len(set(pairs)) == len(pairs) == count * (count - 1) // 2
    assert all(len(pair) == 2 for pair in pairs)
    assert max(map(len, checks.values()), default=0) - min(map(len, checks.values()), default=0) <= 1


def test_peers_that_answer_are_reachable():
    peers = [(name, "127.0.0.1", Reflector("127.0.0.1", derive_secret(SECRET, name)).port) for name in ("n1", "n2")]
    assert unreachable_peers(peers, SECRET) == []
    assert unreachable_peers([*peers, ("n3", "127.0.0.1", peers[0][2])], SECRET) == ["n3"]  # not its secret


def stop_after_the_handshake(server: socket.socket, opened: list[socket.socket]) -> None:
    """Answer the small messages of the handshake, and read nothing more: full packets do not arrive."""
    connection, _ = server.accept()
    opened.append(connection)
    channel = AuthenticatedChannel(connection, derive_secret(SECRET, "n2"), is_client=False)
    channel.read_message()
    channel.write_message(udp=1)


@pytest.mark.parametrize("fault", ["closed", "silent", "full packets are lost"])
def test_broken_peer_is_unreachable(fault):
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if fault == "closed":
            server.close()
        elif fault == "full packets are lost":
            threading.Thread(target=stop_after_the_handshake, args=(server, opened), daemon=True).start()
        assert unreachable_peers([("n2", "127.0.0.1", port)], SECRET) == ["n2"]
    assert len(opened) == (fault == "full packets are lost")
    for connection in opened:
        connection.close()
