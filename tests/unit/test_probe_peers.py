"""The two sides of a pair over the loopback, and peers that hang, refuse, lie or go away."""

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

SHORT = ProbeConfig(rtt_probes=20, rtt_seconds=0.05, loss_probes=200, loss_probe_rate=5000, stream_bytes=2_000_000, stream_seconds=0.1,
               timeout_s=3.0)


@pytest.fixture
def reflector():
    made: list[Reflector] = []

    def make(**options: object) -> Reflector:
        made.append(Reflector("127.0.0.1", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_pair_measures_all(reflector):
    pair = measure_pair(("a", "b"), ("127.0.0.1", reflector(secret=b"word").port), SHORT, secret=b"word")
    assert min(pair.forward, pair.backward) > 1e7
    assert 0 < pair.rtt <= pair.rtt_p99
    assert pair.loss == 0.0


def test_a_limit_holds_and_is_not_taken_for_the_link(reflector):
    limited = ProbeConfig(
    rtt_probes=5,
    rtt_seconds=0.02,
    loss_probes=50,
    stream_bytes=2_000_000,
    stream_seconds=0.2,
     rate_limit=1e6)
    pair = measure_pair(("a", "b"), ("127.0.0.1", reflector().port), limited)
    assert (pair.forward, pair.backward) == (None, None)


@pytest.mark.parametrize("options", [{"secret": b"other"}, {"allowed_networks": (ipaddress.IPv4Network("192.0.2.0/24"),)}])
def test_strangers_are_refused(reflector, options):
    with pytest.raises(OSError):
        measure_pair(("a", "b"), ("127.0.0.1", reflector(**options).port), SHORT, secret=b"word")


def session(served: Reflector, secret: bytes = b"", source: str = "127.0.0.1") -> ControlChannel:
    """A session that has been let in; OSError where it is not."""
    connection = socket.create_connection(("127.0.0.1", served.port), source_address=(source, 0))
    control = ControlChannel(connection, secret, Deadline(5), is_client=True)
    control.write_message(udp=9)
    control.read_message()
    return control


def test_sessions_are_bounded_and_one_host_has_half_of_them(reflector):
    served = reflector(max_sessions=4)
    held = [session(served), session(served)]
    with pytest.raises(OSError):
        session(served)
    held += [session(served, source="127.0.0.2"), session(served, source="127.0.0.2")]
    with pytest.raises(OSError):
        session(served, source="127.0.0.3")
    for control in held:
        control.socket.close()
    assert_answers(served)


def test_connections_that_prove_nothing_take_no_place(reflector):
    served = reflector(max_sessions=1, secret=b"word")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(100)]
        assert_answers(served, b"word")
        for each in idle[:30]:  # the oldest ones had to give way
            each.settimeout(5)
            assert each.makefile("rb").read().count(b"\n") == 1  # the nonce, and the end


def test_who_sends_a_byte_now_and_then_is_left(reflector, monkeypatch):
    monkeypatch.setattr("slurmdl.links.probe.reflector.HANDSHAKE_S", 0.3)
    served = reflector()
    with socket.create_connection(("127.0.0.1", served.port)) as slow, pytest.raises(OSError):
        for _ in range(200):
            slow.sendall(b"0")
            time.sleep(0.05)


def recorded(served: Reflector, secret: bytes) -> bytes:
    """What the asking side of a probe sent, as a relay on the way saw it."""
    taken: list[bytes] = []

    def relay(source: socket.socket, target: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    taken.append(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def answer(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", served.port)) as onward:
            threading.Thread(target=relay, args=(onward, connection, False), daemon=True).start()
            relay(connection, onward, True)

    pair = measure_pair(("a", "b"), peer_that(answer), SHORT, secret=secret)
    assert pair.forward
    return b"".join(taken)


def test_a_session_that_was_recorded_cannot_be_repeated(reflector):
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
            assert again.makefile("rb").read().count(b"\n") == 1  # its nonce, no answer
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
def test_only_lines_that_are_as_they_were_sent_are_accepted(change, accepted):
    ours, theirs = tcp_pair()
    between, far = tcp_pair()
    with ours, theirs, between, far:
        asker = AuthenticatedChannel(ours, b"word", is_client=True, deadline=Deadline(5))
        answerer = AuthenticatedChannel(theirs, b"word", is_client=False, deadline=Deadline(5))
        asker.write_message(number=0)
        asker.write_message(number=1)
        between.sendall(b"".join(change(theirs.recv(65536).splitlines(keepends=True))))
        between.shutdown(socket.SHUT_WR)
        answerer.socket = far
        got = []
        with contextlib.suppress(OSError):
            while True:
                got.append(answerer.read_message())
    assert got == [{"number": number} for number in range(accepted)]


def test_lines_arrive_as_they_were_sent_and_not_back_where_they_came_from():
    ours, theirs = tcp_pair()
    with ours, theirs:
        asker = AuthenticatedChannel(ours, b"word", is_client=True, deadline=Deadline(5))
        answerer = AuthenticatedChannel(theirs, b"word", is_client=False, deadline=Deadline(5))
        asker.write_message(text="a\nb")
        assert answerer.read_message() == {"text": "a\nb"}
        answerer.write_message(number=1)
        assert asker.read_message() == {"number": 1}
    ours, theirs = tcp_pair()
    with ours, theirs:
        echoed = AuthenticatedChannel(ours, b"word", is_client=True, deadline=Deadline(5))
        theirs.sendall(theirs.recv(65536))
        echoed.write_message(number=1)
        theirs.sendall(theirs.recv(65536))
        with pytest.raises(OSError):
            echoed.read_message()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def test_datagrams_of_others_do_not_count():
    one, other = ProbeSocket("127.0.0.1"), ProbeSocket("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for junk in (b"", b"x", bytes(64), b"\xff" * 64):
            stranger.sendto(junk, ("127.0.0.1", one.port))  # before the socket knows its peer
    one.connect(("127.0.0.1", other.port), b"theirtag")
    other.connect(("127.0.0.1", one.port), b"theirtag")
    other.send(b"data".ljust(64))
    assert one.receive(5)[0] == b"data".ljust(56) + b"theirtag"
    assert one.receive(0.0) is None
    one.close()
    other.close()


def test_bytes_are_bounded(reflector):
    """What a second and a half of the allowance cannot pay is refused; what was measured until then stays."""
    pair = measure_pair(("a", "b"), ("127.0.0.1", reflector(rate_limit=150_000.0).port), SHORT)
    assert pair.rtt > 0
    assert (pair.forward, pair.backward) == (None, None)


def assert_answers(served: Reflector, secret: bytes = b"") -> None:
    """It does, once the session before has ended, which its peer sees a moment earlier."""
    deadline = time.monotonic() + 5
    while True:
        try:
            assert measure_pair(("a", "b"), ("127.0.0.1", served.port), SHORT, secret=secret).rtt > 0
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("behaves", ["wants to be waited for", "sends what is not of the train"])
def test_a_train_that_never_ends_is_left(reflector, monkeypatch, behaves):
    monkeypatch.setattr("slurmdl.links.probe.reflector._MAX_REQUEST_S", 0.5)
    served, done = reflector(max_sessions=1), threading.Event()
    with socket.create_connection(("127.0.0.1", served.port)) as rude:
        control, own = ControlChannel(rude, b"", Deadline(5), is_client=True), ProbeSocket("127.0.0.1")
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


def test_probes_by_ipv6():
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
def test_a_reflector_outlives_what_it_is_sent(reflector, line):
    served = reflector()
    with socket.create_connection(("127.0.0.1", served.port)) as rude:
        rude.settimeout(5)
        with contextlib.suppress(OSError):  # it may have closed while more was to come
            rude.sendall(line)
            rude.shutdown(socket.SHUT_WR)
            while rude.recv(65536):
                pass
    assert_answers(served)


@pytest.mark.parametrize("messages", [[{}], [{"udp": "x"}], [{"udp": 99999}], [{"udp": float("inf")}],
                                      [{"udp": 9}, {"op": "dance"}], [{"udp": 9}, {"op": "send_stream", "size": "all"}],
                                      [{"udp": 9}, {"op": "receive_stream", "size": -5, "seconds": float("nan")}]])
def test_a_reflector_outlives_what_its_peers_ask(reflector, messages):
    served = reflector()
    with socket.create_connection(("127.0.0.1", served.port)) as rude:
        control = ControlChannel(rude, b"", Deadline(5), is_client=True)
        with contextlib.suppress(OSError):
            for message in messages:
                control.write_message(**message)
            rude.sendall(b"x")
            rude.shutdown(socket.SHUT_WR)
            while rude.recv(65536):
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


def vanishes_after_the_first_answer(connection: socket.socket) -> None:
    control = ControlChannel(connection, b"", Deadline(5), is_client=False)
    control.read_message()
    control.write_message(udp=9)


def drips(connection: socket.socket) -> None:
    for _ in range(20):
        connection.sendall(b" ")
        time.sleep(0.1)


def boasts(connection: socket.socket) -> None:
    """It claims a rate that no link has."""
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


@pytest.mark.parametrize("behaves", [hangs, vanishes_after_the_first_answer, drips, boasts])
def test_a_bad_peer_costs_no_more_than_the_deadline(behaves):
    effort = ProbeConfig(
    rtt_probes=3,
    rtt_seconds=0.02,
    loss_probes=20,
    stream_bytes=10**5,
    stream_seconds=0.05,
     timeout_s=0.7)
    began = time.monotonic()
    try:
        pair = measure_pair(("a", "b"), peer_that(behaves), effort)
    except Exception as error:
        assert isinstance(error, OSError)
    else:
        assert pair.forward is None
    assert time.monotonic() - began < 10


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError):
        measure_pair(("a", "b"), ("127.0.0.1", port), SHORT)


def test_an_allowance_is_spent_and_comes_back(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    allowance = TokenBucket(100.0)
    assert allowance.try_consume(1000)
    assert not allowance.try_consume(1)
    now[0] += 5
    assert allowance.try_consume(500)
    assert not allowance.try_consume(1)
    now[0] += 1e6
    assert not allowance.try_consume(1001)
    assert TokenBucket(0.0).try_consume(10**12)


def test_a_budget_waits(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    budget = Pacer(1000.0)
    for _ in range(10):
        budget.wait_to_send(1000)
    assert waited[-1] == pytest.approx(8.9, abs=0.1)


def test_a_train_counts_what_the_buffer_dropped():
    datagrams = ProbeSocket("127.0.0.1")
    arrivals = train(datagrams, [number / 1000 for number in range(101)])
    assert arrivals.throughput() == pytest.approx(1e6)
    datagrams.overflow += 101
    assert arrivals.throughput() == pytest.approx(2e6)
    datagrams.close()


def test_a_clock_that_jumps_makes_no_rate():
    datagrams = ProbeSocket("127.0.0.1")
    stamps = [number / 1000 for number in range(50)]
    assert train(datagrams, [*stamps, *(stamp + 3600 for stamp in stamps)]).throughput() == 0.0
    assert train(datagrams, [*stamps, *(stamp - 3600 for stamp in stamps)]).throughput() == 0.0
    assert train(datagrams, stamps[:10]).throughput() == 0.0
    datagrams.close()


def train(datagrams: ProbeSocket, stamps: list[float]) -> PacketTrainReceiver:
    arrivals = PacketTrainReceiver(datagrams)
    for stamp in stamps:
        arrivals.add(bytes(1000), stamp)
    return arrivals


def test_a_patrol_goes_round_the_zone():
    topology = round_robin_topology(7, 2)
    assert ring_peers(topology, "n1", 2) == ["n3", "n5"]
    assert ring_peers(topology, "n7", 9) == ["n1", "n3", "n5"]
    assert ring_peers(round_robin_topology(2, 2), "n1", 3) == ["n2"]
    assert ring_peers(topology, "stranger", 3) == []


def test_a_patrol_goes_on_where_a_peer_is_silent(reflector):
    said: list[str] = []
    served = reflector()
    found = probe_peers("n1", ["127.0.0.1", "nowhere.invalid"], served.port, 0.2, said.append, SHORT)
    first, second = next(found), next(found)
    assert (first.name, first.source, first.loss) == ("n1", "serve", 0.0)
    assert second.time >= first.time
    assert len(said) == 1
    assert said[0].startswith("nowhere.invalid does not answer")
