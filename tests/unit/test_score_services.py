"""The services of the collector as real processes: samples over TCP, and scores over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmdl.cli.main import main
from slurmdl.network import exposition
from slurmdl.network.model import LinkScore, LinkScores
from slurmdl.network.samples import LinkSample, to_lines
from slurmdl.network.store import Store

PROMETHEUS_LINE = re.compile(r'[a-zA-Z_:][\w:]*(\{[a-z]+="([^"\\\n]|\\["\\n])*"(,[a-z]+="([^"\\\n]|\\["\\n])*")*\})? '
                             r"-?[\d.]+(e[+-]?\d+)?")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


class Service:
    """`slurmdl score ...` until it is ended; `port` is where it listens."""

    def __init__(self, site: Path, *words: str) -> None:
        environ = {**os.environ, "SLURM_CONF": str(site / "slurm.conf"), "XDG_CONFIG_HOME": str(site / "xdg")}
        self.child = subprocess.Popen([sys.executable, "-m", "slurmdl", "score", *words], env=environ, text=True,
                                      stderr=subprocess.PIPE)
        assert self.child.stderr is not None
        told = self.child.stderr.readline()
        found = re.search(r"listening on port (\d+)", told)
        assert found, told
        self.port = int(found[1])

    def send(self, data: bytes, low_port: bool = False) -> str:
        with socket.socket() as sock:
            sock.settimeout(30)
            if low_port:
                for port in range(1023, 900, -1):
                    try:
                        sock.bind(("127.0.0.1", port))
                        break
                    except OSError:
                        continue
            sock.connect(("127.0.0.1", self.port))
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused before all was sent
            return sock.makefile().read()

    def end(self) -> tuple[int, str]:
        self.child.send_signal(signal.SIGTERM)
        assert self.child.stderr is not None
        rest = self.child.stderr.read()
        return self.child.wait(30), rest


def samples(count: int) -> list[LinkSample]:
    return [LinkSample("node", f"n{i}", time.time(), "probe", throughput=1e9) for i in range(count)]


@pytest.fixture
def inlet(site: Path) -> Iterator[Service]:
    running = Service(site, "ingest", "--history", str(site / "h.db"), "--publish", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0", "--any-port")
    yield running
    running.child.kill()
    running.child.wait()


def test_what_senders_get_wrong_is_said(inlet: Service) -> None:
    assert inlet.send(b'{"kind": "node", "name": "n1", "time": -1, "source": "probe"}\n') == "stored 0\n"
    status, told = inlet.end()
    assert status == 0 and "1 refused: line 1: sample of n1: time -1 is not valid" in told


def test_samples_are_stored_before_the_sender_is_told(inlet: Service, site: Path) -> None:
    assert inlet.send(to_lines(samples(5)).encode() + b"no sample\n") == "stored 5\n"
    inlet.child.kill()
    inlet.child.wait()
    with Store.open(str(site / "h.db")) as history:
        assert len(history.since(0)) == 5


def test_many_senders_at_once_and_one_who_says_nothing(inlet: Service, site: Path) -> None:
    silent = socket.create_connection(("127.0.0.1", inlet.port))
    senders = [socket.create_connection(("127.0.0.1", inlet.port)) for _ in range(40)]
    for i, sender in enumerate(senders):
        sender.sendall(to_lines([LinkSample("node", f"n{i}", time.time(), "probe", loss=0.0)]).encode())
        sender.shutdown(socket.SHUT_WR)
    assert [sender.makefile().read() for sender in senders] == ["stored 1\n"] * 40
    for sender in (*senders, silent):
        sender.close()
    status, told = inlet.end()
    assert (status, told) == (0, "")
    assert len(LinkScores.from_json(json.loads((site / "scores.json").read_text())).nodes) == 40


def test_what_is_sent_is_bounded(inlet: Service) -> None:
    assert inlet.send(b"x" * (2**20 + 70_000)) == "refused: nothing, or more than 1048576 bytes\n"
    assert inlet.send(b"") == "refused: nothing, or more than 1048576 bytes\n"
    assert inlet.send(to_lines(samples(1)).encode()) == "stored 1\n"


def test_senders_without_privileges_are_refused(site: Path) -> None:
    service = Service(site, "ingest", "--history", str(site / "h.db"), "--publish", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0")
    try:
        assert "which any user may take" in service.send(to_lines(samples(1)).encode())
        if os.geteuid() == 0:
            assert service.send(to_lines(samples(1)).encode(), low_port=True) == "stored 1\n"
    finally:
        status, told = service.end()
    assert status == 0 and "any user may take" in told


def test_senders_of_other_networks_are_refused(site: Path) -> None:
    service = Service(site, "ingest", "--history", str(site / "h.db"), "--publish", str(site / "scores.json"),
                      "--listen", "127.0.0.1:0", "--any-port", "--allow", "10.0.0.0/8,fd00::/8")
    assert service.send(to_lines(samples(1)).encode()) == "127.0.0.1 is in no network of --allow\n"
    service.end()


def test_scores_over_http(site: Path) -> None:
    file = site / "scores.json"
    file.write_text(LinkScores(nodes={"n1": LinkScore(1e9, 1e-4, 0.01)}, time=time.time()).to_text())
    file.chmod(0o644)
    service = Service(site, "export", "--scores", str(file), "--listen", "127.0.0.1:0")
    url = f"http://127.0.0.1:{service.port}"
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as found:
            assert found.headers["Content-Type"] == exposition.CONTENT_TYPE
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


def test_every_line_of_the_text_is_of_the_format() -> None:
    odd = {'a"b\\c': LinkScore(1e9, 1e-4, 0.5, 3.0, 2, 2e-4), "n": LinkScore()}
    text = exposition.text(LinkScores(nodes=odd, zones={"z": LinkScore(1.0)}, trunks={"a|b": LinkScore()}, time=1e9))
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
    assert main(["score", "export", "--scores", str(file)]) == 0
    out, said = capsys.readouterr()
    assert 'link="n2"' in out and 'link="n1"' not in out
    assert said.count("\n") == 1 and "1 refused, the first: n1: throughput" in said


@pytest.mark.parametrize("words", [["--allow=x"], ["--allow=10.0.0.0/99"], ["--allow=10.0.0.0/8", "--rate=-1"], []])
def test_what_the_service_refuses_before_it_asks_anybody(words, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["score", "serve", *words]) == 64
    assert capsys.readouterr().err.count("\n") == 1
