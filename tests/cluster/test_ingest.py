"""Samples of a real cluster in a shared spool, files and pipes: owners, database, score file, rejected files."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from jobs import wait_until

from slurmdl.links.collector import SampleStore

#: program that writes a sample of a node to a spool
WRITE = """
import sys, time
from slurmdl.links.samples import LinkSample, spool_samples
spool_samples(sys.argv[1], [LinkSample("node", sys.argv[2], time.time(), "probe", 1e8)])
"""


@pytest.fixture(scope="module")
def site(new_sandbox):
    return new_sandbox(nodes=2, zones=1)


@pytest.fixture
def spool(site) -> Path:
    """A directory of root on the shared file system to which all users may write, as to /tmp."""
    path = site.directory("spool")
    site.root("sh", "-c", f"chown root: {path}; chmod 1777 {path}")
    return path


def ingest_command(spool: Path, directory: Path, *options: str) -> list[str]:
    return ["slurmdl", "links", "ingest", f"--spool-dir={spool}", f"--database={directory}/samples.db",
            f"--score-file={directory}/scores.json", *options]


def published_nodes(directory: Path) -> set[str]:
    """Return the nodes in the score file."""
    return set(json.loads((directory / "scores.json").read_text())["nodes"])


def write_sample(site, spool: Path, node: str, **user: object) -> None:
    """Write a sample of a node on that node."""
    site.run(["python3", "-c", WRITE, str(spool), node], host=node, **user).check_returncode()


def test_spool_files_of_trusted_users_only_are_stored(site, spool):
    directory, (user, number) = site.directory("collector"), site.run(["sh", "-c", "id -un; id -u"]).stdout.split()
    write_sample(site, spool, "n1", as_root=True)
    write_sample(site, spool, "n2")
    user_file, = (path for path in spool.iterdir() if path.stat().st_uid == int(number))
    done = site.run(ingest_command(spool, directory), as_root=True)
    assert done.returncode == 0 and f"1 rejected: {user_file}: is ignored: user {number} owns it" in done.stderr
    assert [path.name for path in spool.iterdir()] == [f"{user_file.name}.rejected"]
    assert published_nodes(directory) == {"n1"}
    done = site.run(ingest_command(spool, directory), as_root=True)
    assert (done.returncode, done.stderr) == (0, "")  # the rejection is reported only once
    write_sample(site, spool, "n2")
    site.run(ingest_command(spool, directory, f"--users={user}"), as_root=True).check_returncode()
    assert published_nodes(directory) == {"n1", "n2"}
    with SampleStore.open(str(directory / "samples.db")) as store:
        assert {sample.name for sample in store.samples_since(0)} == {"n1", "n2"}


def test_service_reads_the_spool_of_all_nodes_until_it_is_terminated(site, spool):
    directory = site.directory("collector")
    command = site.sandbox.command(["sh", "-c", f'echo $$ >{directory}/pid; exec "$@"', "sh",
                                    *ingest_command(spool, directory, "--interval=0.2")], as_root=True, directory="/")
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for node in ("n1", "n2"):
            write_sample(site, spool, node, as_root=True)
        wait_until(lambda: child.poll() is not None or ((directory / "scores.json").exists()
                                                        and published_nodes(directory) == {"n1", "n2"}), "no scores")
        assert child.poll() is None
        assert not list(spool.iterdir())
    finally:
        site.run(["sh", "-c", f"kill $(cat {directory}/pid)"], as_root=True)
    assert child.communicate(timeout=120)[1] == ""


def test_samples_of_a_pipe_are_stored(site):
    directory = site.directory("pipe")
    line = json.dumps({"kind": "node", "name": "n1", "time": time.time(), "source": "probe", "throughput": 1e8})
    (directory / "samples").write_text(line)
    done = site.run(["sh", "-c", f"cat {directory}/samples | slurmdl links ingest - "
                                 f"--database={directory}/samples.db --score-file={directory}/scores.json"])
    assert done.returncode == 0, done.stderr
    assert published_nodes(directory) == {"n1"}


def test_probe_file_is_accepted_from_trusted_users_only(site):
    """Measurements of an ordinary user do not affect other users unless the admin trusts the user."""
    user, directory = site.run(["id", "-un"]).stdout.strip(), site.directory("probe")
    site.run(["slurmdl", "links", "probe", "--nodes=n[1-2]", "--budget=2s", f"--output={directory}/probe.jsonl"],
             directory=directory).check_returncode()
    argv = ["slurmdl", "links", "ingest", f"{directory}/probe.jsonl", f"--database={directory}/samples.db",
             f"--score-file={directory}/scores.json"]
    rejected = site.run(argv, as_root=True)
    assert rejected.returncode == 65 and "probe.jsonl: is ignored: user " in rejected.stderr
    assert not (directory / "scores.json").exists()
    done = site.run([*argv, f"--users={user}"], as_root=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads((directory / "scores.json").read_text())["nodes"]) == {"n1", "n2"}
