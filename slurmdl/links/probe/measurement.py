"""Measurement of the path between two nodes: its cost, its result, and the probes, bounded in time and bytes."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated

from slurmdl import records
from slurmdl.links.probe.channel import Deadline, PeerError
from slurmdl.links.probe.protocol import ControlChannel, PacketTrainReceiver, ProbeSocket
from slurmdl.links.probe.reflector import ECHO_BYTES, send_packet_train
from slurmdl.links.samples import MAX_BANDWIDTH
from slurmdl.records import Valid

MAX_LOSS_PROBES = 10_000  # enough to measure a loss of 3 % to 0.1 points over three peers
_MAX_CLEAN_LOSS = 0.0005  # loss above which the throughput of TCP is below that of the link
#: id of the first loss probe; RTT probes, whose echoes may be late, have smaller ones
_FIRST_LOSS_PROBE_ID = 1_000_000_000
_BURST_DATAGRAMS = 8  # loss probes sent back to back

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
            return replace(self, loss_probes=min(MAX_LOSS_PROBES, self.loss_probes + int(more)),
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
    control.write_message(op="echo", size=config.rtt_probes * ECHO_BYTES)
    rtts = _measure_rtts(probe_socket, config)
    control.write_message(end=True)
    control.read_message()
    if rtts:
        results["rtt"], results["rtt_p99"] = rtts[len(rtts) // 2], rtts[(len(rtts) * 99) // 100]
    control.write_message(op="echo", size=config.loss_probes * ECHO_BYTES)
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
        probe_socket.send(struct.pack("!I", number).ljust(ECHO_BYTES))
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
            probe_socket.send(struct.pack("!I", _FIRST_LOSS_PROBE_ID + sent).ljust(ECHO_BYTES))
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
    send_packet_train(probe_socket, config.stream_seconds, config.rate_limit)
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
