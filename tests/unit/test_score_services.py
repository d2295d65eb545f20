"""The services of the collector as real processes: samples over TCP, and scores over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest

from slurmdl.cli.address import parse_networks
from slurmdl.cli.main import main
from slurmdl.errors import UnavailableError
from slurmdl.links import prometheus_exporter
from slurmdl.links import sender as sender_module
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.probe.measure import measure_pair
from slurmdl.links.probe.measurement import ProbeConfig
from slurmdl.links.sample_store import SampleStore
from slurmdl.links.samples import LinkSample, format_sample_lines
from slurmdl.links.tcp_server import ConnectionSlots, RateLimitedLog

PROMETHEUS_LINE = re.compile(r'[a-zA-Z_:][\w:]*(\{[a-z]+="([^"\\\n]|\\["\\n])*"(,[a-z]+="([^"\\\n]|\\["\\n])*")*\})? '
                             r"-?[\d.]+(e[+-]?\d+)?")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


class Service:
    """`slurmdl links ...` until it is ended; `port` is where it listens."""

    def __init__(self, site: Path, *words: str) -> None:
        environ = {**os.environ, "SLURM_CONF": str(site / "slurm.conf"), "XDG_CONFIG_HOME": str(site / "xdg")}
        self.child = subprocess.Popen([sys.executable, "-m", "slurmdl", "links", *words], env=environ, text=True,
                                      stderr=subprocess.PIPE)
        assert self.child.stderr is not None
        told = self.child.stderr.readline()
        found = re.search(r"listening on port (\d+)", told)
        assert found, told
        self.port = int(found[1])

    def send(self, data: bytes, low_port: bool = False, host: str = "127.0.0.1") -> str:
        with socket.socket() as sock:
            sock.settimeout(30)
            if low_port:
                for port in range(1023, 900, -1):
                    try:
                        sock.bind(("127.0.0.1", port))
                        break
                    except OSError:
                        continue
            sock.connect((host, self.port))
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused before all was sent
            try:
                return sock.makefile().read()
            except ConnectionResetError:
                return ""

    def end(self) -> tuple[int, str]:
        self.child.send_signal(signal.SIGTERM)
        assert self.child.stderr is not None
        rest = self.child.stderr.read()
        return self.child.wait(30), rest


def samples(count: int) -> list[LinkSample]:
    return [LinkSample("node", f"n{i}", time.time(), "probe", throughput=1e9) for i in range(count)]


@pytest.fixture
def inlet(site: Path) -> Iterator[Service]:
    running = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0", "--allow-unprivileged-ports")
    yield running
    running.child.kill()
    running.child.wait()


def test_what_senders_get_wrong_is_said(inlet: Service) -> None:
    assert inlet.send(b'{"kind": "node", "name": "n1", "time": -1, "source": "probe"}\n') == "stored 0\n"
    status, told = inlet.end()
    assert status == 0 and "1 rejected: line 1: sample of n1: time -1: expected" in told


GOOD = '{"kind": "node", "name": "n1", "time": NOW, "source": "probe", "throughput": 1e9%s}\n'
#: what a sender may put on a line: none of it is a sample, and none of it can be stored
BAD_LINES = [
    *(GOOD % f', "{key}": {value}' for key, value in (
        ("rdma", "99999999999999999999999"), ("rdma", "[1]"), ("rdma", "1"), ("rdma", '"yes"'), ("rdma", "null"),
        ("loss", "true"), ("loss", "-0.1"), ("loss", "NaN"), ("loss", "[0.1]"), ("loss", '"0.1"'), ("loss", "1.5"),
        ("rtt", "Infinity"), ("rtt", "{}"), ("rtt", "9" * 4000), ("rtt", "9" * 5000), ("throughput_rse", "1e400"),
        ("throughput_rse", "[" * 900 + "]" * 900), ("throughput_rse", '{"a":' * 900 + "1" + "}" * 900), ("throughput_rse", "[" * 10**5),
        ("throughput", "1e9"), ("color", "1"), ("x" * 10**5, "1"), ("cls", "1"), ("", "1"))),
    *(f'{{"kind": {kind}, "name": {name}, "time": {at}, "source": {source}, "throughput": 1e9}}\n'
      for kind, name, at, source in (
        ('["node"]', '"n1"', "NOW", '"probe"'), ("null", '"n1"', "NOW", '"probe"'), ("{}", '"n1"', "NOW", '"probe"'),
        ('"node"', '["n1"]', "NOW", '"probe"'), ('"node"', "1", "NOW", '"probe"'), ('"node"', '""', "NOW", '"probe"'),
        ('"node"', '"\\ud800"', "NOW", '"probe"'), ('"node"', '"n\\u0000"', "NOW", '"probe"'),
        ('"node"', '"n\\u001b[31m"', "NOW", '"probe"'), ('"node"', f'"{"n" * 10**5}"', "NOW", '"probe"'),
        ('"inter_leaf"', '"b|a"', "NOW", '"probe"'), ('"node"', '"n1"', "NOW", "[]"), ('"node"', '"n1"', "NOW", "7"),
        ('"node"', '"n1"', "1e11", '"probe"'), ('"node"', '"n1"', "true", '"probe"'),
        ('"node"', '"n1"', '"NOW"', '"probe"'), ('"node"', '"n1"', "1e400", '"probe"'),
        ('"node"', '"n1"', "9" * 300, '"probe"'))),
    "[]\n", "null\n", "7\n", '"{}"\n', "{}\n", "[" * 10**5 + "\n", "{", '{"kind": "node"}\n', "\x00\n", "\ufeff{}\n"]


def test_no_line_that_is_sent_ends_the_service(inlet: Service, site: Path) -> None:
    for line in BAD_LINES:
        line = line.replace("NOW", str(time.time()))
        assert inlet.send(line.encode()) == "stored 0\n", line[:200]
    assert inlet.send(b"\xff\xfe\n" + format_sample_lines(samples(1)).encode()) == "stored 1\n"
    status, told = inlet.end()
    assert status == 0 and f"{len(BAD_LINES) + 1} rejected: " in told and "Traceback" not in told, told
    assert all(len(line) < 2500 and line.isprintable() for line in told.splitlines())
    assert list(json.loads((site / "scores.json").read_text())["nodes"]) == ["n0"]


def test_samples_are_stored_before_the_sender_is_told(inlet: Service, site: Path) -> None:
    assert inlet.send(format_sample_lines(samples(5)).encode() + b"no sample\n") == "stored 5\n"
    inlet.child.kill()
    inlet.child.wait()
    with SampleStore.open(str(site / "h.db")) as history:
        assert len(history.samples_since(0)) == 5


def test_many_senders_at_once_and_one_who_says_nothing(inlet: Service, site: Path) -> None:
    silent = socket.create_connection(("127.0.0.1", inlet.port))
    senders = [socket.create_connection(("127.0.0.1", inlet.port)) for _ in range(40)]
    for i, sender in enumerate(senders):
        sender.sendall(format_sample_lines([LinkSample("node", f"n{i}", time.time(), "probe", loss=0.0)]).encode())
        sender.shutdown(socket.SHUT_WR)
    assert [sender.makefile().read() for sender in senders] == ["stored 1\n"] * 40
    for sender in (*senders, silent):
        sender.close()
    status, told = inlet.end()
    assert (status, told) == (0, "")
    assert len(LinkScores.from_json(json.loads((site / "scores.json").read_text())).nodes) == 40


def test_what_is_sent_is_bounded(inlet: Service) -> None:
    assert inlet.send(b"x" * (2**20 + 70_000)) == "rejected: more than 1048576 bytes\n"
    assert inlet.send(b"") == "stored 0\n"
    assert inlet.send(format_sample_lines(samples(1)).encode()) == "stored 1\n"


def test_senders_without_privileges_are_refused(site: Path) -> None:
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0")
    try:
        assert "is not privileged" in service.send(format_sample_lines(samples(1)).encode())
        if os.geteuid() == 0:
            assert service.send(format_sample_lines(samples(1)).encode(), low_port=True) == "stored 1\n"
    finally:
        status, told = service.end()
    assert status == 0 and "is not privileged" in told


def test_senders_of_other_networks_are_refused(site: Path) -> None:
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0", "--allow-unprivileged-ports", "--allow", "10.0.0.0/8,fd00::/8")
    assert service.send(format_sample_lines(samples(1)).encode()
                        ) == "rejected: 127.0.0.1 is in no network of --allow\n"
    service.end()


class Crowd:
    """Threads that connect again and again and never say anything, until they are told to stop.

    Parameters
    ----------
    idle : whether each keeps its connection; else it is closed at once.
    """

    def __init__(self, port: int, threads: int, idle: bool) -> None:
        self.port, self.idle, self.done, self.connected = port, idle, threading.Event(), 0
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Crowd:
        for thread in self.threads:
            thread.start()
        while self.connected < len(self.threads):
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        for thread in self.threads:
            thread.join()

    def _run(self) -> None:
        while not self.done.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as own:
                self.connected += 1
                own.settimeout(0.1)
                while self.idle and not self.done.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not own.recv(100):
                            break


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to send from a port below 1024")
def test_a_crowd_that_is_refused_takes_no_place_and_is_told_of_seldom(site: Path) -> None:
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0", "--auth", "port")
    with Crowd(service.port, 300, idle=True) as crowd:
        for _ in range(5):
            assert service.send(format_sample_lines(samples(1)).encode(), low_port=True) == "stored 1\n"
    status, told = service.end()
    assert status == 0 and crowd.connected >= 300
    lines = told.splitlines()
    assert 1 <= len(lines) <= 6 and all("is not privileged" in line for line in lines), told[:3000]
    assert "more of this kind)" in lines[-1]


def other_address() -> str:
    """An address of this host that is not of the loopback."""
    found = "127."
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as routed:
        routed.connect(("192.0.2.1", 9))
        found = routed.getsockname()[0]
    if found.startswith("127."):
        pytest.skip("needs an address that is not of the loopback")
    return found


def test_no_peer_can_take_all_places(site: Path) -> None:
    """300 connections of one host that say nothing, and another host that has something to say."""
    other = other_address()
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "0.0.0.0:0", "--allow-unprivileged-ports", "--allow", f"127.0.0.0/8,{other}")
    with Crowd(service.port, 300, idle=True):
        for _ in range(5):
            assert service.send(format_sample_lines(samples(1)).encode(), host=other) == "stored 1\n"
    status, told = service.end()
    assert status == 0 and "too many senders at the same time" in told


def test_places_are_shared_among_addresses() -> None:
    places, ended = ConnectionSlots(4), []
    one, two, here, also_here = (ip_address(text) for text in ("10.0.0.1", "fd00::1", "127.0.0.1", "127.9.9.9"))
    end = [partial(ended.append, i) for i in range(9)]
    assert all(places.acquire(one, end[i]) for i in range(4))
    assert not places.acquire(one, end[4]) and not ended
    assert places.acquire(two, end[5]) and ended == [0]
    assert places.acquire(here, end[6]) and ended == [0, 1]
    assert not places.acquire(also_here, end[7]) and ended == [0, 1]  # this host has one, and would have as many
    places.release(end[2])
    assert places.acquire(also_here, end[7]) and ended == [0, 1]
    places.release(end[0])  # who lost its place has none to leave
    assert not places.acquire(one, end[8])


def test_a_log_tells_each_kind_seldom_and_counts_the_others() -> None:
    said: list[str] = []
    log = RateLimitedLog(said.append, interval_s=0.2)
    for i in range(100):
        log("port", f"refused {i}")
    log("network", "stranger")
    assert said == ["refused 0", "stranger"]
    time.sleep(0.25)
    log.flush()
    assert said[2:] == ["refused 99 (and 98 more of this kind)"]
    log.flush(force=True)
    assert len(said) == 3


def test_senders_of_ipv6(site: Path) -> None:
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", ":0", "--allow-unprivileged-ports", "--allow", "::1,fd00::/8")
    with socket.create_connection(("::1", service.port), 30) as sender:
        sender.sendall(format_sample_lines(samples(1)).encode())
        sender.shutdown(socket.SHUT_WR)
        assert sender.makefile().read() == "stored 1\n"
    assert service.send(b"") == "rejected: 127.0.0.1 is in no network of --allow\n"
    assert service.end()[0] == 0


def test_scores_over_http(site: Path) -> None:
    file = site / "scores.json"
    file.write_text(LinkScores(nodes={"n1": LinkScore(1e9, 1e-4, 0.01)}, time=time.time()).to_text())
    file.chmod(0o644)
    service = Service(site, "export", "--link-scores", str(file), "--listen", "127.0.0.1:0")
    url = f"http://127.0.0.1:{service.port}"
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as found:
            assert found.headers["Content-Type"] == prometheus_exporter.CONTENT_TYPE
            text = found.read().decode()
        assert 'slurmdl_link_loss_ratio{kind="node",link="n1"} 0.01\n' in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=30)
        file.write_text("{")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/metrics", timeout=30)
    finally:
        service.child.kill()
        service.child.wait()


def test_no_client_can_take_all_places_of_the_export(site: Path) -> None:
    """A crowd of this host that asks for nothing; a client of another address is served."""
    file = site / "scores.json"
    file.write_text(LinkScores(nodes={"n1": LinkScore(1e9)}, time=time.time()).to_text())
    file.chmod(0o644)
    service = Service(site, "export", "--link-scores", str(file), "--listen", "0.0.0.0:0")
    try:
        with Crowd(service.port, 200, idle=True):
            for _ in range(5):
                with urllib.request.urlopen(f"http://{other_address()}:{service.port}/metrics", timeout=30) as found:
                    assert b'link="n1"' in found.read()
            threads = len(os.listdir(f"/proc/{service.child.pid}/task"))
    finally:
        service.child.kill()
        service.child.wait()
    assert threads < 150


def test_every_line_of_the_text_is_of_the_format() -> None:
    odd = {'a"b\\c': LinkScore(1e9, 1e-4, 0.5, 3.0, 2, 2e-4), "n": LinkScore()}
    text = prometheus_exporter.exposition_text(
    LinkScores(
        nodes=odd, zones={
            "z": LinkScore(1.0)}, inter_leaf={
                "a|b": LinkScore()}, time=1e9))
    assert text.endswith("\n")
    declared: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            declared.add(line.split()[2])
        elif not line.startswith("# HELP "):
            assert PROMETHEUS_LINE.fullmatch(line), line
            assert line.partition("{")[0].split()[0] in declared
    assert r'link="a\"b\\c"' in text
    assert all(name.startswith("slurmdl_") for name in declared)
    assert 'throughput_bytes_per_second{kind="node",link="n"}' not in text  # not measured, so no figure


def test_an_absurd_score_costs_the_export_only_itself(tmp_path, capsys):
    file = tmp_path / "scores.json"
    file.write_text('{"nodes": {"n1": {"throughput": -5}, "n2": {"throughput": 1e8}}}')
    assert main(["links", "export", "--link-scores", str(file)]) == 0
    out, said = capsys.readouterr()
    assert 'link="n2"' in out and 'link="n1"' not in out
    assert said.count("\n") == 1 and "1 rejected, the first: n1: throughput" in said


@pytest.mark.parametrize("command", ["agent", "ingest"])
@pytest.mark.parametrize("allow", ["x", "10.0.0.0/99", "10.0.0.1/8", "fd00::/129", "10.0.0.0/8,", "", "10.0.0.0/8 "])
def test_networks_are_read_alike_everywhere(command, allow, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["links", command, f"--allow={allow}"]) == 64
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "expected networks and addresses"  in told


def test_networks_of_both_protocols():
    assert [str(each) for each in parse_networks("10.0.0.0/8,192.168.1.5,fd00::/8,::1", "--allow")] == [
        "10.0.0.0/8", "192.168.1.5/32", "fd00::/8", "::1/128"]


def test_a_spool_that_another_process_empties_does_not_stop_the_sender(inlet: Service, site: Path) -> None:
    """A link that leads nowhere is a file that was removed between the look into the spool and its opening."""
    spool = site / "spool"
    sender_module.spool_samples(str(spool), samples(1))
    (spool / "0.jsonl").symlink_to(site / "gone")
    sender_module.send_samples(("127.0.0.1", inlet.port), samples(1), str(spool))
    assert os.listdir(spool) == ["0.jsonl"]
    shutil.rmtree(spool)
    sender_module.send_samples(("127.0.0.1", inlet.port), samples(1), str(spool))
    assert os.listdir(spool) == []
    spool.rmdir()
    spool.write_text("no directory")
    with pytest.raises(UnavailableError, match="samples cannot be written"):
        sender_module.send_samples(("127.0.0.1", inlet.port), samples(1), str(spool))


def test_a_collector_that_is_not_there_is_said_also_with_nothing_to_send(site: Path,
                                                                         capsys: pytest.CaptureFixture[str]) -> None:
    """The first run has nothing to compare with, and so no sample."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    words = ["links", "counters", "--collector", f"127.0.0.1:{port}", "--state-dir", str(site / "state"), "--interface", "none"]
    assert main([*words, "--strict"]) == 69
    assert capsys.readouterr().err == f"slurmdl: collector 127.0.0.1:{port}: Connection refused\n"
    assert main(words) == 0 and capsys.readouterr() == ("", "")
    assert not (site / "state" / "spool").exists()


