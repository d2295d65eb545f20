"""Data that the two sides of a probe exchange: messages and streams over TCP, datagrams over UDP; rate limits."""

from __future__ import annotations

import errno
import ipaddress
import math
import socket
import struct
import time

from slurmdl.links.probe.channel import TAG_BYTES, AuthenticatedChannel, Deadline, PeerError

CHUNK_BYTES = 16_384  # a stream consists of chunks; the first byte of the last one is 0
_TCP_NOTSENT_LOWAT = 25  # linux/tcp.h
_IP_MTU, _IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h
_SO_TIMESTAMPNS, _SO_RXQ_OVFL = 35, 40  # asm-generic/socket.h
#: requested buffer size; the kernel limits it to net.core.rmem_max
_RECEIVE_BUFFER_BYTES = 4 * 2**20
#: seconds by which two clocks may differ over a packet train before its rate is discarded
_MAX_CLOCK_JUMP_S = 0.25


class ControlChannel(AuthenticatedChannel):
    """Connection of a probe: messages and streams with deadlines."""

    deadline: Deadline

    def __init__(self, connection: socket.socket, secret: bytes, deadline: Deadline, *, is_client: bool) -> None:
        # queued data is still sent after the deadline: keep the queue short
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, 4 * CHUNK_BYTES)
        super().__init__(connection, secret, is_client=is_client, deadline=deadline)

    def send_stream(self, size: int, seconds: float, rate: float = 0.0) -> None:
        """Send `size` bytes, or for `seconds`, at up to `rate` bytes/s (0: no limit)."""
        chunk, last = b"\1" + bytes(CHUNK_BYTES - 1), bytes(CHUNK_BYTES)
        end, pacer = time.monotonic() + seconds, Pacer(rate)
        for _ in range(max(1, size // CHUNK_BYTES)):
            pacer.wait_to_send(CHUNK_BYTES)
            self.socket.settimeout(self.deadline.remaining_s())
            if time.monotonic() > end:
                break
            self.socket.sendall(chunk)
        self.socket.sendall(last)

    def receive_stream(self, max_bytes: float = math.inf) -> float:
        """Receive a stream of at most `max_bytes`, and return its `steady_state_rate` in bytes/s."""
        chunk, marks = memoryview(bytearray(CHUNK_BYTES)), [(time.monotonic(), 0)]
        received, is_last = len(self._buffer), False
        chunk[:received], self._buffer = self._buffer[:CHUNK_BYTES], b""
        while not is_last:
            while received < CHUNK_BYTES:
                self.socket.settimeout(self.deadline.remaining_s())
                count = self.socket.recv_into(chunk[received:])
                if not count:
                    raise PeerError("the peer closed the connection")
                received += count
            is_last, received = chunk[0] != 1, 0
            if marks[-1][1] > max_bytes:
                raise PeerError("the peer sends more than it announced")
            marks.append((time.monotonic(), marks[-1][1] + CHUNK_BYTES))
        return steady_state_rate(marks)


def steady_state_rate(marks: list[tuple[float, int]]) -> float:
    """Rate in bytes/s of a stream, given (time in s, bytes so far).

    The larger of the rates after the first quarter and after the first half: slow start (RFC 5681) makes the start
    slow, a full token bucket makes it fast. A stream too short for that counts as a whole.
    """
    end, total = marks[-1]

    def rate_after(fraction: float) -> float:
        start, before = next(mark for mark in marks if mark[1] >= fraction * total)
        return (total - before) / (end - start) if end > start else 0.0

    return max(rate_after(0.25), rate_after(0.5)) or rate_after(0.0)


class ProbeSocket:
    """UDP socket for one peer, with kernel timestamps and a count of receive buffer overflows.

    Each datagram ends with the tag of the session; datagrams without it are dropped. `overflow` counts the datagrams
    that the full receive buffer dropped, not the network.
    """

    def __init__(self, address: str) -> None:
        own = _plain_address(address)
        self._family = socket.AF_INET6 if ":" in own else socket.AF_INET
        self.socket = socket.socket(self._family, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
        self.socket.bind((own, 0))
        self.port: int = self.socket.getsockname()[1]
        self.overflow, self._tag = 0, b""

    def connect(self, peer: tuple[str, int], tag: bytes) -> None:
        """Set the only peer (address, port), and the tag of the session."""
        self.socket.connect((_plain_address(peer[0]), peer[1]))
        self._tag = tag

    def receive(self, timeout_s: float) -> tuple[bytes, float] | None:
        """Next datagram and the kernel's arrival time in s; None after `timeout_s`."""
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
                return None  # untagged datagrams do not extend the timeout
        timestamp = time.time()
        for _, kind, value in ancillary:
            if kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = struct.unpack("qq", value[:16])
                timestamp = seconds + nanoseconds * 1e-9
            elif kind == _SO_RXQ_OVFL:
                self.overflow = struct.unpack("I", value[:4])[0]
        return data, timestamp

    def send(self, data: bytes) -> None:
        """Send `data` with the tag in its last bytes; a full queue counts as loss, not as an error."""
        self.socket.settimeout(0.2)
        try:
            self.socket.send(data[:-TAG_BYTES] + self._tag)
        except (TimeoutError, BlockingIOError, ConnectionRefusedError):
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise

    def max_payload(self) -> int:
        """Largest datagram in bytes that this host knows to fit the path's MTU."""
        if self._family == socket.AF_INET6:
            return max(512, self.socket.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU) - 48)
        return max(512, self.socket.getsockopt(socket.IPPROTO_IP, _IP_MTU) - 28)

    def close(self) -> None:
        self.socket.close()


def _plain_address(host: str) -> str:
    """Address of a socket without its scope; an IPv4-mapped IPv6 address becomes IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


class PacketTrainReceiver:
    """Throughput of a packet train, which, unlike a TCP stream, does not slow down after losses."""

    def __init__(self, probe_socket: ProbeSocket) -> None:
        self._probe_socket, self._overflow_before = probe_socket, probe_socket.overflow
        self._marks: list[tuple[float, int]] = []
        self._read_times: list[float] = []

    def add(self, data: bytes, timestamp: float) -> None:
        self._read_times.append(time.monotonic())
        self._marks.append((timestamp, (self._marks[-1][1] if self._marks else 0) + len(data)))

    def throughput(self) -> float:
        """Bytes/s after the first quarter, which a token bucket may have let pass; 0 if it is unknown.

        It is unknown if fewer than 16 datagrams arrived, or if the wall clock of the kernel's timestamps jumped.
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


class Pacer:
    """Delays a sender to `rate` bytes/s (0: no limit) with a burst of a tenth of a second."""

    def __init__(self, rate: float) -> None:
        self._rate, self._started, self._sent = rate or math.inf, time.monotonic(), 0

    def wait_to_send(self, size: int) -> None:
        ahead_s = self._sent / self._rate - (time.monotonic() - self._started) - 0.1
        if ahead_s > 0:
            time.sleep(ahead_s)
        self._sent += size
