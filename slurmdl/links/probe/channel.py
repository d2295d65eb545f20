"""A TCP connection between two programs that know a secret: lines of JSON, each with a code that proves who sent it.

Each side first sends a random nonce. From the secret and both nonces follows a key for each direction, and every line
carries the HMAC-SHA256 of its number on the connection and of its text. The secret itself is never sent. A line that
somebody else sent, changed, left out, repeated, or recorded on another connection is refused. Nothing is encrypted.
With an empty secret everybody who speaks the protocol is accepted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from typing import Any

#: bytes of a line, at most
_MAX_LINE_BYTES = 4096
#: seconds that the other side may take to prove that it knows the secret
HANDSHAKE_S = 4.0
#: bytes of the tag that each datagram of a session carries
TAG_BYTES = 8
_NONCE_BYTES = 16


class PeerError(OSError):
    """The other side does not answer in time, or says what it should not."""


class Deadline:
    """A moment by which all must be done, by a clock that does not jump."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining_s(self) -> float:
        """Seconds that are left; Timeout where none are."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise PeerError("no answer in time")
        return seconds


class AuthenticatedChannel:
    """One side of such a connection.

    Parameters
    ----------
    secret : that the other side must know, too.
    asks : whether this side made the connection.
    deadline : of each blocking operation; None for no limit.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, is_client: bool,
                 deadline: Deadline | None = None) -> None:
        self.socket, self.deadline = connection, deadline
        self._secret, self._is_client = secret, is_client
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()
        self._buffer = b""
        self._keys: tuple[bytes, bytes] | None = None  # for what is sent, and for what is received
        self._messages_sent = self._messages_received = 0
        self.tag = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._nonce + b"\n")  # the first bytes always find room

    def read_message(self) -> dict[str, Any]:
        """The next message; Timeout where it does not come in time, or the sender does not know the secret."""
        while (message := self.next_message()) is None:
            self._receive_before_deadline()
        return message

    def write_message(self, **message: Any) -> None:
        """Send a message, for which the nonce of the other side must have come."""
        while self._keys is None and not self._derive_keys():
            self._receive_before_deadline()
        assert self._keys is not None
        self._set_timeout()
        text = json.dumps(message).encode()
        self.socket.sendall(self._hmac_hex(self._keys[0], self._messages_sent, text) + b" " + text + b"\n")
        self._messages_sent += 1

    def next_message(self) -> dict[str, Any] | None:
        """The next message, if it has been received completely; Timeout where it is not valid."""
        if self._keys is None and not self._derive_keys():
            return None
        assert self._keys is not None
        line = self._pop_line()
        if line is None:
            return None
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, self._hmac_hex(self._keys[1], self._messages_received, text)):
            raise PeerError("the peer does not know the secret")
        self._messages_received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PeerError("the peer speaks another language") from error
        if not isinstance(message, dict):
            raise PeerError("the peer speaks another language")
        return message

    def receive_bytes(self) -> None:
        """Read once from the connection; Timeout where it has ended."""
        data = self.socket.recv(_MAX_LINE_BYTES)
        if not data:
            raise PeerError("the peer has gone")
        self._buffer += data

    def _receive_before_deadline(self) -> None:
        self._set_timeout()
        self.receive_bytes()

    def _set_timeout(self) -> None:
        self.socket.settimeout(None if self.deadline is None else self.deadline.remaining_s())

    def _pop_line(self) -> bytes | None:
        line, end, rest = self._buffer.partition(b"\n")
        if len(line) > _MAX_LINE_BYTES:
            raise PeerError("the peer sends a line that is too long")
        if not end:
            return None
        self._buffer = rest
        return line

    def _derive_keys(self) -> bool:
        """Derive the keys if the nonce of the other side has come."""
        theirs = self._pop_line()
        if theirs is None:
            return False
        if len(theirs) != 2 * _NONCE_BYTES:
            raise PeerError("the peer speaks another language")
        nonces = (self._nonce + theirs) if self._is_client else (theirs + self._nonce)
        asker, answerer, datagrams = (hmac.digest(self._secret, purpose + nonces, "sha256")
                                      for purpose in (b"asker ", b"answerer ", b"datagrams "))
        self._keys = (asker, answerer) if self._is_client else (answerer, asker)
        self.tag = datagrams[:TAG_BYTES]
        return True

    @staticmethod
    def _hmac_hex(key: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + text, "sha256").hex().encode()


def derive_secret(secret: bytes, purpose: str) -> bytes:
    """A secret for one purpose, which tells nothing of the one it comes from."""
    return hmac.digest(secret, f"purpose {purpose}".encode(), "sha256")
