"""The database of samples and the command `links ingest`: full disks, locks, invalid files, killed processes."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmdl.cli.main import main
from slurmdl.errors import InputError, UnavailableError
from slurmdl.links import collector, prometheus
from slurmdl.links.collector import SampleStore, publish_file
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample, format_sample_lines

NOW = 1.8e9


def samples(count: int, now: float = NOW) -> list[LinkSample]:
    return [LinkSample("node", f"n{i % 7}", now - i, "probe", throughput=1e9 + i, rtt=1e-4, loss=0.0)
            for i in range(count)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "h.db")


def stored_samples(path: str, since: float = 0) -> set[LinkSample]:
    with SampleStore.open(path) as database:
        return set(database.samples_since(since))


def test_stored_samples_are_returned(path: str) -> None:
    stored = [*samples(20), LinkSample("inter_leaf", "a|b", NOW, "job", rtt=1.0, rtt_p99=2.0, rdma=True)]
    with SampleStore.open(path) as database, SampleStore.open(path) as second:
        assert database.add(stored) == 21
        assert second.add(stored[5:]) == 0
    assert stored_samples(path) == set(stored)
    assert stored_samples(path, NOW - 3) == {sample for sample in stored if sample.time >= NOW - 3}
    with sqlite3.connect(path) as direct:
        assert direct.execute("PRAGMA user_version").fetchone() == (2,)


@pytest.mark.parametrize(("now", "retention_s", "max_rows", "left"), [
    (NOW, 10_000, 10**9, 10_001), (NOW, 1e9, 100, 100), (NOW, 5, 10**9, 6),
    (NOW + 1e9, 100, 10**9, 101)])  # a clock ahead counts as the newest sample
def test_prune_bounds_age_and_rows_and_shrinks_the_file(path: str, now: float, retention_s: float, max_rows: int,
                                                        left: int) -> None:
    with SampleStore.open(path) as database:
        database.add(samples(20_000))
        assert database.prune(now, retention_s=retention_s, max_rows=max_rows) == 20_000 - left
    assert {sample.time for sample in stored_samples(path)} == {NOW - i for i in range(left)}
    assert left > 100 or os.stat(path).st_size < 200_000


def test_locked_database_is_an_error_without_loss_of_samples(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LOCK_TIMEOUT_S", 0.1)
    with SampleStore.open(path) as database:
        database.add(samples(3))
        lock_holder = sqlite3.connect(path, isolation_level=None)
        lock_holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match=r"h\.db: database is locked; stored samples are kept"):
            database.add(samples(10))
        lock_holder.execute("ROLLBACK")
        lock_holder.close()
        assert len(database.samples_since(0)) == 3
        assert database.add(samples(10)) == 7


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount point of a file system of 1 MB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    process = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "none", str(mount_point)],
                             check=False, capture_output=True, text=True)
    if process.returncode:
        pytest.skip(f"cannot mount: {process.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def test_full_disk_is_an_error_and_keeps_stored_samples(small_disk: Path) -> None:
    path, snapshot = str(small_disk / "h.db"), small_disk / "scores.json"
    publish_file(str(snapshot), LinkScores(time=NOW).to_text())
    before = snapshot.read_text()
    stored: list[LinkSample] = []
    with SampleStore.open(path) as database:
        with pytest.raises(UnavailableError, match=r"full|I/O"):
            for i in range(100):
                batch = samples(500, NOW + 1000 * i)
                database.add(batch)
                stored += batch
        assert stored and set(database.samples_since(0)) == set(stored)
        with pytest.raises(UnavailableError, match="cannot be written"):
            publish_file(str(snapshot), "x" * 2**20)
        assert snapshot.read_text() == before
        assert not [name for name in os.listdir(small_disk) if name.startswith(".")]
    assert stored_samples(path) == set(stored)


def test_file_of_another_kind_or_version_is_rejected_and_kept(path: str, tmp_path: Path) -> None:
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE samples (kind, name, time, source, throughput, delay, delay_tail, loss, rdma, "
                    "PRIMARY KEY (time, kind, name, source)) WITHOUT ROWID")
        old.execute("INSERT INTO samples VALUES ('node', 'n1', 1e9, 'probe', 5.0, NULL, NULL, NULL, 1)")
    text = tmp_path / "text.db"
    text.write_text("not a database, not at all" * 100)
    for file, message in ((path, "schema version 0; expected 2"), (str(text), "expected a database")):
        with pytest.raises(InputError, match=message):
            stored_samples(file)
    assert text.read_text().startswith("not a database")
    with sqlite3.connect(path) as old:
        assert old.execute("SELECT count(*) FROM samples").fetchone() == (1,)
    with pytest.raises(UnavailableError):
        stored_samples(str(tmp_path / "no" / "h.db"))


def test_killed_process_loses_no_committed_samples(path: str) -> None:
    """The child prints the number of stored samples after each commit."""
    code = ("import sys\nfrom slurmdl.links.samples import LinkSample\n"
            "from slurmdl.links.collector import SampleStore\n"
            "with SampleStore.open(sys.argv[1]) as database:\n    i = 0\n    while True:\n"
            "        database.add([LinkSample('node', 'n', 1e9 + i + k, 'probe', loss=0.0) for k in range(50)])\n"
            "        i += 50\n        print(i, flush=True)\n")
    child = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = [child.stdout.readline() for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    printed += child.stdout.read().split()
    child.wait()
    stored = len(stored_samples(path))
    assert stored >= int(printed[-1]) and stored % 50 == 0


def test_published_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    code = ("import sys\nfrom slurmdl.links.collector import publish_file\ni = 0\n"
            "while True:\n    publish_file(sys.argv[1], str(i % 10) * 100_000)\n    i += 1\n")
    publish_file(str(path), "0" * 100_000)
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    contents = set()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline or (len(contents) < 3 and time.monotonic() < deadline + 30):
        text = path.read_text()
        assert len(text) == 100_000 and len(set(text)) == 1
        contents.add(text[0])
    child.kill()
    child.wait()
    assert len(contents) >= 3
    assert path.stat().st_mode & 0o777 == 0o644


def test_invalid_rows_are_skipped(path: str) -> None:
    with SampleStore.open(path) as database:
        database.add(samples(1))
    with sqlite3.connect(path) as direct:
        for name, loss in (("n\x1b", 0), ("n8", "x")):
            direct.execute("INSERT INTO samples (kind, name, time, source, loss) VALUES ('node', ?, ?, 'probe', ?)",
                           (name, NOW, loss))
    assert {sample.name for sample in stored_samples(path)} == {"n0"}


# --- links ingest


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory for all files, without the configuration of this host."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    tmp_path.chmod(0o755)
    (tmp_path / "spool").mkdir()
    return tmp_path


@pytest.fixture
def ingest(site: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs the command, compares its exit status, and returns stderr, of one line at most."""
    def run(*args: str | Path, status: int = 0) -> str:
        files = ["--database", str(site / "h.db"), "--score-file", str(site / "scores.json")]
        assert main(["links", "ingest", *files, *map(str, args)]) == status
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") <= 1
        return output.err

    return run


