"""`links ingest` as a service that reads a spool directory, and link scores as Prometheus text."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmdl.links import prometheus
from slurmdl.links.collector import SampleStore
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample, format_sample_lines

PROMETHEUS_LINE = re.compile(r'[a-zA-Z_:][\w:]*(\{[a-z]+="([^"\\\n]|\\["\\n])*"(,[a-z]+="([^"\\\n]|\\["\\n])*")*\})? '
                             r"-?[\d.]+(e[+-]?\d+)?")


class Service:
    """A running `slurmdl links ingest` with files in `place`."""

    def __init__(self, place: Path, interval_s: float) -> None:
        self.spool, self.snapshot, self.database = place / "spool", place / "scores.json", str(place / "h.db")
        environ = {**os.environ, "SLURM_CONF": str(place / "slurm.conf"), "XDG_CONFIG_HOME": str(place / "xdg")}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "slurmdl", "links", "ingest", f"--interval={interval_s}",
             f"--spool-dir={self.spool}", f"--database={self.database}", f"--snapshot={self.snapshot}"],
            env=environ, text=True, stderr=subprocess.PIPE)
        self.wait_until(self.snapshot.exists)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline and self.child.poll() is None
            time.sleep(0.02)

    def put(self, *texts: bytes) -> None:
        """Put each text into a spool file, and wait until all are read."""
        for number, text in enumerate(texts):
            (self.spool / f".{number}").write_bytes(text)
            (self.spool / f".{number}").chmod(0o644)
            (self.spool / f".{number}").rename(self.spool / f"{time.time()}-{number}.jsonl")
        self.wait_until(lambda: not list(self.spool.glob("*.jsonl")))

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.child.send_signal(number)
        _, stderr = self.child.communicate(timeout=120)
        return self.child.returncode, stderr

    def published_nodes(self) -> list[str]:
        return list(json.loads(self.snapshot.read_text())["nodes"])


def samples(count: int) -> list[LinkSample]:
    return [LinkSample("node", f"n{i}", time.time(), "probe", throughput=1e9) for i in range(count)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[float], Service]]:
    services = []

    def start_service(interval_s: float) -> Service:
        services.append(Service(tmp_path, interval_s))
        return services[-1]

    tmp_path.chmod(0o755)
    (tmp_path / "spool").mkdir()
    yield start_service
    for service in services:
        service.child.kill()
        service.child.wait()


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


def test_service_survives_invalid_lines(start: Callable[[float], Service]) -> None:
    service = start(0.1)
    service.put(*(line.replace("NOW", str(time.time())).encode() for line in BAD_LINES))
    service.put(b"\xff\xfe\n" + format_sample_lines(samples(1)).encode())
    service.wait_until(lambda: service.published_nodes() == ["n0"])
    status, output = service.end()
    assert status == 0 and "Traceback" not in output, output
    assert sum(map(int, re.findall(r"(\d+) rejected: ", output))) == len(BAD_LINES) + 1, output
    assert all(len(line) < 2500 and line.isprintable() for line in output.splitlines())


def test_stored_samples_survive_a_killed_service(start: Callable[[float], Service]) -> None:
    service = start(0.1)
    service.put(format_sample_lines(samples(5)).encode())
    service.child.kill()
    service.child.wait()
    with SampleStore.open(service.database) as history:
        assert len(history.samples_since(0)) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_service_ends_on_a_signal_between_cycles(start: Callable[[float], Service], number: signal.Signals) -> None:
    service = start(3600)
    time.sleep(0.2)
    assert service.end(number) == (0, "")


def test_failed_cycle_does_not_end_the_service(start: Callable[[float], Service]) -> None:
    service = start(0.1)
    service.spool.rename(service.spool.with_name("other"))
    assert service.child.stderr is not None
    assert "spool: cannot be read (No such file" in service.child.stderr.readline()
    service.spool.mkdir()
    service.put(format_sample_lines(samples(2)).encode())
    service.wait_until(lambda: service.published_nodes() == ["n0", "n1"])
    assert service.end()[0] == 0


def test_exposition_lines_match_the_format() -> None:
    unusual = {'a"b\\c': LinkScore(1e9, 1e-4, 0.5, 3.0, 2, 2e-4), "n": LinkScore()}
    scores = LinkScores(nodes=unusual, zones={"z": LinkScore(1.0)}, inter_leaf={"a|b": LinkScore()}, time=1e9)
    text = prometheus.exposition_text(scores)
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
