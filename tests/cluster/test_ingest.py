"""Authentication of senders of samples on a real cluster with munge on every host."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurmdl.links.samples import LinkSample, format_sample_lines

#: sends a file as it stands, from any port, and prints the answer
SEND = """
import socket, sys
with socket.create_connection(("login", 6840)) as connection:
    connection.sendall(open(sys.argv[1], "rb").read())
    connection.shutdown(socket.SHUT_WR)
    print(connection.makefile().read(), end="")
"""
#: writes a file of samples with a credential of the user who runs it before them
SIGN = """
import sys
from slurmdl.links import munge
data = open(sys.argv[1], "rb").read()
open(sys.argv[2], "wb").write(munge.create_credential(data).encode() + b"\\n" + data)
"""


@pytest.fixture(scope="module")
def site(new_sandbox):
    return new_sandbox(nodes=2, zones=1)


@contextmanager
def collector(site, *options: str) -> Iterator[Path]:
    """Run `slurmdl links ingest` on the login host as root; yield its directory."""
    place = site.directory("collector")
    child = subprocess.Popen(
        site.box.command(["sh", "-c", f'echo $$ >{place}/pid; exec "$@"', "sh", "slurmdl", "links", "ingest",
                          "--listen=:6840", "--allow=10.0.0.0/8", "--interval=1", f"--database={place}/samples.db",
                          f"--snapshot={place}/scores.json", *options],
                         as_root=True, directory="/"), stderr=subprocess.PIPE, text=True)
    try:
        told = child.stderr.readline()
        assert "listening on port 6840" in told, told
        (place / "stderr").write_text(told)
        yield place
    finally:
        site.run(["sh", "-c", f"kill $(cat {place}/pid)"], as_root=True)
        (place / "stderr").write_text((place / "stderr").read_text() + child.stderr.read())
        child.wait(30)


def written(site, name: str = "n1", **figures: float) -> Path:
    """Write a file with one sample in a directory of the ordinary user."""
    path = site.directory("samples") / "1.jsonl"
    path.write_text(format_sample_lines(
        [LinkSample("node", name, time.time(), "probe", **(figures or {"throughput": 1e8}))]))
    os.chmod(path, 0o644)
    return path


def sent(site, path: Path, **where: object) -> str:
    """Answer of the collector to the raw contents of a file."""
    done = site.run(["python3", "-c", SEND, str(path)], **where)
    done.check_returncode()
    return done.stdout


def signed(site, path: Path, **who: object) -> Path:
    credential = path.with_suffix(".signed")
    site.run(["python3", "-c", SIGN, str(path), str(credential)], **who).check_returncode()
    return credential


def collected(site, spool: Path, **who: object) -> subprocess.CompletedProcess[str]:
    """Send a spool with `links counters`."""
    return site.run(["slurmdl", "links", "counters", "--strict", "--collector=login:6840", f"--spool-dir={spool}",
                     f"--state-dir={spool}"], host="n1", **who)


def test_munge_accepts_trusted_users_only(site):
    user = site.run(["id", "-u"]).stdout.strip()
    with collector(site) as place:
        mine, roots = written(site), written(site)
        refused = collected(site, mine.parent)
        assert refused.returncode == 69 and f"user {user} is not trusted" in refused.stderr, refused.stderr
        assert mine.exists()  # kept for the next attempt
        done = collected(site, roots.parent, as_root=True)
        assert done.returncode == 0, done.stderr
        assert not roots.exists()
    assert "senders need a munge credential of user 0" in (place / "stderr").read_text()
    assert f"user {user} is not trusted" in (place / "stderr").read_text()
    assert list(json.loads((place / "scores.json").read_text())["nodes"]) == ["n1"]
    with collector(site, f"--users={user}"):
        assert collected(site, mine.parent).returncode == 0


def test_munge_rejects_ports_and_invalid_credentials(site):
    """A privileged port, and stolen, modified, replayed and forged credentials are rejected."""
    plain = written(site)
    stolen = signed(site, plain, as_root=True)
    credential, _, samples = stolen.read_bytes().partition(b"\n")
    with collector(site) as place:
        assert "no munge credential" in sent(site, plain, host="n1")
        other = plain.with_suffix(".other")
        other.write_bytes(credential + b"\n" + samples.replace(b"1e8", b"1.0").replace(b"100000000.0", b"1.0"))
        assert "the credential is for other samples" in sent(site, other, host="n1")
        # each host accepts a credential once, whatever its samples
        assert "eplayed" in sent(site, stolen, host="n1")
        other.write_bytes(b"MUNGE:AwQDAAB:\n" + samples)
        assert "munge: " in sent(site, other, host="n1")
        other.write_bytes(b"MUNGE:" + b"A" * 10**5 + b":\n" + samples)
        assert "no munge credential" in sent(site, other, host="n1")
        low = "import time; from slurmdl.links import munge, sender; munge._LIBRARY = 'libnone.so'; " \
              "from slurmdl.links.samples import LinkSample; " \
              "sample = LinkSample('node', 'n2', time.time(), 'probe', 1e8); " \
              "sender.send_samples(('login', 6840), [sample], '/run/spool')"
        done = site.run(["python3", "-c", low], host="n2", as_root=True)
        assert "no munge credential" in done.stderr
        assert sent(site, signed(site, plain, as_root=True), host="n2") == "stored 1\n"
    assert list(json.loads((place / "scores.json").read_text())["nodes"]) == ["n1"]
    assert len((place / "stderr").read_text().splitlines()) <= 10


def test_probe_file_is_accepted_from_trusted_users_only(site):
    """Measurements of an ordinary user do not affect others unless the admin trusts the user."""
    user, place = site.run(["id", "-un"]).stdout.strip(), site.directory("probe")
    site.run(["slurmdl", "links", "probe", "--nodes=n[1-2]", "--budget=2s", f"--output={place}/probe.jsonl"],
             directory=place).check_returncode()
    words = ["slurmdl", "links", "ingest", f"{place}/probe.jsonl", f"--database={place}/samples.db",
             f"--snapshot={place}/scores.json"]
    refused = site.run(words, as_root=True)
    assert refused.returncode == 65 and "probe.jsonl: is ignored: user " in refused.stderr
    assert not (place / "scores.json").exists()
    done = site.run([*words, f"--users={user}"], as_root=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads((place / "scores.json").read_text())["nodes"]) == {"n1", "n2"}


def test_without_munge_the_source_port_decides(new_sandbox):
    site = new_sandbox(nodes=2, zones=1)
    site.run(["sh", "-c", "kill $(cat /run/munge/munged.pid)"], as_root=True).check_returncode()
    with collector(site) as place:
        mine, roots = written(site), written(site, "n2")
        refused = collected(site, mine.parent)
        assert refused.returncode == 69 and "is not privileged" in refused.stderr, refused.stderr
        done = collected(site, roots.parent, as_root=True)  # with a credential, which is not required
        assert done.returncode == 0, done.stderr
    assert "senders need a port below 1024" in (place / "stderr").read_text()
    assert list(json.loads((place / "scores.json").read_text())["nodes"]) == ["n2"]
    done = site.run(["slurmdl", "links", "ingest", "--listen=:6840", "--auth=munge",
                     f"--database={place}/samples.db"], as_root=True)
    assert done.returncode == 69 and "munge does not answer" in done.stderr
