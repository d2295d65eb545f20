"""Link services as processes: samples over TCP, link scores over HTTP, the node agent."""

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
    """A running `slurmdl links ...` that listens on `port`."""

    def __init__(self, site: Path, *args: str) -> None:
        environ = {**os.environ, "SLURM_CONF": str(site / "slurm.conf"), "XDG_CONFIG_HOME": str(site / "xdg")}
        self.child = subprocess.Popen([sys.executable, "-m", "slurmdl", "links", *args], env=environ, text=True,
                                      stderr=subprocess.PIPE)
        assert self.child.stderr is not None
        output = self.child.stderr.readline()
        response = re.search(r"listening on port (\d+)", output)
        assert response, output
        self.port = int(response[1])

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
                pass  # rejected before everything was sent
            try:
                return sock.makefile().read()
            except ConnectionResetError:
                return ""

    def end(self) -> tuple[int, str]:
        self.child.send_signal(signal.SIGTERM)
        assert self.child.stderr is not None
        stderr = self.child.stderr.read()
        return self.child.wait(30), stderr


def samples(count: int) -> list[LinkSample]:
    return [LinkSample("node", f"n{i}", time.time(), "probe", throughput=1e9) for i in range(count)]


@pytest.fixture
def receiver(site: Path) -> Iterator[Service]:
    running = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0", "--allow-unprivileged-ports")
    yield running
    running.child.kill()
    running.child.wait()


def test_invalid_samples_are_reported_at_exit(receiver: Service) -> None:
    assert receiver.send(b'{"kind": "node", "name": "n1", "time": -1, "source": "probe"}\n') == "stored 0\n"
    status, output = receiver.end()
    assert status == 0 and "1 rejected: line 1: sample of n1: time -1: expected" in output


