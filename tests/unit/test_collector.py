"""The database of samples and published files: full disks, locks, invalid files, killed processes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmdl.cli.main import main
from slurmdl.errors import InputError, UnavailableError
from slurmdl.links import collector
from slurmdl.links.collector import SampleStore, publish_file
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.samples import LinkSample, format_sample_lines

NOW = 1.8e9


def samples(count: int, now: float = NOW) -> list[LinkSample]:
    return [LinkSample("node", f"n{i % 7}", now - i, "probe", throughput=1e9 + i, rtt=1e-4, loss=0.0)
            for i in range(count)]


def test_stored_samples_are_returned(tmp_path: Path) -> None:
    stored_samples = [*samples(20), LinkSample("inter_leaf", "a|b", NOW, "job", rtt=1.0, rtt_p99=2.0, rdma=True)]
    with SampleStore.open(str(tmp_path / "h.db")) as database:
        assert database.add(stored_samples) == 21
        assert database.add(stored_samples[5:]) == 0
    with SampleStore.open(str(tmp_path / "h.db")) as database:
        assert set(database.samples_since(0)) == set(stored_samples)
        assert set(database.samples_since(NOW - 3)) == {sample for sample in stored_samples if sample.time >= NOW - 3}


def test_prune_bounds_age_and_rows_and_shrinks_the_file(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with SampleStore.open(str(path)) as database:
        database.add(samples(20_000))
        assert database.prune(NOW, retention_s=10_000) == 9_999
        assert len(database.samples_since(0)) == 10_001
        assert database.prune(NOW, retention_s=1e9, max_rows=100) == 9_901
        assert {sample.time for sample in database.samples_since(0)} == {NOW - i for i in range(100)}
    assert path.stat().st_size < 200_000


def test_prune_with_a_clock_ahead_deletes_nothing(tmp_path: Path) -> None:
    with SampleStore.open(str(tmp_path / "h.db")) as database:
        database.add(samples(10))
        assert database.prune(NOW + 1e9, retention_s=100) == 0
        assert database.prune(NOW, retention_s=5) == 4
        assert len(database.samples_since(0)) == 6


def test_locked_database_is_an_error_without_loss_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LOCK_TIMEOUT_S", 0.1)
    path = str(tmp_path / "h.db")
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
def small_disk(tmp_path: Path) -> Path:
    """Mount point of a file system of 1 MB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    process = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "none", str(mount_point)],
                             check=False, capture_output=True, text=True)
    if process.returncode:
        pytest.skip(f"cannot mount: {process.stderr.strip()}")
    yield mount_point  # type: ignore[misc]
    subprocess.run(["umount", str(mount_point)], check=True)


def test_full_disk_is_an_error_and_keeps_stored_samples(small_disk: Path) -> None:
    history_file, snapshot = small_disk / "h.db", small_disk / "scores.json"
    publish_file(str(snapshot), LinkScores(time=NOW).to_text())
    before = snapshot.read_text()
    stored: list[LinkSample] = []
    with SampleStore.open(str(history_file)) as database:
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
    with SampleStore.open(str(history_file)) as database:
        assert set(database.samples_since(0)) == set(stored)


def test_file_that_is_no_database_is_rejected_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    path.write_text("not a database, not at all" * 100)
    with pytest.raises(InputError, match="expected a database"), SampleStore.open(str(path)):
        pass
    assert path.read_text().startswith("not a database")
    with pytest.raises(UnavailableError), SampleStore.open(str(tmp_path / "no" / "h.db")):
        pass


def test_killed_process_loses_no_committed_samples(tmp_path: Path) -> None:
    """The child prints the number of stored samples after each commit."""
    path = str(tmp_path / "h.db")
    code = ("import sys\nfrom slurmdl.links.samples import LinkSample\n"
            "from slurmdl.links.collector import SampleStore\n"
            "with SampleStore.open(sys.argv[1]) as database:\n    i = 0\n    while True:\n"
            "        database.add([LinkSample('node', 'n', 1e9 + i + k, 'probe', loss=0.0) for k in range(50)])\n"
            "        i += 50\n        print(i, flush=True)\n")
    child = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    output = 0
    for _ in range(20):
        output = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    remaining = child.stdout.read().split()
    child.wait()
    output = int(remaining[-1]) if remaining else output
    with SampleStore.open(path) as database:
        stored = len(database.samples_since(0))
    assert stored >= output and stored % 50 == 0


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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory for all files, without the configuration of this host."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    tmp_path.chmod(0o755)
    return tmp_path


