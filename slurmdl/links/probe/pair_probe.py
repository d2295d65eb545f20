"""Probe of one pair of nodes, bounded in time and bytes: `measure_pair` and `unreachable_peers` ask, a `Reflector`
answers. A request is to echo datagrams, or to receive or send a stream or a packet train."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from slurmdl import records
from slurmdl.links.probe.channel import HANDSHAKE_S, Deadline, PeerError, derive_secret
from slurmdl.links.probe.protocol import CHUNK_BYTES, ControlChannel, Pacer, PacketTrainReceiver, ProbeSocket
from slurmdl.links.samples import MAX_BANDWIDTH
from slurmdl.records import Valid

_MAX_LOSS_PROBES = 10_000  # enough to measure a loss of 3 % to 0.1 points over three peers
_MAX_CLEAN_LOSS = 0.0005  # loss above which the throughput of TCP is below that of the link
#: id of the first loss probe; RTT probes, whose echoes may be late, have smaller ones
_FIRST_LOSS_PROBE_ID = 1_000_000_000
_BURST_DATAGRAMS = 8  # loss probes sent back to back
_ECHO_BYTES, _PACKET_TRAIN_LENGTH = 64, 256

_MAX_STREAM_BYTES = 2**30
#: time limits of one answer, of the wait for the next request, and of a session
_MAX_REQUEST_S, _MAX_IDLE_S, _MAX_SESSION_S = 10.0, 5.0, 30.0
#: connections that are not yet authenticated; the oldest is dropped for a new one
_MAX_UNAUTHENTICATED = 64
_ACCEPT_BACKLOG = 1024

#: check of a pair: bytes per direction, and seconds after which it counts as broken (Linux repeats a SYN after 1 s)
_CHECK_BYTES, _CHECK_TIMEOUT_S = 65_536, 2.0
_CONCURRENT_CHECKS = 8  # pairs that a node checks at once

#: a node: name, address and port of its reflector
Peer = tuple[str, str, int]
Measured = Annotated[float, Valid(lambda number: 0 <= number < MAX_BANDWIDTH,
                                  f"a number from 0 to {MAX_BANDWIDTH:g}")]


@dataclass(frozen=True)
class ProbeConfig:
    """Cost of probing one pair of nodes.

    Attributes:
        rtt_probes: sequential RTT measurements, within `rtt_seconds`.
        loss_probes: small datagrams, sent at `loss_probe_rate` per second and echoed.
        stream_bytes, stream_seconds: limits of one stream; there is one per direction.
        rate_limit: bytes/s of a stream, 0 for no limit.
        timeout_s: of the whole probe.
    """

    rtt_probes: int = 100
    rtt_seconds: float = 0.25
    loss_probes: int = 2000
    loss_probe_rate: float = 5000.0
    stream_bytes: int = 16_000_000
    stream_seconds: float = 0.3
    rate_limit: float = 0.0
    timeout_s: float = 5.0

    def scaled_to(self, seconds: float) -> ProbeConfig:
        """Scale all costs down to about `seconds` per pair, or fill them up with more loss probes."""
        scale = seconds / self.expected_s
        if scale >= 1:
            more = (seconds - self.expected_s) * self.loss_probe_rate
            return replace(self, loss_probes=min(_MAX_LOSS_PROBES, self.loss_probes + int(more)),
                           timeout_s=self.timeout_s + seconds)
        return replace(self, rtt_probes=max(5, int(self.rtt_probes * scale)), rtt_seconds=self.rtt_seconds * scale,
                       loss_probes=max(50, int(self.loss_probes * scale)),
                       stream_bytes=max(10**6, int(self.stream_bytes * scale)),
                       stream_seconds=self.stream_seconds * scale, timeout_s=min(self.timeout_s, 3 * seconds + 0.5))

    @property
    def expected_s(self) -> float:
        """Seconds per pair on healthy links."""
        return self.rtt_seconds + self.loss_probes / self.loss_probe_rate + 2 * self.stream_seconds


@dataclass(frozen=True)
class PairMeasurement:
    """Measurement of the path between two nodes; None for values that are unknown.

    Attributes:
        forward, backward: bytes/s from the first node to the second, and back.
        rtt, rtt_p99: round-trip time in s, median and 99th percentile.
        loss: fraction of datagrams lost one way, mean of both directions.
    """

    first: str
    second: str
    forward: Measured | None = None
    backward: Measured | None = None
    rtt: Measured | None = None
    rtt_p99: Measured | None = None
    loss: Measured | None = None

    @property
    def throughput(self) -> float | None:
        """Bytes/s of the slower direction."""
        return min((value for value in (self.forward, self.backward) if value is not None), default=None)


def measure_pair(names: tuple[str, str], address: tuple[str, int], config: ProbeConfig, secret: bytes,
                 source: str = "") -> PairMeasurement:
    """Probe the peer at `address`; results up to an error or the deadline are kept.

    Throughput is measured by one TCP stream per direction. If datagrams are lost, a packet train is sent as well and
    the faster result counts: the effect of loss on TCP is modeled later, from the loss and the RTT. Raises OSError if
    nothing could be measured: the peer is down, hangs or rejects the probe. `secret` is that of the peer's reflector,
    `source` the own address, "" for that of the route.
    """
    deadline = Deadline(config.timeout_s)
    results: dict[str, float] = {}
    with socket.create_connection(address, timeout=deadline.remaining_s(), source_address=(source, 0)) as connection:
        control = ControlChannel(connection, secret, deadline, is_client=True)
        try:
            with closing(ProbeSocket(connection.getsockname()[0])) as probe_socket:
                control.write_message(udp=probe_socket.port)
                probe_socket.connect((connection.getpeername()[0], int(control.read_message()["udp"])), control.tag)
                _run_probes(control, probe_socket, config, results)
        except (OSError, KeyError, TypeError, ValueError) as error:
            if not results:
                raise PeerError(str(error) or type(error).__name__) from error
    return records.from_json(PairMeasurement, {"first": names[0], "second": names[1], **results})


def _run_probes(control: ControlChannel, probe_socket: ProbeSocket,
                config: ProbeConfig, results: dict[str, float]) -> None:
    control.write_message(op="echo", size=config.rtt_probes * _ECHO_BYTES)
    rtts = _measure_rtts(probe_socket, config)
    control.write_message(end=True)
    control.read_message()
    if rtts:
        results["rtt"], results["rtt_p99"] = rtts[len(rtts) // 2], rtts[(len(rtts) * 99) // 100]
    control.write_message(op="echo", size=config.loss_probes * _ECHO_BYTES)
    overflow_before, quiet_s = probe_socket.overflow, min(0.5, 0.02 + 2 * results.get("rtt_p99", 0.1))
    sent, returned = _loss_stream(probe_socket, config)
    returned += _count_echoes(probe_socket, quiet_s)
    control.write_message(end=True)
    answer = control.read_message()
    returned += _count_echoes(probe_socket, quiet_s)  # late echoes of a busy peer
    returned += probe_socket.overflow - overflow_before
    echoed, dropped = float(answer["received"]), float(answer["overflow"])
    delivered = min(1.0, (echoed + dropped) / sent) * min(1.0, returned / echoed) if echoed else 0.0
    results["loss"] = 1 - delivered ** 0.5
    # a rate at the limit is only a lower bound of the throughput; implausible rates of a peer are dropped
    max_rate = 0.9 * config.rate_limit if config.rate_limit else MAX_BANDWIDTH
    for key, measure_stream, measure_train in (("forward", _stream_forward, _packet_train_forward),
                                               ("backward", _stream_backward, _packet_train_backward)):
        rate = measure_stream(control, config)
        if results.get("loss", 0.0) > _MAX_CLEAN_LOSS:
            rate = max(rate, measure_train(control, probe_socket, config))
        if 0 < rate < max_rate:
            results[key] = rate


def _measure_rtts(probe_socket: ProbeSocket, config: ProbeConfig) -> list[float]:
    """Sorted RTTs in s of the probes that were echoed."""
    rtts: list[float] = []
    end, number = time.monotonic() + config.rtt_seconds, 0
    while number < config.rtt_probes and (number < 3 or time.monotonic() < end):
        number += 1
        start = time.perf_counter()
        probe_socket.send(struct.pack("!I", number).ljust(_ECHO_BYTES))
        timeout_s = max(0.02, 3 * rtts[-1]) if len(rtts) > 2 else 0.4
        while (remaining_s := start + timeout_s - time.perf_counter()) > 0:
            datagram = probe_socket.receive(remaining_s)
            if datagram is not None and struct.unpack("!I", datagram[0][:4])[0] == number:
                rtts.append(time.perf_counter() - start)
                break
        rtts.sort()
    return rtts


def _loss_stream(probe_socket: ProbeSocket, config: ProbeConfig) -> tuple[int, int]:
    """Send loss probes at a constant rate; return how many were sent, and how many echoes arrived meanwhile."""
    sent, returned, start = 0, 0, time.monotonic()
    while sent < config.loss_probes:
        for _ in range(min(_BURST_DATAGRAMS, config.loss_probes - sent)):
            probe_socket.send(struct.pack("!I", _FIRST_LOSS_PROBE_ID + sent).ljust(_ECHO_BYTES))
            sent += 1
        returned += _count_echoes(probe_socket, 0.0, start + sent / config.loss_probe_rate)
    return sent, returned


def _count_echoes(probe_socket: ProbeSocket, quiet_s: float, until: float = 0.0) -> int:
    """Count echoes of loss probes until `until` (monotonic), and then until none arrives for `quiet_s`."""
    count = 0
    while (datagram := probe_socket.receive(max(quiet_s, until - time.monotonic()))) is not None:
        count += struct.unpack("!I", datagram[0][:4])[0] >= _FIRST_LOSS_PROBE_ID
    return count


def _stream_forward(control: ControlChannel, config: ProbeConfig) -> float:
    control.write_message(op="receive_stream", size=config.stream_bytes)
    control.send_stream(config.stream_bytes, config.stream_seconds, config.rate_limit)
    return float(control.read_message()["rate"])


def _stream_backward(control: ControlChannel, config: ProbeConfig) -> float:
    size = int(min(config.stream_bytes, config.rate_limit * config.stream_seconds or config.stream_bytes))
    control.write_message(op="send_stream", size=size, seconds=config.stream_seconds)
    return control.receive_stream()


def _packet_train_forward(control: ControlChannel, probe_socket: ProbeSocket, config: ProbeConfig) -> float:
    control.write_message(op="receive_train")
    _send_packet_train(probe_socket, config.stream_seconds, config.rate_limit)
    control.write_message(wait=0.05)
    return float(control.read_message()["rate"])


def _packet_train_backward(control: ControlChannel, probe_socket: ProbeSocket, config: ProbeConfig) -> float:
    control.write_message(op="send_train", seconds=config.stream_seconds)
    train, wait_s = PacketTrainReceiver(probe_socket), max(0.3, config.stream_seconds)
    while (datagram := probe_socket.receive(wait_s)) is not None:
        train.add(*datagram)
        wait_s = 0.1
    control.read_message()
    return train.throughput()


def peers_to_check(nodes: Sequence[str]) -> dict[str, list[str]]:
    """Node -> the peers that it checks: every pair once, and at most one pair more for some nodes than for others."""
    count = len(nodes)
    return {node: [nodes[(i + step) % count] for step in range(1, count // 2 + 1)
                   if 2 * step < count or i < count // 2]
            for i, node in enumerate(nodes)}


def unreachable_peers(peers: Sequence[Peer], secret: bytes, source: str = "") -> list[str]:
    """Names of the peers that do not exchange data with this node in time.

    A wrong route, firewall or MTU breaks single pairs of nodes, and a program hangs in its first collective
    operation. The few measured pairs may all be good, so every pair is checked, by a short stream in both directions:
    full packets show what small messages do not, e.g. a wrong MTU.

    Args:
        secret: of the probe.
        source: own address, "" for that of the route.
    """
    def is_reachable(peer: Peer) -> bool:
        name, address, port = peer
        try:
            _exchange_data((address, port), derive_secret(secret, name), source)
        except (OSError, KeyError, TypeError, ValueError):
            return False
        return True

    with ThreadPoolExecutor(_CONCURRENT_CHECKS) as pool:
        results = pool.map(is_reachable, peers)
        return [peer[0] for peer, reachable in zip(peers, results, strict=True) if not reachable]


def _exchange_data(address: tuple[str, int], secret: bytes, source: str) -> None:
    deadline = Deadline(_CHECK_TIMEOUT_S)
    with socket.create_connection(address, timeout=_CHECK_TIMEOUT_S, source_address=(source, 0)) as connection:
        control = ControlChannel(connection, secret, deadline, is_client=True)
        control.write_message(udp=0)
        control.read_message()
        control.write_message(op="receive_stream", size=_CHECK_BYTES)
        control.send_stream(_CHECK_BYTES, _CHECK_TIMEOUT_S)
        control.read_message()
        control.write_message(op="send_stream", size=_CHECK_BYTES, seconds=_CHECK_TIMEOUT_S)
        control.receive_stream()


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
            control.write_message(**_echo_datagrams(control, probe_socket, size // _ECHO_BYTES))
        case "receive_stream":
            control.write_message(rate=control.receive_stream(size + 2 * CHUNK_BYTES))
        case "send_stream":
            control.send_stream(size, seconds)
        case "receive_train":
            control.write_message(rate=_receive_packet_train(control, probe_socket))
        case "send_train":
            _send_packet_train(probe_socket, seconds, 0)
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
            if datagram is not None and len(datagram[0]) <= _ECHO_BYTES:
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


def _send_packet_train(probe_socket: ProbeSocket, seconds: float, rate: float) -> None:
    """Send up to _PACKET_TRAIN_LENGTH datagrams of the largest size back to back, for at most `seconds`."""
    deadline, pacer, data = Deadline(seconds), Pacer(rate), bytes(probe_socket.max_payload())
    try:
        for _ in range(_PACKET_TRAIN_LENGTH):
            deadline.remaining_s()
            pacer.wait_to_send(len(data))
            probe_socket.send(data)
    except PeerError:
        return