GOOD = '{"kind": "node", "name": "n1", "time": NOW, "source": "probe", "throughput": 1e9%s}\n'
#: lines that are no valid samples
BAD_LINES = [
    *(GOOD % f', "{key}": {value}' for key, value in (
        ("rdma", "99999999999999999999999"), ("rdma", "[1]"), ("rdma", "1"), ("rdma", '"yes"'), ("rdma", "null"),
        ("loss", "true"), ("loss", "-0.1"), ("loss", "NaN"), ("loss", "[0.1]"), ("loss", '"0.1"'), ("loss", "1.5"),
        ("rtt", "Infinity"), ("rtt", "{}"), ("rtt", "9" * 4000), ("rtt", "9" * 5000), ("throughput_rse", "1e400"),
        ("throughput_rse", "[" * 900 + "]" * 900), ("throughput_rse", '{"a":' * 900 + "1" + "}" * 900),
        ("throughput_rse", "[" * 10**5),
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


def test_receiver_survives_invalid_lines(receiver: Service, site: Path) -> None:
    for line in BAD_LINES:
        line = line.replace("NOW", str(time.time()))
        assert receiver.send(line.encode()) == "stored 0\n", line[:200]
    assert receiver.send(b"\xff\xfe\n" + format_sample_lines(samples(1)).encode()) == "stored 1\n"
    status, output = receiver.end()
    assert status == 0 and f"{len(BAD_LINES) + 1} rejected: " in output and "Traceback" not in output, output
    assert all(len(line) < 2500 and line.isprintable() for line in output.splitlines())
    assert list(json.loads((site / "scores.json").read_text())["nodes"]) == ["n0"]


def test_samples_are_committed_before_the_answer(receiver: Service, site: Path) -> None:
    assert receiver.send(format_sample_lines(samples(5)).encode() + b"no sample\n") == "stored 5\n"
    receiver.child.kill()
    receiver.child.wait()
    with SampleStore.open(str(site / "h.db")) as history:
        assert len(history.samples_since(0)) == 5


def test_concurrent_senders_are_stored_despite_a_silent_one(receiver: Service, site: Path) -> None:
    silent = socket.create_connection(("127.0.0.1", receiver.port))
    senders = [socket.create_connection(("127.0.0.1", receiver.port)) for _ in range(40)]
    for i, sender in enumerate(senders):
        sender.sendall(format_sample_lines([LinkSample("node", f"n{i}", time.time(), "probe", loss=0.0)]).encode())
        sender.shutdown(socket.SHUT_WR)
    assert [sender.makefile().read() for sender in senders] == ["stored 1\n"] * 40
    for sender in (*senders, silent):
        sender.close()
    status, output = receiver.end()
    assert (status, output) == (0, "")
    assert len(LinkScores.from_json(json.loads((site / "scores.json").read_text())).nodes) == 40


def test_oversized_data_is_rejected(receiver: Service) -> None:
    assert receiver.send(b"x" * (2**20 + 70_000)) == "rejected: more than 1048576 bytes\n"
    assert receiver.send(b"") == "stored 0\n"
    assert receiver.send(format_sample_lines(samples(1)).encode()) == "stored 1\n"


def test_unprivileged_sender_is_rejected(site: Path) -> None:
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0")
    try:
        assert "is not privileged" in service.send(format_sample_lines(samples(1)).encode())
        if os.geteuid() == 0:
            assert service.send(format_sample_lines(samples(1)).encode(), low_port=True) == "stored 1\n"
    finally:
        status, output = service.end()
    assert status == 0 and "is not privileged" in output


def test_sender_of_other_network_is_rejected(site: Path) -> None:
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0", "--allow-unprivileged-ports", "--allow", "10.0.0.0/8,fd00::/8")
    assert service.send(format_sample_lines(samples(1)).encode()
                        ) == "rejected: 127.0.0.1 is in no network of --allow\n"
    service.end()


class Crowd:
    """Threads that connect repeatedly and send nothing until they are stopped.

    Parameters
    ----------
    idle : whether connections are kept open.
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
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                self.connected += 1
                connection.settimeout(0.1)
                while self.idle and not self.done.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(100):
                            break


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to send from a port below 1024")
def test_rejected_crowd_takes_no_slots_and_few_log_lines(site: Path) -> None:
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0", "--auth", "port")
    with Crowd(service.port, 300, idle=True) as crowd:
        for _ in range(5):
            assert service.send(format_sample_lines(samples(1)).encode(), low_port=True) == "stored 1\n"
    status, output = service.end()
    assert status == 0 and crowd.connected >= 300
    lines = output.splitlines()
    assert 1 <= len(lines) <= 6 and all("is not privileged" in line for line in lines), output[:3000]
    assert "more of this kind)" in lines[-1]


def other_address() -> str:
    """An address of this host outside of the loopback."""
    response = "127."
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as routed:
        routed.connect(("192.0.2.1", 9))
        response = routed.getsockname()[0]
    if response.startswith("127."):
        pytest.skip("needs an address outside of the loopback")
    return response


def test_one_peer_cannot_take_all_slots(site: Path) -> None:
    """300 idle connections of one host; another host sends samples."""
    other = other_address()
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", "0.0.0.0:0", "--allow-unprivileged-ports", "--allow", f"127.0.0.0/8,{other}")
    with Crowd(service.port, 300, idle=True):
        for _ in range(5):
            assert service.send(format_sample_lines(samples(1)).encode(), host=other) == "stored 1\n"
    status, output = service.end()
    assert status == 0 and "too many senders at the same time" in output


def test_slots_are_shared_among_addresses() -> None:
    slots, evicted = ConnectionSlots(4), []
    one, two, local, also_local = (ip_address(text) for text in ("10.0.0.1", "fd00::1", "127.0.0.1", "127.9.9.9"))
    end = [partial(evicted.append, i) for i in range(9)]
    assert all(slots.acquire(one, end[i]) for i in range(4))
    assert not slots.acquire(one, end[4]) and not evicted
    assert slots.acquire(two, end[5]) and evicted == [0]
    assert slots.acquire(local, end[6]) and evicted == [0, 1]
    assert not slots.acquire(also_local, end[7]) and evicted == [0, 1]  # loopback addresses count as one peer
    slots.release(end[2])
    assert slots.acquire(also_local, end[7]) and evicted == [0, 1]
    slots.release(end[0])  # an evicted connection has no slot to release
    assert not slots.acquire(one, end[8])


def test_log_is_rate_limited_per_kind_with_counts() -> None:
    warnings: list[str] = []
    log = RateLimitedLog(warnings.append, interval_s=0.2)
    for i in range(100):
        log("port", f"refused {i}")
    log("network", "stranger")
    assert warnings == ["refused 0", "stranger"]
    time.sleep(0.25)
    log.flush()
    assert warnings[2:] == ["refused 99 (and 98 more of this kind)"]
    log.flush(force=True)
    assert len(warnings) == 3


def test_sender_over_ipv6(site: Path) -> None:
    service = Service(site, "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"),
                      "--listen", ":0", "--allow-unprivileged-ports", "--allow", "::1,fd00::/8")
    with socket.create_connection(("::1", service.port), 30) as sender:
        sender.sendall(format_sample_lines(samples(1)).encode())
        sender.shutdown(socket.SHUT_WR)
        assert sender.makefile().read() == "stored 1\n"
    assert service.send(b"") == "rejected: 127.0.0.1 is in no network of --allow\n"
    assert service.end()[0] == 0


def test_export_serves_metrics_over_http(site: Path) -> None:
    file = site / "scores.json"
    file.write_text(LinkScores(nodes={"n1": LinkScore(1e9, 1e-4, 0.01)}, time=time.time()).to_text())
    file.chmod(0o644)
    service = Service(site, "export", "--link-scores", str(file), "--listen", "127.0.0.1:0")
    url = f"http://127.0.0.1:{service.port}"
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            assert response.headers["Content-Type"] == prometheus_exporter.CONTENT_TYPE
            text = response.read().decode()
        assert 'slurmdl_link_loss_ratio{kind="node",link="n1"} 0.01\n' in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=30)
        file.write_text("{")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/metrics", timeout=30)
    finally:
        service.child.kill()
        service.child.wait()


def test_one_client_cannot_take_all_slots_of_the_export(site: Path) -> None:
    """Idle connections of one address; a client of another address is served."""
    file = site / "scores.json"
    file.write_text(LinkScores(nodes={"n1": LinkScore(1e9)}, time=time.time()).to_text())
    file.chmod(0o644)
    service = Service(site, "export", "--link-scores", str(file), "--listen", "0.0.0.0:0")
    try:
        with Crowd(service.port, 200, idle=True):
            for _ in range(5):
                url = f"http://{other_address()}:{service.port}/metrics"
                with urllib.request.urlopen(url, timeout=30) as response:
                    assert b'link="n1"' in response.read()
            threads = len(os.listdir(f"/proc/{service.child.pid}/task"))
    finally:
        service.child.kill()
        service.child.wait()
    assert threads < 150


def test_exposition_lines_match_the_format() -> None:
    unusual = {'a"b\\c': LinkScore(1e9, 1e-4, 0.5, 3.0, 2, 2e-4), "n": LinkScore()}
    scores = LinkScores(nodes=unusual, zones={"z": LinkScore(1.0)}, inter_leaf={"a|b": LinkScore()}, time=1e9)
    text = prometheus_exporter.exposition_text(scores)
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
    assert 'throughput_bytes_per_second{kind="node",link="n"}' not in text  # not measured


def test_export_skips_invalid_scores_with_a_warning(tmp_path, capsys):
    file = tmp_path / "scores.json"
    file.write_text('{"nodes": {"n1": {"throughput": -5}, "n2": {"throughput": 1e8}}}')
    assert main(["links", "export", "--link-scores", str(file)]) == 0
    out, warnings = capsys.readouterr()
    assert 'link="n2"' in out and 'link="n1"' not in out
    assert warnings.count("\n") == 1 and "1 rejected, the first: n1: throughput" in warnings


@pytest.mark.parametrize("command", ["agent", "ingest"])
@pytest.mark.parametrize("allow", ["x", "10.0.0.0/99", "10.0.0.1/8", "fd00::/129", "10.0.0.0/8,", "", "10.0.0.0/8 "])
def test_invalid_networks_are_reported_in_one_line(command, allow, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["links", command, f"--allow={allow}"]) == 64
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "expected networks and addresses"  in output


def test_networks_of_ipv4_and_ipv6_are_parsed():
    assert [str(each) for each in parse_networks("10.0.0.0/8,192.168.1.5,fd00::/8,::1", "--allow")] == [
        "10.0.0.0/8", "192.168.1.5/32", "fd00::/8", "::1/128"]


def test_sender_tolerates_a_concurrently_emptied_spool(receiver: Service, site: Path) -> None:
    """A dangling symbolic link stands for a file that is removed between listing and opening."""
    spool = site / "spool"
    sender_module.spool_samples(str(spool), samples(1))
    (spool / "0.jsonl").symlink_to(site / "gone")
    sender_module.send_samples(("127.0.0.1", receiver.port), samples(1), str(spool))
    assert os.listdir(spool) == ["0.jsonl"]
    shutil.rmtree(spool)
    sender_module.send_samples(("127.0.0.1", receiver.port), samples(1), str(spool))
    assert os.listdir(spool) == []
    spool.rmdir()
    spool.write_text("no directory")
    with pytest.raises(UnavailableError, match="samples cannot be written"):
        sender_module.send_samples(("127.0.0.1", receiver.port), samples(1), str(spool))


def test_unreachable_collector_is_reported_without_samples(site: Path,
                                                                         capsys: pytest.CaptureFixture[str]) -> None:
    """The first run has no previous reading, so there is no sample."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    args = ["links", "counters", "--collector", f"127.0.0.1:{port}", "--state-dir", str(site / "state"),
            "--interface", "none"]
    assert main([*args, "--strict"]) == 69
    assert capsys.readouterr().err == f"slurmdl: collector 127.0.0.1:{port}: Connection refused\n"
    assert main(args) == 0 and capsys.readouterr() == ("", "")
    assert not (site / "state" / "spool").exists()


def test_agent_answers_despite_idle_connections(site: Path) -> None:
    """Over IPv4 and IPv6."""
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
                config = ProbeConfig(rtt_probes=5, rtt_seconds=0.02, loss_probes=20, stream_bytes=10**5,
                                     stream_seconds=0.05, timeout_s=4.0)
                assert measure_pair(("a", "b"), (host, port), config).rtt is not None
    finally:
        child.terminate()
    assert child.wait(30) == 0


def test_agent_continues_when_its_spool_is_removed(site: Path) -> None:
    """Its only peer is itself by another name; the collector is unreachable."""
    (site / "topology.conf").write_text("SwitchName=s Nodes=n1,localhost\n")
    spool = site / "spool"
    spool.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (spool / "0.jsonl").symlink_to(site / "gone")
    child = subprocess.Popen(
        [sys.executable, "-m", "slurmdl", "links", "agent", f"--listen=:{port}", "--allow=127.0.0.0/8",
         "--interval=1", "--node-name=n1", f"--topology={site}/topology.conf", f"--spool-dir={spool}",
         "--collector=127.0.0.1:9"],
        stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(2):
            assert child.stderr is not None and "collector 127.0.0.1:9: " in child.stderr.readline()
            shutil.rmtree(spool)
    finally:
        child.terminate()
    assert child.wait(30) == 0


@pytest.mark.parametrize("args", [["--allow=10.0.0.0/8", "--rate-limit=-1"], []])
def test_agent_rejects_invalid_options_before_any_query(args, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["links", "agent", *args]) == 64
    assert capsys.readouterr().err.count("\n") == 1
