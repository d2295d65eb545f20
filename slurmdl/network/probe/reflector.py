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

from slurmdl.network.access import Network, address_of, among, listener
from slurmdl.network.probe.channel import HANDSHAKE_S, Deadline, Timeout
from slurmdl.network.probe.wire import CHUNK, Allowance, Arrivals, Budget, Control, Datagrams

#: a train has at most so many datagrams
TRAIN = 256
#: bytes of a datagram that is echoed
ECHO = 64
_MAX_STREAM = 2**30
#: seconds of one answer, until the next request, and of a session
_MAX_SECONDS, _MAX_IDLE, _MAX_SESSION = 10.0, 5.0, 30.0
#: connections whose peer has not yet proved that it knows the secret; the oldest one gives way
_MOST_UNPROVED = 64

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

    def __init__(self, address: str = "", port: int = 0, *, secret: bytes = b"", allow: Sequence[Network] = (),
                 sessions: int = 16, rate: float = 0.0) -> None:
        self._server, self._closed = listener(address, port), False
        self._secret, self._allow, self._allowance = secret, tuple(allow), Allowance(rate)
        self._most, self._lock = sessions, threading.Lock()
        self._unproved: dict[socket.socket, None] = {}  # the oldest first
        self._sessions: Counter[str] = Counter()  # of each host
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Take no new sessions."""
        self._closed = True
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, (host, *_) = self._server.accept()
            except OSError:
                time.sleep(0.05)  # closed, or no file descriptor is left, or the peer has gone already
                continue
            address = address_of(host)
            if self._allow and not among(address, self._allow):
                connection.close()
                continue
            with self._lock:
                self._unproved[connection] = None
                if len(self._unproved) > _MOST_UNPROVED:
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            try:
                threading.Thread(target=self._session, args=(connection, str(address)), daemon=True).start()
            except RuntimeError:  # the system has no thread left
                with self._lock:
                    self._unproved.pop(connection, None)
                connection.close()

    def _session(self, connection: socket.socket, host: str) -> None:
        try:
            with connection:
                try:
                    control = Control(connection, self._secret, Deadline(HANDSHAKE_S), asks=False)
                    hello = control.read()
                finally:
                    with self._lock:
                        self._unproved.pop(connection, None)
                if self._enter(host):
                    try:
                        self._serve(control, hello)
                    finally:
                        self._leave(host)
        except (OSError, ValueError, TypeError, OverflowError):
            pass  # the peer has gone, or is none: nothing of it is left

    def _enter(self, host: str) -> bool:
        with self._lock:
            if self._sessions.total() >= self._most or self._sessions[host] >= max(1, self._most // 2):
                return False
            self._sessions[host] += 1
            return True

    def _leave(self, host: str) -> None:
        with self._lock:
            self._sessions[host] -= 1
            if not self._sessions[host]:
                del self._sessions[host]

    def _serve(self, control: Control, hello: dict[str, Any]) -> None:
        connection, session = control.socket, Deadline(_MAX_SESSION)
        datagrams = Datagrams(connection.getsockname()[0])
        try:
            datagrams.connect((connection.getpeername()[0], int(hello.get("udp", 0))), control.tag)
            control.write(udp=datagrams.port)
            while True:
                control.deadline = Deadline(min(_MAX_IDLE, session.left()))
                request = control.read()
                control.deadline = Deadline(min(_MAX_SECONDS, session.left()))
                self._answer(control, datagrams, request)
        finally:
            datagrams.close()

    def _answer(self, control: Control, datagrams: Datagrams, request: dict[str, Any]) -> None:
        seconds = min(float(request.get("seconds", 0)), _MAX_SECONDS)
        size = min(int(request.get("size", 0)), _MAX_STREAM)
        what = request.get("do")
        if what in ("train", "send train"):
            size = TRAIN * datagrams.longest()
        if not self._allowance.take(max(0, size)):
            raise Timeout("more than is allowed here")
        match what:
            case "echo":
                control.write(**_echo(control, datagrams, size // ECHO))
            case "take":
                control.write(rate=control.receive_stream(size + 2 * CHUNK))
            case "send":
                control.send_stream(size, seconds, Budget(0).spend)
            case "train":
                control.write(rate=_take_train(control, datagrams))
            case "send train":
                send_train(datagrams, seconds, 0)
                control.write(done=True)
            case _:
                raise Timeout("the peer asks for what is not known here")


def _echo(control: Control, datagrams: Datagrams, most: int) -> dict[str, int]:
    """Echo until the peer writes a line, so many at most; how many came, and how many more found the buffer full."""
    received, before = 0, datagrams.overflow
    while True:
        ready, _, _ = select.select([datagrams.socket, control.socket], [], [], control.deadline.left())
        if datagrams.socket in ready:
            found = datagrams.receive(0)
            if found is not None and len(found[0]) <= ECHO:
                received += 1
                if received <= most:
                    datagrams.send(found[0])
        elif ready:
            control.read()
            return {"received": received, "overflow": datagrams.overflow - before}


def _take_train(control: Control, datagrams: Datagrams) -> float:
    """Take a train until the peer's line says that it has been sent, and no more of it comes; its bytes/s."""
    arrivals, wait = Arrivals(datagrams), 0.0
    while True:
        left = control.deadline.left()  # also while datagrams come, and whatever the peer says
        ready, _, _ = select.select([datagrams.socket] if wait else [datagrams.socket, control.socket], [], [],
                                    min(wait or left, left))
        if datagrams.socket in ready:
            found = datagrams.receive(0)
            if found is not None:
                arrivals.take(*found)
        elif ready:
            wait = float(control.read().get("wait", 0.0)) or 0.01
        else:
            return arrivals.rate()


def send_train(datagrams: Datagrams, seconds: float, rate: float) -> None:
    """Send at most TRAIN of the longest datagrams one after the other, for at most so long."""
    deadline, budget, data = Deadline(seconds), Budget(rate), bytes(datagrams.longest())
    try:
        for _ in range(TRAIN):
            deadline.left()
            budget.spend(len(data))
            datagrams.send(data)
    except Timeout:
        return