def put(site: Path, lines: list[LinkSample], extra: str = "", name: str = "a.jsonl") -> Path:
    (site / name).write_text(format_sample_lines(lines) + extra)
    (site / name).chmod(0o644)
    return site / name


def published(site: Path) -> LinkScores:
    return LinkScores.from_json(json.loads((site / "scores.json").read_text()))


def test_ingest_publishes_files_and_reports_malformed_samples(site: Path, ingest: Callable[..., str]) -> None:
    file = put(site, samples(7, time.time()),
               '{"kind": "node", "name": "n1", "time": 5, "source": "probe", "loss": -1}\n{"kind": "node", "na')
    error = ingest("--textfile", site / "s.prom", file)
    assert "2 rejected: line 8: sample of n1: loss -1: expected" in error and "line 9" in error
    assert sorted(published(site).nodes) == [f"n{i}" for i in range(7)]
    assert 'slurmdl_link_loss_ratio{kind="node",link="n3"} 0.0' in (site / "s.prom").read_text()
    (site / "topology.conf").write_text("SwitchName=a Nodes=n[0-2]\nSwitchName=b Nodes=n[3-5]\n"
                                        "SwitchName=r Switches=a,b\n")
    paths = [LinkSample("inter_leaf", name, time.time(), "probe", loss=0.0) for name in ("a|b", "a|x")]
    error = ingest(put(site, [*samples(7, time.time() + 1), *paths]))
    assert "2 rejected: unknown node n6; unknown inter_leaf a|x" in error
    assert list(published(site).inter_leaf) == ["a|b"]


