"""Server side of a probe: echoes datagrams, receives and sends streams, in a bounded number of sessions."""

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

#: datagrams of a packet train
PACKET_TRAIN_LENGTH = 256
#: bytes of an echoed datagram
ECHO_BYTES = 64
_MAX_STREAM_BYTES = 2**30
#: time limits of one answer, of the wait for the next request, and of a session
_MAX_REQUEST_S, _MAX_IDLE_S, _MAX_SESSION_S = 10.0, 5.0, 30.0
#: connections that are not yet authenticated; the oldest is dropped for a new one
_MAX_UNAUTHENTICATED = 64


class Reflector:
    """Answers the probes of other nodes in background threads until it is closed.

    Parameters
    ----------
    address : to listen on, "" for all.
    port : 0 for any.
    secret : required of peers; empty for none.
    allowed_networks : of the peers, () for all.
    max_sessions : at the same time, at most half of them with one host. Unauthenticated connections do not count.
    rate_limit : bytes/s of all sessions together, 0 for no limit; requests above it are rejected.
    """

    def __init__(self, address: str = "", port: int = 0, *, secret: bytes = b"",
                 allowed_networks: Sequence[IPNetwork] = (), max_sessions: int = 16, rate_limit: float = 0.0) -> None:
        self._server, self._closed = create_listener(address, port), False
        self._secret, self._allowed_networks = secret, tuple(allowed_networks)
        self._token_bucket = TokenBucket(rate_limit)
        self._max_sessions, self._lock = max_sessions, threading.Lock()
        self._unauthenticated: dict[socket.socket, None] = {}  # oldest first
        self._sessions_by_host: Counter[str] = Counter()
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept_connections, daemon=True).start()

    def close(self) -> None:
        """Stop listening; running sessions end by themselves."""
        self._closed = True
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept_connections(self) -> None:
        while not self._closed:
            try:
                connection, (host, *_) = self._server.accept()
            except OSError:
                time.sleep(0.05)  # closed, out of file descriptors, or the peer has disconnected
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
            except RuntimeError:  # out of threads
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
            pass  # disconnected or invalid peer

    def _acquire_session(self, host: str) -> bool:
        with self._lock:
            if self._sessions_by_host.total() >= self._max_sessions \
                    or self._sessions_by_host[host] >= max(1, self._max_sessions // 2):
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
        probe_socket = ProbeSocket(connection.getsockname()[0])
        try:
            probe_socket.connect((connection.getpeername()[0], int(hello.get("udp", 0))), control.tag)
            control.write_message(udp=probe_socket.port)
            while True:
                control.deadline = Deadline(min(_MAX_IDLE_S, session.remaining_s()))
                request = control.read_message()
                control.deadline = Deadline(min(_MAX_REQUEST_S, session.remaining_s()))
                self._handle_request(control, probe_socket, request)
        finally:
            probe_socket.close()

    def _handle_request(self, control: ControlChannel, probe_socket: ProbeSocket, request: dict[str, Any]) -> None:
        seconds = min(float(request.get("seconds", 0)), _MAX_REQUEST_S)
        size = min(int(request.get("size", 0)), _MAX_STREAM_BYTES)
        op = request.get("op")
        if op in ("receive_train", "send_train"):
            size = PACKET_TRAIN_LENGTH * probe_socket.max_payload()
        if not self._token_bucket.try_consume(max(0, size)):
            raise PeerError("rate limit exceeded")
        match op:
            case "echo":
                control.write_message(**_echo_datagrams(control, probe_socket, size // ECHO_BYTES))
            case "receive_stream":
                control.write_message(rate=control.receive_stream(size + 2 * CHUNK_BYTES))
            case "send_stream":
                control.send_stream(size, seconds, Pacer(0).wait_to_send)
            case "receive_train":
                control.write_message(rate=_receive_packet_train(control, probe_socket))
            case "send_train":
                send_packet_train(probe_socket, seconds, 0)
                control.write_message(done=True)
            case _:
                raise PeerError("malformed message from the peer: unknown op")


def _echo_datagrams(control: ControlChannel, probe_socket: ProbeSocket, max_echoes: int) -> dict[str, int]:
    """Echo datagrams until the next message; return how many arrived, and how many the full buffer dropped."""
    received, overflow_before = 0, probe_socket.overflow
    while True:
        ready, _, _ = select.select([probe_socket.socket, control.socket], [], [], control.deadline.remaining_s())
        if probe_socket.socket in ready:
            datagram = probe_socket.receive(0)
            if datagram is not None and len(datagram[0]) <= ECHO_BYTES:
                received += 1
                if received <= max_echoes:
                    probe_socket.send(datagram[0])
        elif ready:
            control.read_message()
            return {"received": received, "overflow": probe_socket.overflow - overflow_before}


def _receive_packet_train(control: ControlChannel, probe_socket: ProbeSocket) -> float:
    """Receive a packet train until the peer reports its end and no more arrives; return its bytes/s."""
    train, wait_s = PacketTrainReceiver(probe_socket), 0.0
    while True:
        remaining_s = control.deadline.remaining_s()  # holds for an endless train, too
        sockets = [probe_socket.socket] if wait_s else [probe_socket.socket, control.socket]
        ready, _, _ = select.select(sockets, [], [], min(wait_s or remaining_s, remaining_s))
        if probe_socket.socket in ready:
            datagram = probe_socket.receive(0)
            if datagram is not None:
                train.add(*datagram)
        elif ready:
            wait_s = float(control.read_message().get("wait", 0.0)) or 0.01
        else:
            return train.throughput()


def send_packet_train(probe_socket: ProbeSocket, seconds: float, rate: float) -> None:
    """Send up to PACKET_TRAIN_LENGTH datagrams of the largest size back to back, for at most `seconds`."""
    deadline, pacer, data = Deadline(seconds), Pacer(rate), bytes(probe_socket.max_payload())
    try:
        for _ in range(PACKET_TRAIN_LENGTH):
            deadline.remaining_s()
            pacer.wait_to_send(len(data))
            probe_socket.send(data)
    except PeerError:
        return
