"""Authenticated TCP channel between two programs with a shared secret; messages are lines of JSON with an HMAC.

Each side first sends a random nonce. Secret and nonces give one key per direction; each line carries the HMAC-SHA256
of its sequence number and text. Forged, changed, dropped, repeated and replayed lines are rejected. The secret is not
transmitted and nothing is encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from typing import Any

#: of a message (a hundred peers with the longest names), and of one read, less than a chunk of a stream
_MAX_LINE_BYTES, _READ_BYTES = 65_536, 4096
HANDSHAKE_S = 4.0  # seconds in which a peer must authenticate
TAG_BYTES = 8  # bytes of the tag in each datagram of a session
_NONCE_BYTES = 16


class PeerError(OSError):
    """The peer does not answer in time, or sends an invalid message."""


class Deadline:
    """A point in time on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining_s(self) -> float:
        """Remaining seconds; PeerError if there are none."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise PeerError("no answer in time")
        return seconds

    def has_passed(self) -> bool:
        return time.monotonic() >= self._end


class AuthenticatedChannel:
    """One side of the connection; the client opened it. `deadline` bounds blocking operations, None for no limit."""

    def __init__(self, connection: socket.socket, secret: bytes, *, is_client: bool,
                 deadline: Deadline | None = None) -> None:
        self.socket, self.deadline = connection, deadline
        self._secret, self._is_client = secret, is_client
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()
        self._buffer = b""
        self._keys: tuple[bytes, bytes] | None = None
        self._messages_sent = self._messages_received = 0
        self.tag = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._nonce + b"\n")  # fits into the empty send buffer

    def read_message(self) -> dict[str, Any]:
        """Wait for the next message; PeerError if it is late or not authentic."""
        while (message := self.next_message()) is None:
            self._receive_before_deadline()
        return message

    def write_message(self, **message: Any) -> None:
        """Send a message; waits for the peer's nonce first."""
        while (keys := self._session_keys()) is None:
            self._receive_before_deadline()
        self._set_timeout()
        text = json.dumps(message).encode()
        self.socket.sendall(self._hmac_hex(keys[0], self._messages_sent, text) + b" " + text + b"\n")
        self._messages_sent += 1

    def next_message(self) -> dict[str, Any] | None:
        """Next message if it is complete, else None; PeerError if it is not valid."""
        keys = self._session_keys()
        line = self._pop_line() if keys else None
        if keys is None or line is None:
            return None
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, self._hmac_hex(keys[1], self._messages_received, text)):
            raise PeerError("the peer does not have the secret")
        self._messages_received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PeerError("malformed message from the peer: expected JSON") from error
        if not isinstance(message, dict):
            raise PeerError("malformed message from the peer: expected a JSON object")
        return message

    def receive_bytes(self) -> None:
        """Read once from the connection; PeerError if it was closed."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise PeerError("the peer closed the connection")
        self._buffer += data

    def _receive_before_deadline(self) -> None:
        self._set_timeout()
        self.receive_bytes()

    def _set_timeout(self) -> None:
        self.socket.settimeout(None if self.deadline is None else self.deadline.remaining_s())

    def _pop_line(self) -> bytes | None:
        line, end, rest = self._buffer.partition(b"\n")
        if len(line) > _MAX_LINE_BYTES:
            raise PeerError(f"malformed message from the peer: line of more than {_MAX_LINE_BYTES} bytes")
        if not end:
            return None
        self._buffer = rest
        return line

    def _session_keys(self) -> tuple[bytes, bytes] | None:
        """Keys for sent and for received messages; None until the peer's nonce is complete."""
        if self._keys is None and (nonce := self._pop_line()) is not None:
            if len(nonce) != 2 * _NONCE_BYTES:
                raise PeerError("malformed message from the peer: expected a nonce")
            nonces = (self._nonce + nonce) if self._is_client else (nonce + self._nonce)
            client, server, datagrams = (hmac.digest(self._secret, purpose + nonces, "sha256")
                                         for purpose in (b"client ", b"server ", b"datagrams "))
            self._keys = (client, server) if self._is_client else (server, client)
            self.tag = datagrams[:TAG_BYTES]
        return self._keys

    @staticmethod
    def _hmac_hex(key: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + text, "sha256").hex().encode()


def derive_secret(secret: bytes, purpose: str) -> bytes:
    """Derive a secret for one purpose; the original cannot be recovered from it."""
    return hmac.digest(secret, f"purpose {purpose}".encode(), "sha256")
