"""The side that answers: echoes datagrams, takes streams and sends them, a bounded number of sessions at once."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from slurmdl.links.probe.channel import HANDSHAKE_S, Deadline, PeerError
from slurmdl.links.probe.protocol import (
    CHUNK_BYTES,
    ControlChannel,
    Pacer,
    PacketTrainReceiver,
    ProbeSocket,
    TokenBucket,
)
from slurmdl.links.tcp_server import IPNetwork, create_listener, is_in_networks, parse_peer_address

#: a train has at most so many datagrams
PACKET_TRAIN_LENGTH = 256
#: bytes of a datagram that is echoed
ECHO_BYTES = 64
_MAX_STREAM_BYTES = 2**30
#: seconds of one answer, until the next request, and of a session
_MAX_REQUEST_S, _MAX_IDLE_S, _MAX_SESSION_S = 10.0, 5.0, 30.0
#: connections whose peer has not yet proved that it knows the secret; the oldest one gives way
_MAX_UNAUTHENTICATED = 64

class Reflector:
    """Answers the probes of other nodes until it is closed.

    A connection whose peer has not yet proved that it knows the secret takes no place of a session.

    Parameters
    ----------
    address : to listen at, "" for all.
    port : 0 for any.
    secret : what a peer must know; empty for nothing.
    allow : networks whose hosts are answered, () for all.
    sessions : at most so many at once, and half of them with one host; others are refused.
    rate : bytes/s that all sessions together may move on average, 0 for no limit: who asks for more is refused.
    """

    def __init__(self, address: str = "", port: int = 0, *, secret: bytes = b"", allowed_networks: Sequence[IPNetwork] = (),
                 max_sessions: int = 16, rate_limit: float = 0.0) -> None:
        self._server, self._closed = create_listener(address, port), False
        self._secret, self._allowed_networks, self._token_bucket = secret, tuple(
            allowed_networks), TokenBucket(rate_limit)
        self._max_sessions, self._lock = max_sessions, threading.Lock()
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        self._sessions_by_host: Counter[str] = Counter()  # of each host
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept_connections, daemon=True).start()

    def close(self) -> None:
        """Take no new sessions."""
        self._closed = True
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept_connections(self) -> None:
        while not self._closed:
            try:
                connection, (host, *_) = self._server.accept()
            except OSError:
                time.sleep(0.05)  # closed, or no file descriptor is left, or the peer has gone already
                continue
            address = parse_peer_address(host)
            if self._allowed_networks and not is_in_networks(address, self._allowed_networks):
                connection.close()
                continue
            with self._lock:
                self._unauthenticated[connection] = None
                if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                    oldest = next(iter(self._unauthenticated))
                    del self._unauthenticated[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            try:
                threading.Thread(target=self._handle_connection, args=(connection, str(address)), daemon=True).start()
            except RuntimeError:  # the system has no thread left
                with self._lock:
                    self._unauthenticated.pop(connection, None)
                connection.close()

    def _handle_connection(self, connection: socket.socket, host: str) -> None:
        try:
            with connection:
                try:
                    control = ControlChannel(connection, self._secret, Deadline(HANDSHAKE_S), is_client=False)
                    hello = control.read_message()
                finally:
                    with self._lock:
                        self._unauthenticated.pop(connection, None)
                if self._acquire_session(host):
                    try:
                        self._serve_session(control, hello)
                    finally:
                        self._release_session(host)
        except (OSError, ValueError, TypeError, OverflowError):
            pass  # the peer has gone, or is none: nothing of it is left

    def _acquire_session(self, host: str) -> bool:
        with self._lock:
            if self._sessions_by_host.total() >= self._max_sessions or self._sessions_by_host[host] >= max(
                1, self._max_sessions // 2):
                return False
            self._sessions_by_host[host] += 1
            return True

    def _release_session(self, host: str) -> None:
        with self._lock:
            self._sessions_by_host[host] -= 1
            if not self._sessions_by_host[host]:
                del self._sessions_by_host[host]

    def _serve_session(self, control: ControlChannel, hello: dict[str, Any]) -> None:
        connection, session = control.socket, Deadline(_MAX_SESSION_S)
        datagrams = ProbeSocket(connection.getsockname()[0])
        try:
            datagrams.connect((connection.getpeername()[0], int(hello.get("udp", 0))), control.tag)
            control.write_message(udp=datagrams.port)
            while True:
                control.deadline = Deadline(min(_MAX_IDLE_S, session.remaining_s()))
                request = control.read_message()
                control.deadline = Deadline(min(_MAX_REQUEST_S, session.remaining_s()))
                self._handle_request(control, datagrams, request)
        finally:
            datagrams.close()

    def _handle_request(self, control: ControlChannel, probe_socket: ProbeSocket, request: dict[str, Any]) -> None:
        seconds = min(float(request.get("seconds", 0)), _MAX_REQUEST_S)
        size = min(int(request.get("size", 0)), _MAX_STREAM_BYTES)
        what = request.get("do")
        if what in ("train", "send train"):
            size = PACKET_TRAIN_LENGTH * probe_socket.max_payload()
        if not self._token_bucket.try_consume(max(0, size)):
            raise PeerError("more than is allowed here")
        match what:
            case "echo":
                control.write_message(**_echo_datagrams(control, probe_socket, size // ECHO_BYTES))
            case "take":
                control.write_message(rate=control.receive_stream(size + 2 * CHUNK_BYTES))
            case "send":
                control.send_stream(size, seconds, Pacer(0).wait_to_send)
            case "train":
                control.write_message(rate=_receive_packet_train(control, probe_socket))
            case "send train":
                send_packet_train(probe_socket, seconds, 0)
                control.write_message(done=True)
            case _:
                raise PeerError("the peer asks for what is not known here")


def _echo_datagrams(control: ControlChannel, probe_socket: ProbeSocket, max_echoes: int) -> dict[str, int]:
    """Echo until the peer writes a line, so many at most; how many came, and how many more found the buffer full."""
    received, before = 0, probe_socket.overflow
    while True:
        ready, _, _ = select.select([probe_socket.socket, control.socket], [], [], control.deadline.remaining_s())
        if probe_socket.socket in ready:
            found = probe_socket.receive(0)
            if found is not None and len(found[0]) <= ECHO_BYTES:
                received += 1
                if received <= max_echoes:
                    probe_socket.send(found[0])
        elif ready:
            control.read_message()
            return {"received": received, "overflow": probe_socket.overflow - before}


def _receive_packet_train(control: ControlChannel, probe_socket: ProbeSocket) -> float:
    """Take a train until the peer's line says that it has been sent, and no more of it comes; its bytes/s."""
    arrivals, wait = PacketTrainReceiver(probe_socket), 0.0
    while True:
        left = control.deadline.remaining_s()  # also while datagrams come, and whatever the peer says
        ready, _, _ = select.select([probe_socket.socket] if wait else [probe_socket.socket, control.socket], [], [],
                                    min(wait or left, left))
        if probe_socket.socket in ready:
            found = probe_socket.receive(0)
            if found is not None:
                arrivals.add(*found)
        elif ready:
            wait = float(control.read_message().get("wait", 0.0)) or 0.01
        else:
            return arrivals.throughput()


def send_packet_train(probe_socket: ProbeSocket, seconds: float, rate: float) -> None:
    """Send at most TRAIN of the longest datagrams one after the other, for at most so long."""
    deadline, budget, data = Deadline(seconds), Pacer(rate), bytes(probe_socket.max_payload())
    try:
        for _ in range(PACKET_TRAIN_LENGTH):
            deadline.remaining_s()
            budget.wait_to_send(len(data))
            probe_socket.send(data)
    except PeerError:
        return
