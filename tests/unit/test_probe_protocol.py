"""The two sides of a probe over the loopback, and peers that hang, reject, lie or disconnect."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

import pytest

from slurmdl.cli.address import parse_networks
from slurmdl.links.probe.channel import AuthenticatedChannel, Deadline
from slurmdl.links.probe.measure import measure_pair
from slurmdl.links.probe.measurement import ProbeConfig
from slurmdl.links.probe.peer_prober import probe_peers, ring_peers
from slurmdl.links.probe.protocol import ControlChannel, Pacer, PacketTrainReceiver, ProbeSocket, TokenBucket
from slurmdl.links.probe.reflector import Reflector
from slurmdl.sandbox.spec import round_robin_topology

SHORT = ProbeConfig(rtt_probes=20, rtt_seconds=0.05, loss_probes=200, loss_probe_rate=5000, stream_bytes=2_000_000,
                    stream_seconds=0.1, timeout_s=3.0)


@pytest.fixture
def reflector():
    reflectors: list[Reflector] = []

    def make(**options: object) -> Reflector:
        reflectors.append(Reflector("127.0.0.1", **options))  # type: ignore[arg-type]
        return reflectors[-1]

    yield make
    for each in reflectors:
        each.close()


def test_pair_measures_all_metrics(reflector):
    pair = measure_pair(("a", "b"), ("127.0.0.1", reflector(secret=b"word").port), SHORT, secret=b"word")
    assert min(pair.forward, pair.backward) > 1e7
    assert 0 < pair.rtt <= pair.rtt_p99
    assert pair.loss == 0.0


def test_throughput_at_the_rate_limit_is_not_reported(reflector):
    limited = ProbeConfig(rtt_probes=5, rtt_seconds=0.02, loss_probes=50, stream_bytes=2_000_000, stream_seconds=0.2,
                          rate_limit=1e6)
    pair = measure_pair(("a", "b"), ("127.0.0.1", reflector().port), limited)
    assert (pair.forward, pair.backward) == (None, None)


@pytest.mark.parametrize("options", [{"secret": b"other"},
                                     {"allowed_networks": (ipaddress.IPv4Network("192.0.2.0/24"),)}])
def test_peer_without_secret_or_network_is_rejected(reflector, options):
    with pytest.raises(OSError):
        measure_pair(("a", "b"), ("127.0.0.1", reflector(**options).port), SHORT, secret=b"word")


def session(served: Reflector, secret: bytes = b"", source: str = "127.0.0.1") -> ControlChannel:
    """An accepted session; OSError if it is rejected."""
    connection = socket.create_connection(("127.0.0.1", served.port), source_address=(source, 0))
    control = ControlChannel(connection, secret, Deadline(5), is_client=True)
    control.write_message(udp=9)
    control.read_message()
    return control


def test_sessions_are_bounded_with_half_of_them_per_host(reflector):
    served = reflector(max_sessions=4)
    sessions = [session(served), session(served)]
    with pytest.raises(OSError):
        session(served)
    sessions += [session(served, source="127.0.0.2"), session(served, source="127.0.0.2")]
    with pytest.raises(OSError):
        session(served, source="127.0.0.3")
    for control in sessions:
        control.socket.close()
    assert_answers(served)


def test_unauthenticated_connections_take_no_session(reflector):
    served = reflector(max_sessions=1, secret=b"word")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(100)]
        assert_answers(served, b"word")
        for each in idle[:30]:  # the oldest ones were dropped
            each.settimeout(5)
            assert each.makefile("rb").read().count(b"\n") == 1  # the nonce only


def test_slow_handshake_is_aborted(reflector, monkeypatch):
    monkeypatch.setattr("slurmdl.links.probe.reflector.HANDSHAKE_S", 0.3)
    served = reflector()
    with socket.create_connection(("127.0.0.1", served.port)) as slow, pytest.raises(OSError):
        for _ in range(200):
            slow.sendall(b"0")
            time.sleep(0.05)


def recorded(served: Reflector, secret: bytes) -> bytes:
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

    pair = measure_pair(("a", "b"), peer_that(answer), SHORT, secret=secret)
    assert pair.forward
    return b"".join(recorded_bytes)


def test_recorded_session_cannot_be_replayed(reflector):
    secret = b"a secret of the probe"
    served = reflector(secret=secret, max_sessions=1)
    sent = recorded(served, secret)
    assert secret not in sent
    assert secret.hex().encode() not in sent
    with socket.create_connection(("127.0.0.1", served.port)) as again:
        again.settimeout(5)
        with contextlib.suppress(OSError):
            again.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert again.makefile("rb").read().count(b"\n") == 1  # the nonce only
    assert_answers(served, secret)


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
    between, far = tcp_pair()
    with near, far_end, between, far:
        client = AuthenticatedChannel(near, b"word", is_client=True, deadline=Deadline(5))
        server = AuthenticatedChannel(far_end, b"word", is_client=False, deadline=Deadline(5))
        client.write_message(number=0)
        client.write_message(number=1)
        between.sendall(b"".join(change(far_end.recv(65536).splitlines(keepends=True))))
        between.shutdown(socket.SHUT_WR)
        server.socket = far
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
    one, other = ProbeSocket("127.0.0.1"), ProbeSocket("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outsider:
        for junk in (b"", b"x", bytes(64), b"\xff" * 64):
            outsider.sendto(junk, ("127.0.0.1", one.port))  # before the socket is connected
    one.connect(("127.0.0.1", other.port), b"theirtag")
    other.connect(("127.0.0.1", one.port), b"theirtag")
    other.send(b"data".ljust(64))
    assert one.receive(5)[0] == b"data".ljust(56) + b"theirtag"
    assert one.receive(0.0) is None
    one.close()
    other.close()


def test_requests_above_the_rate_limit_are_rejected(reflector):
    """The bucket holds 1.5 MB: the streams are rejected, earlier results are kept."""
    pair = measure_pair(("a", "b"), ("127.0.0.1", reflector(rate_limit=150_000.0).port), SHORT)
    assert pair.rtt > 0
    assert (pair.forward, pair.backward) == (None, None)


def assert_answers(served: Reflector, secret: bytes = b"") -> None:
    """Wait until the reflector answers: earlier sessions may end with a delay."""
    deadline = time.monotonic() + 5
    while True:
        try:
            assert measure_pair(("a", "b"), ("127.0.0.1", served.port), SHORT, secret=secret).rtt > 0
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("behaves", ["waits forever", "sends untagged datagrams"])
def test_endless_packet_train_is_aborted(reflector, monkeypatch, behaves):
    monkeypatch.setattr("slurmdl.links.probe.reflector._MAX_REQUEST_S", 0.5)
    served, done = reflector(max_sessions=1), threading.Event()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        control, own = ControlChannel(connection, b"", Deadline(5), is_client=True), ProbeSocket("127.0.0.1")
        control.write_message(udp=own.port)
        own.connect(("127.0.0.1", control.read_message()["udp"]), b"no tag")
        control.write_message(op="receive_train", size=1000)
        control.write_message(wait=1e9)

        def flood() -> None:
            while not done.is_set():
                own.send(bytes(100))

        sender = threading.Thread(target=flood)
        try:
            if "sends" in behaves:
                sender.start()
            assert_answers(served)
        finally:
            done.set()
            if "sends" in behaves:
                sender.join()
            own.close()


def test_probe_over_ipv6():
    served = Reflector("", allowed_networks=parse_networks("127.0.0.0/8,::1", "--allow"))
    try:
        for host in ("::1", "127.0.0.1"):
            pair = measure_pair(("a", "b"), (host, served.port), SHORT)
            assert pair.rtt > 0 and pair.loss == 0.0 and min(pair.forward, pair.backward) > 0
    finally:
        served.close()


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b'{"udp": 9}\n', b"0" * 32 + b'\n{"udp": 9}\n',
                                  b"[" * 100 + b"\n", b"x" * 10_000,
                                  b"0" * 32 + b"\n" + b"0" * 64 + b' {"udp": 9}\n'])
def test_reflector_survives_invalid_lines(reflector, line):
    served = reflector()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.settimeout(5)
        with contextlib.suppress(OSError):  # the reflector may close early
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert_answers(served)


@pytest.mark.parametrize("messages", [[{}], [{"udp": "x"}], [{"udp": 99999}], [{"udp": float("inf")}],
                                      [{"udp": 9}, {"op": "unknown"}],
                                      [{"udp": 9}, {"op": "send_stream", "size": "all"}],
                                      [{"udp": 9}, {"op": "receive_stream", "size": -5, "seconds": float("nan")}]])
def test_reflector_survives_invalid_requests(reflector, messages):
    served = reflector()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        control = ControlChannel(connection, b"", Deadline(5), is_client=True)
        with contextlib.suppress(OSError):
            for message in messages:
                control.write_message(**message)
            connection.sendall(b"x")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert_answers(served)


def peer_that(behaves: Callable[[socket.socket], None]) -> tuple[str, int]:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with server, server.accept()[0] as connection, contextlib.suppress(OSError):
            behaves(connection)

    threading.Thread(target=answer, daemon=True).start()
    address: tuple[str, int] = server.getsockname()
    return address


def hangs(connection: socket.socket) -> None:
    time.sleep(2)


def disconnects_after_the_first_answer(connection: socket.socket) -> None:
    control = ControlChannel(connection, b"", Deadline(5), is_client=False)
    control.read_message()
    control.write_message(udp=9)


def sends_slowly(connection: socket.socket) -> None:
    for _ in range(20):
        connection.sendall(b" ")
        time.sleep(0.1)


def reports_an_implausible_rate(connection: socket.socket) -> None:
    """Report a rate above MAX_BANDWIDTH."""
    control, udp = ControlChannel(connection, b"", Deadline(5), is_client=False), ProbeSocket("127.0.0.1")
    control.read_message()
    control.write_message(udp=udp.port)
    while True:
        request = control.read_message()
        if "end" in request:
            control.write_message(received=20, overflow=0)
        elif request["op"] == "receive_stream":
            control.receive_stream()
            control.write_message(rate=1e30)


@pytest.mark.parametrize("behaves", [hangs, disconnects_after_the_first_answer, sends_slowly,
                                     reports_an_implausible_rate])
def test_bad_peer_is_bounded_by_the_timeout(behaves):
    config = ProbeConfig(rtt_probes=3, rtt_seconds=0.02, loss_probes=20, stream_bytes=10**5, stream_seconds=0.05,
                         timeout_s=0.7)
    start = time.monotonic()
    try:
        pair = measure_pair(("a", "b"), peer_that(behaves), config)
    except Exception as error:
        assert isinstance(error, OSError)
    else:
        assert pair.forward is None
    assert time.monotonic() - start < 10


def test_probe_of_closed_port_fails():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError):
        measure_pair(("a", "b"), ("127.0.0.1", port), SHORT)


def test_token_bucket_refills_up_to_its_burst(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bucket = TokenBucket(100.0)
    assert bucket.try_consume(1000)
    assert not bucket.try_consume(1)
    now[0] += 5
    assert bucket.try_consume(500)
    assert not bucket.try_consume(1)
    now[0] += 1e6
    assert not bucket.try_consume(1001)
    assert TokenBucket(0.0).try_consume(10**12)


def test_pacer_waits_for_the_rate(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    pacer = Pacer(1000.0)
    for _ in range(10):
        pacer.wait_to_send(1000)
    assert waited[-1] == pytest.approx(8.9, abs=0.1)


def test_packet_train_counts_buffer_overflows():
    datagrams = ProbeSocket("127.0.0.1")
    received_train = train(datagrams, [number / 1000 for number in range(101)])
    assert received_train.throughput() == pytest.approx(1e6)
    datagrams.overflow += 101
    assert received_train.throughput() == pytest.approx(2e6)
    datagrams.close()


def test_packet_train_with_clock_jump_has_no_throughput():
    datagrams = ProbeSocket("127.0.0.1")
    stamps = [number / 1000 for number in range(50)]
    assert train(datagrams, [*stamps, *(stamp + 3600 for stamp in stamps)]).throughput() == 0.0
    assert train(datagrams, [*stamps, *(stamp - 3600 for stamp in stamps)]).throughput() == 0.0
    assert train(datagrams, stamps[:10]).throughput() == 0.0
    datagrams.close()


def train(datagrams: ProbeSocket, stamps: list[float]) -> PacketTrainReceiver:
    received_train = PacketTrainReceiver(datagrams)
    for stamp in stamps:
        received_train.add(bytes(1000), stamp)
    return received_train


def test_ring_peers_are_successors_in_the_zone():
    topology = round_robin_topology(7, 2)
    assert ring_peers(topology, "n1", 2) == ["n3", "n5"]
    assert ring_peers(topology, "n7", 9) == ["n1", "n3", "n5"]
    assert ring_peers(round_robin_topology(2, 2), "n1", 3) == ["n2"]
    assert ring_peers(topology, "stranger", 3) == []


def test_prober_continues_when_a_peer_does_not_answer(reflector):
    warnings: list[str] = []
    served = reflector()
    samples = probe_peers("n1", ["127.0.0.1", "nowhere.invalid"], served.port, 0.2, warnings.append, SHORT)
    first, second = next(samples), next(samples)
    assert (first.name, first.source, first.loss) == ("n1", "agent", 0.0)
    assert second.time >= first.time
    assert len(warnings) == 1
    assert warnings[0].startswith("nowhere.invalid does not answer")
