"""Server side of a probe: echoes datagrams, receives and sends streams."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import closing, suppress
from typing import Any

from slurmdl.links.probe.channel import HANDSHAKE_S, Deadline, PeerError
from slurmdl.links.probe.protocol import CHUNK_BYTES, ControlChannel, Pacer, PacketTrainReceiver, ProbeSocket

PACKET_TRAIN_LENGTH = 256
ECHO_BYTES = 64
_MAX_STREAM_BYTES = 2**30
#: time limits of one answer, of the wait for the next request, and of a session
_MAX_REQUEST_S, _MAX_IDLE_S, _MAX_SESSION_S = 10.0, 5.0, 30.0
#: connections that are not yet authenticated; the oldest is dropped for a new one
_MAX_UNAUTHENTICATED = 64
_ACCEPT_BACKLOG = 1024


class Reflector:
    """Answers the probes of peers with the secret, in threads, at `address` ("" for all), until the process ends."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._server, self._secret = _create_listener(address), secret
        self._unauthenticated: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept_connections, daemon=True).start()

    def _accept_connections(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                time.sleep(0.05)  # out of file descriptors, or the peer has disconnected
                continue
            with self._lock:
                self._unauthenticated[connection] = None
                if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                    oldest = next(iter(self._unauthenticated))
                    del self._unauthenticated[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            try:
                threading.Thread(target=self._handle_connection, args=(connection,), daemon=True).start()
            except RuntimeError:  # out of threads
                with self._lock:
                    self._unauthenticated.pop(connection, None)
                connection.close()

    def _handle_connection(self, connection: socket.socket) -> None:
        try:
            with connection:
                try:
                    control = ControlChannel(connection, self._secret, Deadline(HANDSHAKE_S), is_client=False)
                    hello = control.read_message()
                finally:
                    with self._lock:
                        self._unauthenticated.pop(connection, None)
                _serve_session(control, hello)
        except (OSError, ValueError, TypeError, OverflowError):
            pass  # disconnected or invalid peer


def _create_listener(host: str) -> socket.socket:
    """Listening socket on a free port; `host` is "" for all addresses, IPv4 and IPv6."""
    is_dual_stack = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual_stack or ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_ACCEPT_BACKLOG, dualstack_ipv6=is_dual_stack)


def _serve_session(control: ControlChannel, hello: dict[str, Any]) -> None:
    connection, session = control.socket, Deadline(_MAX_SESSION_S)
    with closing(ProbeSocket(connection.getsockname()[0])) as probe_socket:
        probe_socket.connect((connection.getpeername()[0], int(hello.get("udp", 0))), control.tag)
        control.write_message(udp=probe_socket.port)
        while True:
            control.deadline = Deadline(min(_MAX_IDLE_S, session.remaining_s()))
            request = control.read_message()
            control.deadline = Deadline(min(_MAX_REQUEST_S, session.remaining_s()))
            _handle_request(control, probe_socket, request)


def _handle_request(control: ControlChannel, probe_socket: ProbeSocket, request: dict[str, Any]) -> None:
    seconds = min(float(request.get("seconds", 0)), _MAX_REQUEST_S)
    size = min(int(request.get("size", 0)), _MAX_STREAM_BYTES)
    match request.get("op"):
        case "echo":
            control.write_message(**_echo_datagrams(control, probe_socket, size // ECHO_BYTES))
        case "receive_stream":
            control.write_message(rate=control.receive_stream(size + 2 * CHUNK_BYTES))
        case "send_stream":
            control.send_stream(size, seconds)
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