def test_idle_connections_keep_nobody_from_the_service_of_a_node(site: Path) -> None:
    """They say nothing; and a host of another protocol of the internet is served as well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, "-m", "slurmdl", "links", "agent", f"--listen=:{port}", "--peers=0",
                              "--allow=127.0.0.0/8,::1", f"--spool-dir={site}"])
    try:
        with contextlib.ExitStack() as idle:
            deadline = time.monotonic() + 30
            while True:
                try:
                    idle.enter_context(socket.create_connection(("127.0.0.1", port)))
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            for _ in range(60):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            for host in ("127.0.0.1", "::1"):
                effort = ProbeConfig(
    rtt_probes=5,
    rtt_seconds=0.02,
    loss_probes=20,
    stream_bytes=10**5,
    stream_seconds=0.05,
     timeout_s=4.0)
                assert measure_pair(("a", "b"), (host, port), effort).rtt is not None
    finally:
        child.terminate()
    assert child.wait(30) == 0


def test_the_service_of_a_node_goes_on_when_its_spool_is_emptied(site: Path) -> None:
    """It probes the only other node of its zone, which is itself by another name; its collector is away."""
    (site / "topology.conf").write_text("SwitchName=s Nodes=n1,localhost\n")
    spool = site / "spool"
    spool.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (spool / "0.jsonl").symlink_to(site / "gone")
    child = subprocess.Popen(
        [sys.executable, "-m", "slurmdl", "links", "agent", f"--listen=:{port}", "--allow=127.0.0.0/8", "--interval=1",
         "--node-name=n1", f"--topology={site}/topology.conf", f"--spool-dir={spool}", "--collector=127.0.0.1:9"],
        stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(2):
            assert child.stderr is not None and "collector 127.0.0.1:9: " in child.stderr.readline()
            shutil.rmtree(spool)
    finally:
        child.terminate()
    assert child.wait(30) == 0


@pytest.mark.parametrize("words", [["--allow=10.0.0.0/8", "--rate-limit=-1"], []])
def test_what_the_service_refuses_before_it_asks_anybody(words, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["links", "agent", *words]) == 64
    assert capsys.readouterr().err.count("\n") == 1
