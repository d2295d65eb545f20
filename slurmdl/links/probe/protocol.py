"""What the two sides of a probe send each other: messages and streams of chunks over TCP, datagrams over UDP."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Callable

from slurmdl.links.probe.channel import TAG_BYTES, AuthenticatedChannel, Deadline, PeerError
from slurmdl.links.tcp_server import parse_peer_address

#: a stream is a row of these; the first byte of the last one is 0
CHUNK_BYTES = 16_384
_TCP_NOTSENT_LOWAT = 25  # linux/tcp.h
_SO_TIMESTAMPNS, _SO_RXQ_OVFL = 35, 40  # asm-generic/socket.h
#: bytes of the socket's buffer that are asked for; the kernel gives what net.core.rmem_max allows
_RECEIVE_BUFFER_BYTES = 4 * 2**20
#: seconds by which two clocks may differ over a train: readers are held up, too
_MAX_CLOCK_JUMP_S = 0.25


class ControlChannel(AuthenticatedChannel):
    """The connection of a probe: messages and streams, each operation bounded by a deadline."""

    deadline: Deadline

    def __init__(self, connection: socket.socket, secret: bytes, deadline: Deadline, *, is_client: bool) -> None:
        # what waits in the socket is sent after the time is over, so little waits there
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, 4 * CHUNK_BYTES)
        super().__init__(connection, secret, is_client=is_client, deadline=deadline)

    def send_stream(self, size: int, seconds: float, pace: Callable[[int], None]) -> None:
        """Send `size` bytes, or for `seconds`; `spend` may wait before each chunk."""
        chunk, last = b"\1" + bytes(CHUNK_BYTES - 1), bytes(CHUNK_BYTES)
        end = time.monotonic() + seconds
        for _ in range(max(1, size // CHUNK_BYTES)):
            pace(CHUNK_BYTES)
            self.socket.settimeout(self.deadline.remaining_s())
            if time.monotonic() > end:
                break
            self.socket.sendall(chunk)
        self.socket.sendall(last)

    def receive_stream(self, max_bytes: float = math.inf) -> float:
        """Take a stream of at most so many bytes, and return its bytes/s once it runs.

        It starts slowly (RFC 5681), and a token bucket that is full lets its first bytes pass: see `steady_rate`.
        """
        chunk, marks = memoryview(bytearray(CHUNK_BYTES)), [(time.monotonic(), 0)]
        got, more = len(self._buffer), True
        chunk[:got], self._buffer = self._buffer[:CHUNK_BYTES], b""
        while more:
            while got < CHUNK_BYTES:
                self.socket.settimeout(self.deadline.remaining_s())
                count = self.socket.recv_into(chunk[got:])
                if not count:
                    raise PeerError("the peer has gone")
                got += count
            more, got = chunk[0] == 1, 0
            if marks[-1][1] > max_bytes:
                raise PeerError("the peer sends more than it said")
            marks.append((time.monotonic(), marks[-1][1] + CHUNK_BYTES))
        return steady_state_rate(marks)


def steady_state_rate(marks: list[tuple[float, int]]) -> float:
    """Bytes/s from (seconds, bytes so far): from the first quarter on, or from the half on where that is more.

    A stream of so few marks that nothing is left of it counts as a whole.
    """
    end, total = marks[-1]

    def from_share(share: float) -> float:
        start, before = next(mark for mark in marks if mark[1] >= share * total)
        return (total - before) / (end - start) if end > start else 0.0

    return max(from_share(0.25), from_share(0.5)) or from_share(0.0)


class ProbeSocket:
    """A UDP socket that knows one peer only, tells when a datagram came, and what its own buffer dropped.

    The last bytes of each datagram are the tag of the session. Others, which may have come from anywhere before the
    socket was connected, are left out.

    Attributes
    ----------
    overflow : datagrams that came, but found the buffer full: the network did not lose them.
    """

    def __init__(self, address: str) -> None:
        own = str(parse_peer_address(address))
        self._family = socket.AF_INET6 if ":" in own else socket.AF_INET
        self.socket = socket.socket(self._family, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
        self.socket.bind((own, 0))
        self.overflow, self._tag = 0, b""

    def connect(self, peer: tuple[str, int], tag: bytes) -> None:
        """Send to this address and port, and receive from there alone."""
        self.socket.connect((str(parse_peer_address(peer[0])), peer[1]))
        self._tag = tag

    @property
    def port(self) -> int:
        port: int = self.socket.getsockname()[1]
        return port

    def receive(self, timeout_s: float) -> tuple[bytes, float] | None:
        """A datagram and the kernel's time of its arrival in s; None where none comes within `wait` seconds."""
        end = time.monotonic() + timeout_s
        while True:
            self.socket.settimeout(max(0.0, end - time.monotonic()))
            try:
                data, ancillary, _, _ = self.socket.recvmsg(65536, 128)
            except (TimeoutError, BlockingIOError, ConnectionRefusedError):
                return None
            if data.endswith(self._tag):
                break
            if time.monotonic() > end:
                return None  # a peer that goes on sending others holds nobody up
        stamp = time.time()
        for _, kind, value in ancillary:
            if kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = struct.unpack("qq", value[:16])
                stamp = seconds + nanoseconds * 1e-9
            elif kind == _SO_RXQ_OVFL:
                self.overflow = struct.unpack("I", value[:4])[0]
        return data, stamp

    def send(self, data: bytes) -> None:
        """Send with the tag as the last bytes, or lose: a full queue on the way is no error."""
        self.socket.settimeout(0.2)
        try:
            self.socket.send(data[:-TAG_BYTES] + self._tag)
        except (TimeoutError, BlockingIOError, ConnectionRefusedError):
            return
        except OSError as error:
            if error.errno != 105:  # ENOBUFS
                raise

    def max_payload(self) -> int:
        """Bytes of a datagram that the way carries whole, as far as this host knows."""
        if self._family == socket.AF_INET6:  # IPV6_MTU; headers of IP and UDP
            return max(512, self.socket.getsockopt(socket.IPPROTO_IPV6, 24) - 48)
        return max(512, self.socket.getsockopt(socket.IPPROTO_IP, 14) - 28)  # IP_MTU

    def close(self) -> None:
        self.socket.close()