def test_spool_files_are_removed_or_renamed_and_reported_once(site: Path, ingest: Callable[..., str]) -> None:
    spool = site / "spool"
    good = samples(1, time.time())
    for name in ("a.jsonl", ".half.jsonl", "other.txt"):
        put(spool, [good[0]._replace(name=name[0] * 2)], name=name)
    bad = format_sample_lines(good).replace("}", ', "rdma": [1]}')
    put(spool, [good[0]._replace(name="n1")], bad, "half.jsonl")
    put(spool, good, name="open.jsonl").chmod(0o666)
    (spool / "folder.jsonl").mkdir()
    # a user who may write into the spool chooses a trusted file of the collector
    (spool / "link.jsonl").symlink_to(put(site, good, name="own.jsonl"))
    assert "4 rejected: " in ingest("--spool-dir", spool)
    rejected = [f"{name}.jsonl.rejected" for name in ("folder", "half", "link", "open")]
    assert sorted(os.listdir(spool)) == sorted([*rejected, ".half.jsonl", "other.txt"])
    assert (site / "own.jsonl").exists()
    assert (spool / "half.jsonl.rejected").read_text().endswith(bad)
    assert sorted(published(site).nodes) == ["aa", "n1"]
    assert not ingest("--spool-dir", spool)


def test_rejected_spool_files_are_bounded(site: Path, ingest: Callable[..., str]) -> None:
    for i in range(110):
        (site / f"spool/{i:03}.jsonl").write_text("no sample\n")
    ingest("--spool-dir", site / "spool")
    (site / "spool/200.jsonl").write_text("no sample\n")
    ingest("--spool-dir", site / "spool")
    files = sorted(os.listdir(site / "spool"))
    assert len(files) == 100 and files[-1] == "200.jsonl.rejected"


def test_missing_spool_does_not_prevent_publication(site: Path, ingest: Callable[..., str]) -> None:
    error = ingest("--spool-dir", site / "none", put(site, samples(2, time.time())), status=69)
    assert "none: cannot be read (No such file" in error
    assert len(published(site).nodes) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_samples_of_other_users_are_rejected_unless_trusted(site: Path, ingest: Callable[..., str]) -> None:
    file = put(site, samples(2, time.time()))
    os.chown(file, 64001, 64001)
    error = ingest(file, status=65)
    assert "--users" in error and "a.jsonl: is ignored: user 64001 owns it; expected " in error
    assert not (site / "scores.json").exists()
    for users in ("64001", "daemon,64001"):
        ingest(file, "--users", users)
    (site / "slurm.conf").write_text("ClusterName=c\nslurmuser = 64001(slurm) # user of slurmctld\n")
    ingest(file)
    assert "'no-such-user' is not a user of this host; expected comma-separated names" in ingest(
        "--users", "no-such-user", status=64)


@pytest.mark.parametrize(("args", "status", "message"), [
    (["--interval", "0"], 64, "greater than 0"), (["--interval", "inf"], 64, "greater than 0"),
    (["missing.jsonl"], 65, "cannot be read")])
def test_invalid_argument_is_reported(ingest: Callable[..., str], args: list[str], status: int, message: str) -> None:
    assert message in ingest(*args, status=status)


# --- links ingest as a service


class Service:
    """A running `slurmdl links ingest` with files in `place`."""

    def __init__(self, place: Path, interval_s: float) -> None:
        self.spool, self.snapshot, self.database = place / "spool", place / "scores.json", str(place / "h.db")
        self.child = subprocess.Popen(
            [sys.executable, "-m", "slurmdl", "links", "ingest", f"--interval={interval_s}",
             f"--spool-dir={self.spool}", f"--database={self.database}", f"--score-file={self.snapshot}"],
            text=True, stderr=subprocess.PIPE)
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

    def wait_for_nodes(self, *names: str) -> None:
        self.wait_until(lambda: list(json.loads(self.snapshot.read_text())["nodes"]) == [*names])


@pytest.fixture
def start(site: Path) -> Iterator[Callable[[float], Service]]:
    services = []

    def start_service(interval_s: float) -> Service:
        services.append(Service(site, interval_s))
        return services[-1]

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
    service.put(b"\xff\xfe\n" + format_sample_lines(samples(1, time.time())).encode())
    service.wait_for_nodes("n0")
    status, output = service.end()
    assert status == 0 and "Traceback" not in output, output
    assert sum(map(int, re.findall(r"(\d+) rejected: ", output))) == len(BAD_LINES) + 1, output
    assert all(len(line) < 2500 and line.isprintable() for line in output.splitlines())


def test_stored_samples_survive_a_killed_service(start: Callable[[float], Service]) -> None:
    service = start(0.1)
    service.put(format_sample_lines(samples(5, time.time())).encode())
    service.child.kill()
    service.child.wait()
    assert len(stored_samples(service.database)) == 5


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
    service.put(format_sample_lines(samples(2, time.time())).encode())
    service.wait_for_nodes("n0", "n1")
    assert service.end()[0] == 0


PROMETHEUS_LINE = re.compile(r'[a-zA-Z_:][\w:]*(\{[a-z]+="([^"\\\n]|\\["\\n])*"(,[a-z]+="([^"\\\n]|\\["\\n])*")*\})? '
                             r"-?[\d.]+(e[+-]?\d+)?")


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
