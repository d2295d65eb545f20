"""Both sides of a pair over the loopback, and peers that hang, reject, falsify or disconnect."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.links.probe import pair_probe
from slurmdl.links.probe.channel import AuthenticatedChannel, Deadline, derive_secret
from slurmdl.links.probe.pair_probe import (
    PairMeasurement,
    ProbeConfig,
    Reflector,
    measure_pair,
    peers_to_check,
    unreachable_peers,
)
from slurmdl.links.probe.protocol import ControlChannel, Pacer, PacketTrainReceiver, ProbeSocket

SECRET = b"a secret of the probe"
SHORT = ProbeConfig(rtt_probes=20, rtt_seconds=0.05, loss_probes=200, loss_probe_rate=5000, stream_bytes=2_000_000,
                    stream_seconds=0.1, timeout_s=3.0)


def start_reflector(host: str = "127.0.0.1") -> Reflector:
    return Reflector(host, SECRET)


def measure(address: tuple[str, int], config: ProbeConfig = SHORT, secret: bytes = SECRET) -> PairMeasurement:
    return measure_pair(("a", "b"), address, config, secret)


@pytest.mark.parametrize(("listens", "host"), [("127.0.0.1", "127.0.0.1"), ("", "127.0.0.1"), ("", "::1")])
def test_pair_measures_all_metrics(listens, host):
    pair = measure((host, start_reflector(listens).port))
    assert min(pair.forward, pair.backward) > 1e7
    assert 0 < pair.rtt <= pair.rtt_p99
    assert pair.loss == 0.0


def test_throughput_at_the_rate_limit_is_not_reported(monkeypatch):
    limited = ProbeConfig(rtt_probes=5, rtt_seconds=0.02, loss_probes=50, stream_bytes=2_000_000, stream_seconds=0.2,
                          rate_limit=1e6)
    # on a busy host a stream may stop for a moment, and be slower than its limit; and datagrams may be lost
    monkeypatch.setattr(pair_probe, "_MAX_CLEAN_LOSS", 1.0)
    for name, rate in (("_stream_forward", 0.95e6), ("_stream_backward", 0.8e6)):
        measure_stream = getattr(pair_probe, name)
        monkeypatch.setattr(pair_probe, name, lambda control, config, measure=measure_stream, rate=rate: (
            rate if measure(control, config) else 0.0))
    pair = measure(("127.0.0.1", start_reflector().port), limited)
    assert (pair.forward, pair.backward) == (None, 0.8e6)


@pytest.mark.parametrize("secret", [b"other", b"", SECRET], ids=["other secret", "no secret", "closed port"])
def test_peer_that_does_not_answer_is_an_error(secret):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError):
        measure(("127.0.0.1", port if secret == SECRET else start_reflector().port), secret=secret)


def test_oldest_unauthenticated_connections_are_dropped(monkeypatch):
    monkeypatch.setattr("slurmdl.links.probe.pair_probe.HANDSHAKE_S", 300.0)  # none is dropped for its age
    served = start_reflector()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(100)]
        assert_answers(served)
        for each in idle[:30]:  # the oldest ones were dropped
            each.settimeout(60)
            # the nonce at most: on a busy host the connection may be dropped before its thread has run
            assert each.makefile("rb").read().count(b"\n") <= 1
        idle[-1].settimeout(60)
        assert idle[-1].recv(1), "the newest one is open"


def test_slow_handshake_is_aborted(monkeypatch):
    monkeypatch.setattr("slurmdl.links.probe.pair_probe.HANDSHAKE_S", 0.3)
    served = start_reflector()
    with socket.create_connection(("127.0.0.1", served.port)) as slow, pytest.raises(OSError):
        for _ in range(200):
            slow.sendall(b"0")
            time.sleep(0.05)


def record_session(served: Reflector) -> bytes:
    """Bytes that the client of a probe sent, recorded by a relay."""
    recorded_bytes: list[bytes] = []

    def relay(source: socket.socket, target: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    recorded_bytes.append(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def answer(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", served.port)) as onward:
            threading.Thread(target=relay, args=(onward, connection, False), daemon=True).start()
            relay(connection, onward, True)

    assert measure(start_peer(answer)).forward
    return b"".join(recorded_bytes)


def test_recorded_session_cannot_be_replayed():
    served = start_reflector()
    sent = record_session(served)
    assert SECRET not in sent
    assert SECRET.hex().encode() not in sent
    with socket.create_connection(("127.0.0.1", served.port)) as replay:
        replay.settimeout(5)
        with contextlib.suppress(OSError):
            replay.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert replay.makefile("rb").read().count(b"\n") == 1  # the nonce only
    assert_answers(served)


@pytest.mark.parametrize(("change", "accepted"), [
    (lambda lines: lines, 2),
    (lambda lines: [lines[0], lines[1].replace(b"number", b"figure")], 0),
    (lambda lines: [lines[0], lines[2]], 0),
    (lambda lines: [lines[0], lines[1], lines[1]], 1),
    (lambda lines: [lines[0], b"0" * 64 + b" {}\n"], 0),
    (lambda lines: [lines[0], lines[1].partition(b" ")[2]], 0),
    (lambda lines: [b"0" * 32 + b"\n", *lines[1:]], 0),
    (lambda lines: [b"\n", *lines[1:]], 0),
], ids=["unchanged", "changed", "left out", "repeated", "forged", "without a code", "other nonce", "no nonce"])
def test_only_authentic_lines_are_accepted(change, accepted):
    near, far_end = tcp_pair()
    relay_end, server_end = tcp_pair()
    with near, far_end, relay_end, server_end:
        client = AuthenticatedChannel(near, b"word", is_client=True, deadline=Deadline(5))
        server = AuthenticatedChannel(far_end, b"word", is_client=False, deadline=Deadline(5))
        client.write_message(number=0)
        client.write_message(number=1)
        relay_end.sendall(b"".join(change(far_end.recv(65536).splitlines(keepends=True))))
        relay_end.shutdown(socket.SHUT_WR)
        server.socket = server_end
        received = []
        with contextlib.suppress(OSError):
            while True:
                received.append(server.read_message())
    assert received == [{"number": number} for number in range(accepted)]


def test_lines_arrive_unchanged_and_reflected_lines_are_rejected():
    near, far_end = tcp_pair()
    with near, far_end:
        client = AuthenticatedChannel(near, b"word", is_client=True, deadline=Deadline(5))
        server = AuthenticatedChannel(far_end, b"word", is_client=False, deadline=Deadline(5))
        client.write_message(text="a\nb")
        assert server.read_message() == {"text": "a\nb"}
        server.write_message(number=1)
        assert client.read_message() == {"number": 1}
    near, far_end = tcp_pair()
    with near, far_end:
        echoed = AuthenticatedChannel(near, b"word", is_client=True, deadline=Deadline(5))
        far_end.sendall(far_end.recv(65536))
        echoed.write_message(number=1)
        far_end.sendall(far_end.recv(65536))
        with pytest.raises(OSError):
            echoed.read_message()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def test_datagrams_without_the_tag_are_dropped():
    left, right = ProbeSocket("127.0.0.1"), ProbeSocket("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outsider:
        for junk in (b"", b"x", bytes(64), b"\xff" * 64):
            outsider.sendto(junk, ("127.0.0.1", left.port))  # before the socket is connected
    left.connect(("127.0.0.1", right.port), b"test_tag")
    right.connect(("127.0.0.1", left.port), b"test_tag")
    right.send(b"data".ljust(64))
    assert left.receive(5)[0] == b"data".ljust(56) + b"test_tag"
    assert left.receive(0.0) is None
    left.close()
    right.close()


def assert_answers(served: Reflector) -> None:
    """Wait until the reflector answers: earlier sessions may end with a delay."""
    deadline = time.monotonic() + 5
    while True:
        try:
            assert measure(("127.0.0.1", served.port)).rtt > 0
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("behaves", ["waits forever", "sends untagged datagrams"])
def test_endless_packet_train_is_aborted(monkeypatch, behaves):
    monkeypatch.setattr("slurmdl.links.probe.pair_probe._MAX_REQUEST_S", 0.5)
    served, stopped = start_reflector(), threading.Event()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        control, own = ControlChannel(connection, SECRET, Deadline(5), is_client=True), ProbeSocket("127.0.0.1")
        control.write_message(udp=own.port)
        own.connect(("127.0.0.1", control.read_message()["udp"]), b"no tag")
        control.write_message(op="receive_train", size=1000)
        control.write_message(wait=1e9)

        def flood() -> None:
            while not stopped.is_set():
                own.send(bytes(100))

        sender = threading.Thread(target=flood)
        try:
            if "sends" in behaves:
                sender.start()
            connection.settimeout(3)  # less than the timeout of an idle session
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        finally:
            stopped.set()
            if "sends" in behaves:
                sender.join()
            own.close()


@pytest.mark.parametrize("sent", [
    b"[]\n", b"{}\n", b'{"udp": 9}\n', b"0" * 32 + b'\n{"udp": 9}\n', b"[" * 100 + b"\n", b"x" * 10_000,
    b"0" * 32 + b"\n" + b"0" * 64 + b' {"udp": 9}\n',
    [{}], [{"udp": "x"}], [{"udp": 99999}], [{"udp": float("inf")}], [{"udp": 9}, {"op": "unknown"}],
    [{"udp": 9}, {"op": "send_stream", "size": "all"}],
    [{"udp": 9}, {"op": "receive_stream", "size": -5, "seconds": float("nan")}]])
def test_reflector_survives_invalid_lines_and_authentic_requests(sent):
    served = start_reflector()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.settimeout(5)
        with contextlib.suppress(OSError):  # the reflector may close early
            if isinstance(sent, bytes):
                connection.sendall(sent)
            else:
                control = ControlChannel(connection, SECRET, Deadline(5), is_client=True)
                for message in sent:
                    control.write_message(**message)
                connection.sendall(b"x")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert_answers(served)


def start_peer(handle: Callable[[socket.socket], None]) -> tuple[str, int]:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with server, server.accept()[0] as connection, contextlib.suppress(OSError):
            handle(connection)

    threading.Thread(target=answer, daemon=True).start()
    address: tuple[str, int] = server.getsockname()
    return address


def disconnect_after_first_answer(connection: socket.socket) -> None:
    control = ControlChannel(connection, SECRET, Deadline(5), is_client=False)
    control.read_message()
    control.write_message(udp=9)


def send_slowly(connection: socket.socket) -> None:
    for _ in range(20):
        connection.sendall(b" ")
        time.sleep(0.1)


def report_implausible_rate(connection: socket.socket) -> None:
    """Report a rate above MAX_BANDWIDTH."""
    control, udp = ControlChannel(connection, SECRET, Deadline(5), is_client=False), ProbeSocket("127.0.0.1")
    control.read_message()
    control.write_message(udp=udp.port)
    while True:
        request = control.read_message()
        if "end" in request:
            control.write_message(received=20, overflow=0)
        elif request["op"] == "receive_stream":
            control.receive_stream()
            control.write_message(rate=1e30)


@pytest.mark.parametrize("handle", [lambda connection: time.sleep(2), disconnect_after_first_answer, send_slowly,
                                    report_implausible_rate], ids=["hangs", "disconnects", "slow", "implausible"])
def test_bad_peer_is_bounded_by_the_timeout(handle):
    config = ProbeConfig(rtt_probes=3, rtt_seconds=0.02, loss_probes=20, stream_bytes=10**5, stream_seconds=0.05,
                         timeout_s=0.7)
    start = time.monotonic()
    try:
        pair = measure(start_peer(handle), config)
    except Exception as error:
        assert isinstance(error, OSError)
    else:
        assert pair.forward is None
    assert time.monotonic() - start < 10


def test_pacer_waits_for_the_rate(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    pacer = Pacer(1000.0)
    for _ in range(10):
        pacer.wait_to_send(1000)
    assert waited[-1] == pytest.approx(8.9, abs=0.1)


STAMPS = [number / 1000 for number in range(101)]


@pytest.mark.parametrize(("stamps", "seconds", "overflow", "expected"), [
    (STAMPS, 0.1, 0, 1e6), (STAMPS, 0.1, 101, 2e6), (STAMPS[:10], 0.01, 0, 0.0), (STAMPS, 10.0, 0, 0.0),
    *(([*STAMPS[:50], *(stamp + jump for stamp in STAMPS[:50])], 0.1, 0, 0.0) for jump in (3600, -3600))],
    ids=["normal", "buffer overflows", "short", "clock jumps back a little", "clock jumps ahead", "clock jumps back"])
def test_throughput_of_a_packet_train(stamps, seconds, overflow, expected):
    """Kernel timestamps of datagrams that are read during `seconds` of the monotonic clock."""
    with contextlib.closing(ProbeSocket("127.0.0.1")) as datagrams:
        train = PacketTrainReceiver(datagrams)
        for stamp in stamps:
            train.add(bytes(1000), stamp)
        train._read_times = [seconds * i / len(stamps) for i in range(len(stamps))]
        datagrams.overflow += overflow
        assert train.throughput() == pytest.approx(expected)


# --- which pairs of nodes cannot exchange data


@given(st.integers(0, 60))
def test_every_pair_is_checked_once(count):
    checks = peers_to_check([str(i) for i in range(count)])
    pairs = [frozenset((node, peer)) for node, peers in checks.items() for peer in peers]
    assert len(set(pairs)) == len(pairs) == count * (count - 1) // 2
    assert all(len(pair) == 2 for pair in pairs)
    assert max(map(len, checks.values()), default=0) - min(map(len, checks.values()), default=0) <= 1


def test_peers_that_answer_are_reachable():
    peers = [(name, "127.0.0.1", Reflector("127.0.0.1", derive_secret(SECRET, name)).port) for name in ("n1", "n2")]
    assert unreachable_peers(peers, SECRET) == []
    assert unreachable_peers([*peers, ("n3", "127.0.0.1", peers[0][2])], SECRET) == ["n3"]  # not its secret


def stop_after_the_handshake(server: socket.socket, opened: list[socket.socket]) -> None:
    """Answer the small messages of the handshake, and read nothing more: full packets do not arrive."""
    connection, _ = server.accept()
    opened.append(connection)
    channel = AuthenticatedChannel(connection, derive_secret(SECRET, "n2"), is_client=False)
    channel.read_message()
    channel.write_message(udp=1)


@pytest.mark.parametrize("fault", ["closed", "silent", "full packets are lost"])
def test_broken_peer_is_unreachable(fault):
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if fault == "closed":
            server.close()
        elif fault == "full packets are lost":
            threading.Thread(target=stop_after_the_handshake, args=(server, opened), daemon=True).start()
        assert unreachable_peers([("n2", "127.0.0.1", port)], SECRET) == ["n2"]
    assert len(opened) == (fault == "full packets are lost")
    for connection in opened:
        connection.close()