class PacketTrainReceiver:
    """The datagrams of a train: how fast they come, where nothing waits for what was lost."""

    def __init__(self, probe_socket: ProbeSocket) -> None:
        self._probe_socket, self._overflow_before = probe_socket, probe_socket.overflow
        self._marks: list[tuple[float, int]] = []
        self._read_times: list[float] = []

    def add(self, data: bytes, timestamp: float) -> None:
        self._read_times.append(time.monotonic())
        self._marks.append((timestamp, (self._marks[-1][1] if self._marks else 0) + len(data)))

    @property
    def has_started(self) -> bool:
        return bool(self._marks)

    def throughput(self) -> float:
        """Bytes/s from the first quarter on, which a token bucket may have let pass; 0 where too few came.

        The kernel's stamps are of the clock of the day: where that jumped meanwhile, there is no rate, either.
        """
        if len(self._marks) < 16:
            return 0.0
        first = len(self._marks) // 4
        start, before = self._marks[first]
        end, total = self._marks[-1]
        if abs((end - start) - (self._read_times[-1] - self._read_times[first])) > _MAX_CLOCK_JUMP_S:
            return 0.0
        dropped = (self._probe_socket.overflow - self._overflow_before) / len(self._marks)
        return (total - before) * (1 + dropped) / (end - start) if end > start else 0.0


class TokenBucket:
    """Bytes that may be moved: `rate` a second on average (0: no limit), and ten seconds' worth of them at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate or math.inf
        self._tokens, self._last_refill, self._lock = 10 * self._rate, time.monotonic(), threading.Lock()

    def try_consume(self, size: int) -> bool:
        """Whether so many may be moved now; then they count as moved."""
        if self._rate == math.inf:
            return True
        with self._lock:
            now = time.monotonic()
            self._tokens = min(10 * self._rate, self._tokens + (now - self._last_refill) * self._rate)
            self._last_refill = now
            if size > self._tokens:
                return False
            self._tokens -= size
            return True


class Pacer:
    """Waits so that no more than `rate` bytes/s are sent (0: no limit), with a tenth of a second's worth at once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._started, self._sent = rate or math.inf, time.monotonic(), 0

    def wait_to_send(self, size: int) -> None:
        ahead = self._sent / self._rate - (time.monotonic() - self._started) - 0.1
        if ahead > 0:
            time.sleep(ahead)
        self._sent += size
