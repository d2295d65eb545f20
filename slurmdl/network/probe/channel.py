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
_LONGEST = 4096
#: seconds that the other side may take to prove that it knows the secret
HANDSHAKE_S = 4.0
#: bytes of the tag that each datagram of a session carries
TAG_BYTES = 8
_NONCE_BYTES = 16


class Timeout(OSError):
    """The other side does not answer in time, or says what it should not."""


class Deadline:
    """A moment by which all must be done, by a clock that does not jump."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left; Timeout where none are."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise Timeout("no answer in time")
        return seconds


class Channel:
    """One side of such a connection.

    Parameters
    ----------
    secret : that the other side must know, too.
    asks : whether this side made the connection.
    deadline : of each blocking operation; None for no limit.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, asks: bool,
                 deadline: Deadline | None = None) -> None:
        self.socket, self.deadline = connection, deadline
        self._secret, self._asks = secret, asks
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()
        self._buffer = b""
        self._keys: tuple[bytes, bytes] | None = None  # for what is sent, and for what is received
        self._sent = self._received = 0
        self.tag = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._nonce + b"\n")  # the first bytes always find room

    def read(self) -> dict[str, Any]:
        """The next message; Timeout where it does not come in time, or the sender does not know the secret."""
        while (message := self.next_message()) is None:
            self._receive_in_time()
        return message

    def write(self, **message: Any) -> None:
        """Send a message, for which the nonce of the other side must have come."""
        while self._keys is None and not self._take_nonce():
            self._receive_in_time()
        assert self._keys is not None
        self._set_timeout()
        text = json.dumps(message).encode()
        self.socket.sendall(self._code(self._keys[0], self._sent, text) + b" " + text + b"\n")
        self._sent += 1

    def next_message(self) -> dict[str, Any] | None:
        """The next message, if it has been received completely; Timeout where it is not valid."""
        if self._keys is None and not self._take_nonce():
            return None
        assert self._keys is not None
        line = self._line()
        if line is None:
            return None
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(self._keys[1], self._received, text)):
            raise Timeout("the peer does not know the secret")
        self._received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Timeout("the peer speaks another language") from error
        if not isinstance(message, dict):
            raise Timeout("the peer speaks another language")
        return message

    def receive(self) -> None:
        """Read once from the connection; Timeout where it has ended."""
        data = self.socket.recv(_LONGEST)
        if not data:
            raise Timeout("the peer has gone")
        self._buffer += data

    def _receive_in_time(self) -> None:
        self._set_timeout()
        self.receive()

    def _set_timeout(self) -> None:
        self.socket.settimeout(None if self.deadline is None else self.deadline.left())

    def _line(self) -> bytes | None:
        line, end, rest = self._buffer.partition(b"\n")
        if len(line) > _LONGEST:
            raise Timeout("the peer sends a line that is too long")
        if not end:
            return None
        self._buffer = rest
        return line

    def _take_nonce(self) -> bool:
        """Derive the keys if the nonce of the other side has come."""
        theirs = self._line()
        if theirs is None:
            return False
        if len(theirs) != 2 * _NONCE_BYTES:
            raise Timeout("the peer speaks another language")
        nonces = (self._nonce + theirs) if self._asks else (theirs + self._nonce)
        asker, answerer, datagrams = (hmac.digest(self._secret, purpose + nonces, "sha256")
                                      for purpose in (b"asker ", b"answerer ", b"datagrams "))
        self._keys = (asker, answerer) if self._asks else (answerer, asker)
        self.tag = datagrams[:TAG_BYTES]
        return True

    @staticmethod
    def _code(key: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + text, "sha256").hex().encode()


def derived(secret: bytes, purpose: str) -> bytes:
    """A secret for one purpose, which tells nothing of the one it comes from."""
    return hmac.digest(secret, f"purpose {purpose}".encode(), "sha256")
