"""The side that asks: round trip, loss and throughput of the way to one peer, bounded in time and bytes."""

from __future__ import annotations

import socket
import struct
import time

from slurmdl.links.probe.channel import Deadline, PeerError
from slurmdl.links.probe.measurement import PairMeasurement, ProbeConfig
from slurmdl.links.probe.protocol import ControlChannel, Pacer, PacketTrainReceiver, ProbeSocket
from slurmdl.links.probe.reflector import ECHO_BYTES, send_packet_train
from slurmdl.links.samples import MAX_BANDWIDTH

#: where more than this share of the datagrams is lost, TCP does not tell what the link carries
_MAX_CLEAN_LOSS = 0.0005
#: number of the first datagram of a flow, that none of a round trip has, whose late echo may still come
_FIRST_LOSS_PROBE_ID = 1_000_000_000
#: datagrams sent at once
_BURST_DATAGRAMS = 8


def measure_pair(names: tuple[str, str], address: tuple[str, int], config: ProbeConfig, *, secret: bytes = b"",
            source: str = "") -> PairMeasurement:
    """Probe the peer at `address`.

    What is known when the deadline or the peer ends the probe is kept. The throughput is that of one TCP stream
    each way; where datagrams get lost, a short train of large ones is sent, too, and the faster counts: TCP slows
    down on such a link by itself, and how much it does follows from the loss and the round trip.

    Parameters
    ----------
    secret : that the peer's reflector has.
    source : the own address to probe from, "" for the one that the route gives.

    Raises
    ------
    OSError : nothing could be measured: the peer is away, hangs or refuses.
    """
    deadline = Deadline(config.timeout_s)
    figures: dict[str, float] = {}
    with socket.create_connection(address, timeout=deadline.remaining_s(), source_address=(source, 0)) as connection:
        control = ControlChannel(connection, secret, deadline, is_client=True)
        datagrams = ProbeSocket(connection.getsockname()[0])
        try:
            control.write_message(udp=datagrams.port)
            datagrams.connect((connection.getpeername()[0], int(control.read_message()["udp"])), control.tag)
            _run_probes(control, datagrams, config, figures)
        except (OSError, KeyError, TypeError, ValueError) as error:
            if not figures:
                raise PeerError(str(error) or type(error).__name__) from error
        finally:
            datagrams.close()
    return PairMeasurement.from_json({"first": names[0], "second": names[1], **figures})


def _run_probes(control: ControlChannel, probe_socket: ProbeSocket,
                config: ProbeConfig, results: dict[str, float]) -> None:
    control.write_message(do="echo", size=config.rtt_probes * ECHO_BYTES)
    trips = _measure_rtts(probe_socket, config)
    control.write_message(end=True)
    control.read_message()
    if trips:
        results["delay"], results["delay_tail"] = trips[len(trips) // 2], trips[(len(trips) * 99) // 100]
    control.write_message(do="echo", size=config.loss_probes * ECHO_BYTES)
    before, late = probe_socket.overflow, min(0.5, 0.02 + 2 * results.get("delay_tail", 0.1))
    sent, back = _loss_stream(probe_socket, config)
    back += _count_echoes(probe_socket, late)
    control.write_message(end=True)
    answer = control.read_message()
    back += _count_echoes(probe_socket, late)  # those of a peer that was held up
    overflow = probe_socket.overflow - before
    there, echoed = float(answer["received"]) + float(answer["overflow"]), float(answer["received"])
    if sent and there:
        ways = min(1.0, there / sent) * (min(1.0, (back + overflow) / echoed) if echoed else 0.0)
        results["loss"] = 1 - ways ** 0.5
    elif sent:
        results["loss"] = 1.0
    # at the limit, the link may well carry more; and no peer is believed what no link carries
    believed = 0.9 * config.rate_limit if config.rate_limit else MAX_BANDWIDTH
    for key, ways_of in (("forward", (_stream_forward, _packet_train_forward)),
                         ("backward", (_stream_backward, _packet_train_backward))):
        rate = ways_of[0](control, config)
        if results.get("loss", 0.0) > _MAX_CLEAN_LOSS:
            rate = max(rate, ways_of[1](control, probe_socket, config))
        if 0 < rate < believed:
            results[key] = rate


def _measure_rtts(probe_socket: ProbeSocket, config: ProbeConfig) -> list[float]:
    """Seconds of each round trip, sorted; those that got lost are not among them."""
    found: list[float] = []
    end, number = time.monotonic() + config.rtt_seconds, 0
    while number < config.rtt_probes and (number < 3 or time.monotonic() < end):
        number += 1
        began = time.perf_counter()
        probe_socket.send(struct.pack("!I", number).ljust(ECHO_BYTES))
        # one that is lost costs no more than the slowest so far, once some are known
        patience = max(0.02, 3 * found[-1]) if len(found) > 2 else 0.4
        while (left := began + patience - time.perf_counter()) > 0:
            answer = probe_socket.receive(left)
            if answer is not None and struct.unpack("!I", answer[0][:4])[0] == number:
                found.append(time.perf_counter() - began)
                break
        found.sort()
    return found


def _loss_stream(probe_socket: ProbeSocket, config: ProbeConfig) -> tuple[int, int]:
    """Send datagrams at an even pace; how many were sent, and how many have come back by then."""
    sent, back, began = 0, 0, time.monotonic()
    while sent < config.loss_probes:
        for _ in range(min(_BURST_DATAGRAMS, config.loss_probes - sent)):
            probe_socket.send(struct.pack("!I", _FIRST_LOSS_PROBE_ID + sent).ljust(ECHO_BYTES))
            sent += 1
        back += _count_echoes(probe_socket, 0.0, began + sent / config.loss_probe_rate)
    return sent, back


def _count_echoes(probe_socket: ProbeSocket, quiet_s: float, until: float = 0.0) -> int:
    """Echoes of the flow that come until a moment, and then until none comes for `quiet` seconds."""
    count = 0
    while (answer := probe_socket.receive(max(quiet_s, until - time.monotonic()))) is not None:
        count += struct.unpack("!I", answer[0][:4])[0] >= _FIRST_LOSS_PROBE_ID
    return count


def _stream_forward(control: ControlChannel, config: ProbeConfig) -> float:
    control.write_message(do="take", size=config.stream_bytes)
    control.send_stream(config.stream_bytes, config.stream_seconds, Pacer(config.rate_limit).wait_to_send)
    return float(control.read_message()["rate"])


def _stream_backward(control: ControlChannel, config: ProbeConfig) -> float:
    size = int(min(config.stream_bytes, config.rate_limit * config.stream_seconds or config.stream_bytes))
    control.write_message(do="send", size=size, seconds=config.stream_seconds)
    return control.receive_stream()


def _packet_train_forward(control: ControlChannel, probe_socket: ProbeSocket, config: ProbeConfig) -> float:
    control.write_message(do="train")
    send_packet_train(probe_socket, config.stream_seconds, config.rate_limit)
    control.write_message(wait=0.05)
    return float(control.read_message()["rate"])


def _packet_train_backward(control: ControlChannel, probe_socket: ProbeSocket, config: ProbeConfig) -> float:
    control.write_message(do="send train", seconds=config.stream_seconds)
    arrivals = PacketTrainReceiver(probe_socket)
    while (found := probe_socket.receive(max(0.3, config.stream_seconds)
           if not arrivals.has_started else 0.1)) is not None:
        arrivals.add(*found)
    control.read_message()
    return arrivals.throughput()
