"""The side that asks: round trip, loss and throughput of the way to one peer, bounded in time and bytes."""

from __future__ import annotations

import socket
import struct
import time

from slurmdl.network.probe.channel import Deadline, Timeout
from slurmdl.network.probe.pair import Effort, Pair
from slurmdl.network.probe.reflector import ECHO, send_train
from slurmdl.network.probe.wire import Arrivals, Budget, Control, Datagrams
from slurmdl.network.samples import FASTEST

#: where more than this share of the datagrams is lost, TCP does not tell what the link carries
_CLEAN = 0.0005
#: number of the first datagram of a flow, that none of a round trip has, whose late echo may still come
_FLOW = 1_000_000_000
#: datagrams sent at once
_BURST = 8


def measure(names: tuple[str, str], address: tuple[str, int], effort: Effort, *, secret: bytes = b"",
            source: str = "") -> Pair:
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
    deadline = Deadline(effort.deadline)
    figures: dict[str, float] = {}
    with socket.create_connection(address, timeout=deadline.left(), source_address=(source, 0)) as connection:
        control = Control(connection, secret, deadline, asks=True)
        datagrams = Datagrams(connection.getsockname()[0])
        try:
            control.write(udp=datagrams.port)
            datagrams.connect((connection.getpeername()[0], int(control.read()["udp"])), control.tag)
            _measure(control, datagrams, effort, figures)
        except (OSError, KeyError, TypeError, ValueError) as error:
            if not figures:
                raise Timeout(str(error) or type(error).__name__) from error
        finally:
            datagrams.close()
    return Pair.from_json({"first": names[0], "second": names[1], **figures})


def _measure(control: Control, datagrams: Datagrams, effort: Effort, figures: dict[str, float]) -> None:
    control.write(do="echo", size=effort.echoes * ECHO)
    trips = _round_trips(datagrams, effort)
    control.write(end=True)
    control.read()
    if trips:
        figures["delay"], figures["delay_tail"] = trips[len(trips) // 2], trips[(len(trips) * 99) // 100]
    control.write(do="echo", size=effort.datagrams * ECHO)
    before, late = datagrams.overflow, min(0.5, 0.02 + 2 * figures.get("delay_tail", 0.1))
    sent, back = _flow(datagrams, effort)
    back += _echoes(datagrams, late)
    control.write(end=True)
    answer = control.read()
    back += _echoes(datagrams, late)  # those of a peer that was held up
    overflow = datagrams.overflow - before
    there, echoed = float(answer["received"]) + float(answer["overflow"]), float(answer["received"])
    if sent and there:
        ways = min(1.0, there / sent) * (min(1.0, (back + overflow) / echoed) if echoed else 0.0)
        figures["loss"] = 1 - ways ** 0.5
    elif sent:
        figures["loss"] = 1.0
    # at the limit, the link may well carry more; and no peer is believed what no link carries
    believed = 0.9 * effort.rate_limit if effort.rate_limit else FASTEST
    for key, ways_of in (("forward", (_stream_there, _train_there)), ("backward", (_stream_back, _train_back))):
        rate = ways_of[0](control, effort)
        if figures.get("loss", 0.0) > _CLEAN:
            rate = max(rate, ways_of[1](control, datagrams, effort))
        if 0 < rate < believed:
            figures[key] = rate


def _round_trips(datagrams: Datagrams, effort: Effort) -> list[float]:
    """Seconds of each round trip, sorted; those that got lost are not among them."""
    found: list[float] = []
    end, number = time.monotonic() + effort.echo_seconds, 0
    while number < effort.echoes and (number < 3 or time.monotonic() < end):
        number += 1
        began = time.perf_counter()
        datagrams.send(struct.pack("!I", number).ljust(ECHO))
        # one that is lost costs no more than the slowest so far, once some are known
        patience = max(0.02, 3 * found[-1]) if len(found) > 2 else 0.4
        while (left := began + patience - time.perf_counter()) > 0:
            answer = datagrams.receive(left)
            if answer is not None and struct.unpack("!I", answer[0][:4])[0] == number:
                found.append(time.perf_counter() - began)
                break
        found.sort()
    return found


def _flow(datagrams: Datagrams, effort: Effort) -> tuple[int, int]:
    """Send datagrams at an even pace; how many were sent, and how many have come back by then."""
    sent, back, began = 0, 0, time.monotonic()
    while sent < effort.datagrams:
        for _ in range(min(_BURST, effort.datagrams - sent)):
            datagrams.send(struct.pack("!I", _FLOW + sent).ljust(ECHO))
            sent += 1
        back += _echoes(datagrams, 0.0, began + sent / effort.datagram_rate)
    return sent, back


def _echoes(datagrams: Datagrams, quiet: float, until: float = 0.0) -> int:
    """Echoes of the flow that come until a moment, and then until none comes for `quiet` seconds."""
    count = 0
    while (answer := datagrams.receive(max(quiet, until - time.monotonic()))) is not None:
        count += struct.unpack("!I", answer[0][:4])[0] >= _FLOW
    return count


def _stream_there(control: Control, effort: Effort) -> float:
    control.write(do="take", size=effort.size)
    control.send_stream(effort.size, effort.seconds, Budget(effort.rate_limit).spend)
    return float(control.read()["rate"])


def _stream_back(control: Control, effort: Effort) -> float:
    size = int(min(effort.size, effort.rate_limit * effort.seconds or effort.size))
    control.write(do="send", size=size, seconds=effort.seconds)
    return control.receive_stream()


def _train_there(control: Control, datagrams: Datagrams, effort: Effort) -> float:
    control.write(do="train")
    send_train(datagrams, effort.seconds, effort.rate_limit)
    control.write(wait=0.05)
    return float(control.read()["rate"])


def _train_back(control: Control, datagrams: Datagrams, effort: Effort) -> float:
    control.write(do="send train", seconds=effort.seconds)
    arrivals = Arrivals(datagrams)
    while (found := datagrams.receive(max(0.3, effort.seconds) if not arrivals.begun else 0.1)) is not None:
        arrivals.take(*found)
    control.read()
    return arrivals.rate()
