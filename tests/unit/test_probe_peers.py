"""The two sides of a pair over the loopback, and peers that hang, refuse, lie or go away."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from slurmdl.network.probe.measure import measure
from slurmdl.network.probe.pair import Effort
from slurmdl.network.probe.patrol import patrol, peers
from slurmdl.network.probe.reflector import Reflector
from slurmdl.network.probe.wire import Allowance, Arrivals, Budget, Datagrams
from slurmdl.sandbox.spec import alternating

SHORT = Effort(echoes=20, echo_seconds=0.05, datagrams=200, datagram_rate=5000, size=2_000_000, seconds=0.1,
               deadline=3.0)


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
    pair = measure(("a", "b"), ("127.0.0.1", reflector(token="word").port), SHORT, token="word")
    assert min(pair.forward, pair.backward) > 1e7
    assert 0 < pair.delay <= pair.delay_tail
    assert pair.loss == 0.0


def test_a_limit_holds_and_is_not_taken_for_the_link(reflector):
    limited = Effort(echoes=5, echo_seconds=0.02, datagrams=50, size=2_000_000, seconds=0.2, rate_limit=1e6)
    pair = measure(("a", "b"), ("127.0.0.1", reflector().port), limited)
    assert (pair.forward, pair.backward) == (None, None)


@pytest.mark.parametrize("options", [{"token": "other"}, {"allow": (ipaddress.IPv4Network("192.0.2.0/24"),)}])
def test_strangers_are_refused(reflector, options):
    with pytest.raises(OSError):
        measure(("a", "b"), ("127.0.0.1", reflector(**options).port), SHORT, token="word")


def test_sessions_are_bounded(reflector):
    served = reflector(sessions=1)
    with socket.create_connection(("127.0.0.1", served.port)) as first:
        with pytest.raises(OSError):
            measure(("a", "b"), ("127.0.0.1", served.port), SHORT)
        first.sendall(b"no JSON\n")
        assert first.recv(10) == b""
    assert_answers(served)


def test_bytes_are_bounded(reflector):
    """What a second and a half of the allowance cannot pay is refused; what was measured until then stays."""
    pair = measure(("a", "b"), ("127.0.0.1", reflector(rate=150_000.0).port), SHORT)
    assert pair.delay > 0
    assert (pair.forward, pair.backward) == (None, None)


def assert_answers(served: Reflector) -> None:
    """It does, once the session before has ended, which its peer sees a moment earlier."""
    deadline = time.monotonic() + 5
    while True:
        try:
            assert measure(("a", "b"), ("127.0.0.1", served.port), SHORT).delay > 0
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b'{"token": ""}\n', b'{"token": "", "udp": "x"}\n',
                                  b'{"token": "", "udp": 99999}\n', b'{"token": "", "udp": 1e400}\n',
                                  b"[" * 100 + b"\n", b"x" * 10_000, b'{"token": "", "udp": 9}\n{"do": "dance"}\n',
                                  b'{"token": "", "udp": 9}\n{"do": "send", "size": "all"}\n',
                                  b'{"token": "", "udp": 9}\n{"do": "take", "size": -5, "seconds": NaN}\nx'])
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
    connection.recv(1000)
    connection.sendall(b'{"udp": 9}\n')


def drips(connection: socket.socket) -> None:
    for _ in range(20):
        connection.sendall(b" ")
        time.sleep(0.1)


def boasts(connection: socket.socket) -> None:
    """It claims a rate that no link has."""
    udp = Datagrams("127.0.0.1")
    for line in connection.makefile():
        answer = {"token": {"udp": udp.port}, "end": {"received": 20, "overflow": 0}, "take": {"rate": 1e30},
                  "wait": {"rate": 1e30}}
        for word, reply in answer.items():
            if word in line:
                connection.sendall(json.dumps(reply).encode() + b"\n")


@pytest.mark.parametrize("behaves", [hangs, vanishes_after_the_first_answer, drips, boasts])
def test_a_bad_peer_costs_no_more_than_the_deadline(behaves):
    effort = Effort(echoes=3, echo_seconds=0.02, datagrams=20, size=10**5, seconds=0.05, deadline=0.7)
    began = time.monotonic()
    try:
        pair = measure(("a", "b"), peer_that(behaves), effort)
    except Exception as error:
        assert isinstance(error, OSError)
    else:
        assert pair.forward is None
    assert time.monotonic() - began < 10


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError):
        measure(("a", "b"), ("127.0.0.1", port), SHORT)


def test_an_allowance_is_spent_and_comes_back(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    allowance = Allowance(100.0)
    assert allowance.take(1000)
    assert not allowance.take(1)
    now[0] += 5
    assert allowance.take(500)
    assert not allowance.take(1)
    now[0] += 1e6
    assert not allowance.take(1001)
    assert Allowance(0.0).take(10**12)


def test_a_budget_waits(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    budget = Budget(1000.0)
    for _ in range(10):
        budget.spend(1000)
    assert waited[-1] == pytest.approx(8.9, abs=0.1)


def test_a_train_counts_what_the_buffer_dropped():
    datagrams = Datagrams("127.0.0.1")
    arrivals = train(datagrams, [number / 1000 for number in range(101)])
    assert arrivals.rate() == pytest.approx(1e6)
    datagrams.overflow += 101
    assert arrivals.rate() == pytest.approx(2e6)
    datagrams.close()


def test_a_clock_that_jumps_makes_no_rate():
    datagrams = Datagrams("127.0.0.1")
    stamps = [number / 1000 for number in range(50)]
    assert train(datagrams, [*stamps, *(stamp + 3600 for stamp in stamps)]).rate() == 0.0
    assert train(datagrams, [*stamps, *(stamp - 3600 for stamp in stamps)]).rate() == 0.0
    assert train(datagrams, stamps[:10]).rate() == 0.0
    datagrams.close()


def train(datagrams: Datagrams, stamps: list[float]) -> Arrivals:
    arrivals = Arrivals(datagrams)
    for stamp in stamps:
        arrivals.take(bytes(1000), stamp)
    return arrivals


def test_a_patrol_goes_round_the_zone():
    topology = alternating(7, 2)
    assert peers(topology, "n1", 2) == ["n3", "n5"]
    assert peers(topology, "n7", 9) == ["n1", "n3", "n5"]
    assert peers(alternating(2, 2), "n1", 3) == ["n2"]
    assert peers(topology, "stranger", 3) == []


def test_a_patrol_goes_on_where_a_peer_is_silent(reflector):
    said: list[str] = []
    served = reflector()
    found = patrol("n1", ["127.0.0.1", "nowhere.invalid"], served.port, 0.2, said.append, SHORT)
    first, second = next(found), next(found)
    assert (first.name, first.source, first.loss) == ("n1", "serve", 0.0)
    assert second.time >= first.time
    assert len(said) == 1
    assert said[0].startswith("nowhere.invalid does not answer")