def ingest(site: Path, *args: str) -> int:
    return main(["links", "ingest", "--database", str(site / "h.db"), "--snapshot", str(site / "scores.json"), *args])


def published_scores(site: Path) -> LinkScores:
    return LinkScores.from_json(json.loads((site / "scores.json").read_text()))


def test_ingest_publishes_files_and_reports_malformed_samples(site: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    text = format_sample_lines(samples(7, time.time()))
    (site / "a.jsonl").write_text(text + '{"kind": "node", "name": "n1", "time": 5, "source": "probe", "loss": -1}\n'
                                  + text.splitlines()[0][:30])
    assert ingest(site, "--textfile", str(site / "s.prom"), str(site / "a.jsonl")) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "2 rejected: line 8: sample of n1: loss -1: expected" in output.err and "line 9" in output.err
    assert sorted(published_scores(site).nodes) == [f"n{i}" for i in range(7)]
    assert 'slurmdl_link_loss_ratio{kind="node",link="n3"} 0.0' in (site / "s.prom").read_text()


def test_ingested_spool_files_are_removed(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spool = site / "spool"
    spool.mkdir()
    for name in ("a.jsonl", "b.jsonl", ".half.jsonl", "other.txt"):
        (spool / name).write_text(format_sample_lines([samples(1, time.time())[0]._replace(name=name[0] * 2)]))
        (spool / name).chmod(0o644)
    assert ingest(site, "--spool-dir", str(spool)) == 0
    assert sorted(os.listdir(spool)) == [".half.jsonl", "other.txt"]
    assert sorted(published_scores(site).nodes) == ["aa", "bb"]
    assert not capsys.readouterr().err


def test_rejected_spool_files_are_renamed_and_reported_once(site: Path,
                                                                         capsys: pytest.CaptureFixture[str]) -> None:
    spool = site / "spool"
    spool.mkdir()
    good = format_sample_lines(samples(1, time.time()))
    bad = good.replace("}", ', "rdma": [1]}')
    for name, text in (("good", good), ("half", good.replace("n0", "n1") + bad), ("open", good.replace("n0", "n2"))):
        (spool / f"{name}.jsonl").write_text(text)
    (spool / "open.jsonl").chmod(0o666)
    (spool / "folder.jsonl").mkdir()
    # a user who may write into the spool chooses a trusted file of the collector
    (site / "own.jsonl").write_text(good.replace("n0", "n3"))
    (spool / "link.jsonl").symlink_to(site / "own.jsonl")
    assert ingest(site, "--spool-dir", str(spool)) == 0
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "4 rejected: " in output
    assert sorted(os.listdir(spool)) == [f"{name}.jsonl.rejected" for name in ("folder", "half", "link", "open")]
    assert (site / "own.jsonl").exists()
    assert (spool / "half.jsonl.rejected").read_text().endswith(bad)
    assert sorted(published_scores(site).nodes) == ["n0", "n1"]
    assert ingest(site, "--spool-dir", str(spool)) == 0 and not capsys.readouterr().err


def test_rejected_spool_files_are_bounded(site: Path) -> None:
    spool = site / "spool"
    spool.mkdir()
    for i in range(110):
        (spool / f"{i:03}.jsonl").write_text("no sample\n")
    assert ingest(site, "--spool-dir", str(spool)) == 0
    (spool / "200.jsonl").write_text("no sample\n")
    assert ingest(site, "--spool-dir", str(spool)) == 0
    files = sorted(os.listdir(spool))
    assert len(files) == 100 and files[-1] == "200.jsonl.rejected"


def test_missing_spool_does_not_prevent_publication(site: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    (site / "a.jsonl").write_text(format_sample_lines(samples(2, time.time())))
    assert ingest(site, "--spool-dir", str(site / "none"), str(site / "a.jsonl")) == 69
    assert "none: cannot be read (No such file" in capsys.readouterr().err
    assert len(published_scores(site).nodes) == 2


def test_invalid_rows_are_skipped(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    with SampleStore.open(path) as database:
        database.add(samples(1))
    with sqlite3.connect(path) as direct:
        direct.execute("INSERT INTO samples (kind, name, time, source, loss) VALUES ('node', 'n\x1b', ?, 'probe', 0)",
                       (NOW,))
        direct.execute("INSERT INTO samples (kind, name, time, source, loss) VALUES ('node', 'n8', ?, 'probe', 'x')",
                       (NOW,))
    with SampleStore.open(path) as database:
        assert [sample.name for sample in database.samples_since(0)] == ["n0"]


def test_samples_of_unknown_links_are_rejected(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "topology.conf").write_text("SwitchName=a Nodes=n[0-2]\nSwitchName=b Nodes=n[3-5]\n"
                                        "SwitchName=r Switches=a,b\n")
    inter_leaf = [LinkSample("inter_leaf", "a|b", time.time(), "probe", loss=0.0),
            LinkSample("inter_leaf", "a|x", time.time(), "probe", loss=0.0)]
    (site / "a.jsonl").write_text(format_sample_lines([*samples(7, time.time()), *inter_leaf]))
    assert ingest(site, str(site / "a.jsonl")) == 0
    assert "2 rejected: unknown node n6; unknown inter_leaf a|x" in capsys.readouterr().err
    assert sorted(published_scores(site).nodes) == [f"n{i}" for i in range(6)]
    assert list(published_scores(site).inter_leaf) == ["a|b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_samples_of_other_users_are_rejected_unless_trusted(site: Path,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    (site / "a.jsonl").write_text(format_sample_lines(samples(2, time.time())))
    os.chown(site / "a.jsonl", 64001, 64001)
    assert ingest(site, str(site / "a.jsonl")) == 65
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "--users" in output
    assert "a.jsonl: is ignored: user 64001 owns it; expected " in output
    assert not (site / "scores.json").exists()
    for args in (["--users", "64001"], ["--users", "daemon,64001"]):
        assert ingest(site, str(site / "a.jsonl"), *args) == 0
    (site / "slurm.conf").write_text("ClusterName=c\nslurmuser = 64001(slurm) # user of slurmctld\n")
    assert ingest(site, str(site / "a.jsonl")) == 0
    assert ingest(site, "--users", "no-such-user") == 64
    assert "'no-such-user' is not a user of this host; expected comma-separated names" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "message"), [
    (["--interval", "0"], "greater than 0"), (["--interval", "inf"], "greater than 0"),
    (["missing.jsonl"], "cannot be read"),
])
def test_invalid_argument_is_reported_in_one_line(site: Path, capsys: pytest.CaptureFixture[str], args: list[str],
                                  message: str) -> None:
    assert ingest(site, *args) in (64, 65)
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1


def test_database_of_another_version_is_rejected_and_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE samples (kind, name, time, source, throughput, delay, delay_tail, loss, rdma, "
                    "PRIMARY KEY (time, kind, name, source)) WITHOUT ROWID")
        old.execute("INSERT INTO samples VALUES ('node', 'n1', 1e9, 'probe', 5.0, NULL, NULL, NULL, 1)")
    with pytest.raises(InputError, match="schema version 0; expected 2"), SampleStore.open(path):
        pass
    with sqlite3.connect(path) as old:
        assert old.execute("SELECT count(*) FROM samples").fetchone() == (1,)


def test_version_of_a_new_database_is_written(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    with SampleStore.open(path) as database, SampleStore.open(path) as second:
        assert database.add(samples(1)) == 1 and second.add(samples(1)) == 0
    with sqlite3.connect(path) as direct:
        assert direct.execute("PRAGMA user_version").fetchone() == (2,)
