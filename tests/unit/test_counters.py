"""Kernel counters of a node, the samples made of them, and their spool files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmdl.cli import links
from slurmdl.errors import InputError, UnavailableError, UsageError
from slurmdl.links import counters
from slurmdl.links.counters import CounterReading
from slurmdl.links.samples import MAX_SPOOL_FILES, LinkSample, parse_sample_lines, spool_samples

SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens InSegs OutSegs RetransSegs InErrs
Tcp: 1 200 120000 -1 10 900 {sent} {retransmitted} 0
"""
NETSTAT = """\
TcpExt: SyncookiesSent TCPLostRetransmit TCPDSACKRecv
TcpExt: 0 3 {spurious}
IpExt: InNoRoutes InOctets
IpExt: 0 99
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fake_kernel(root: Path, *, sent: int = 0, retransmitted: int = 0, spurious: int = 0, boot: str = "one",
                uptime: float = 1e5, speeds: dict[str, str] | None = None, port: dict[str, int] | None = None,
                rate: str = "100 Gb/sec (4X EDR)", state: str = "4: ACTIVE") -> str:
    """Write a tree of /proc and /sys; interfaces have a device unless their name starts with v."""
    write(root / "proc/net/snmp", SNMP.format(sent=sent, retransmitted=retransmitted))
    write(root / "proc/net/netstat", NETSTAT.format(spurious=spurious))
    write(root / "proc/sys/kernel/random/boot_id", f"{boot}\n")
    write(root / "proc/uptime", f"{uptime} 1.0\n")
    for name, speed in (speeds or {}).items():
        write(root / f"sys/class/net/{name}/speed", f"{speed}\n")
        if not name.startswith("v"):
            (root / f"sys/class/net/{name}/device").mkdir(exist_ok=True)
    if port is not None:
        port_dir = root / "sys/class/infiniband/mlx5_0/ports/1"
        write(port_dir / "state", f"{state}\n")
        write(port_dir / "rate", f"{rate}\n")
        for name, value in port.items():
            write(port_dir / "counters" / name, f"{value}\n")
    return str(root)


IB = {"port_rcv_packets": 1000, "port_xmit_packets": 1000, "port_rcv_errors": 5, "port_xmit_discards": 5}
LATER = {**IB, "port_rcv_packets": 11_000, "port_rcv_errors": 105}


@pytest.mark.parametrize(("first", "second", "expected"), [
    # retransmissions without spurious ones
    ({"sent": 1000, "retransmitted": 50, "spurious": 20},
     {"sent": 11000, "retransmitted": 350, "spurious": 120, "uptime": 1e5 + 60}, {"loss": 0.02}),
    ({"sent": 1000}, {"sent": 1999, "retransmitted": 500}, None),  # too few segments
    ({"sent": 5000}, {"sent": 9000, "retransmitted": 100, "boot": "two"}, None),  # reboot
    ({"sent": 5000, "retransmitted": 90}, {"sent": 9000, "retransmitted": 10}, None),  # counter wrap
    ({"sent": 5000}, {"sent": 100}, None), ({"sent": 0, "uptime": 9e5}, {"sent": 9000, "uptime": 10}, None),
    # an RDMA port replaces the counters of TCP
    ({"port": IB, "sent": 0}, {"port": LATER, "sent": 10**6, "retransmitted": 10**5},
     {"throughput": 100 * 125e6, "loss": 0.01, "rdma": True}),
    ({"port": LATER}, {"port": IB}, {"throughput": 100 * 125e6, "loss": None, "rdma": True}),
    # nothing to compare the first reading with
    (None, {"sent": 10**9, "retransmitted": 10**6, "speeds": {"eth0": "1000"}}, {"throughput": 125e6}),
])
def test_sample_of_two_readings(tmp_path, first, second, expected):
    before = None if first is None else counters.read_counters(fake_kernel(tmp_path, **first))
    sample = counters.sample_from_counters(before, counters.read_counters(fake_kernel(tmp_path, **second)), "n1", 5.0)
    assert sample == (expected and LinkSample("node", "n1", 5.0, "counters", **expected))


def test_bandwidth_counts_physical_interfaces_only(tmp_path):
    root = fake_kernel(tmp_path, speeds={"eth0": "-1", "eth1": "25000", "eth2": "1000", "veth9": "100000"})
    os.symlink("/nonexistent", tmp_path / "sys/class/net/down")
    assert counters.read_counters(root).bandwidth == 25000 * 125_000
    assert counters.read_counters(root, "eth2").bandwidth == 125e6
    assert counters.read_counters(root, "veth9").bandwidth == 0
    assert counters.read_counters(root, "none").bandwidth == 0


def test_rdma_port_that_is_down_or_of_unknown_rate(tmp_path):
    assert counters.read_counters(fake_kernel(tmp_path, port=IB, state="1: DOWN")).rdma_ports == {}
    unknown_rate = counters.read_counters(fake_kernel(tmp_path, port=IB, rate="unknown"))
    assert unknown_rate.rdma_ports["mlx5_0/1"].bandwidth == 0


@pytest.mark.parametrize(("sent", "seconds", "expected"), [
    (700, 60, False), (1300, 120, True), (700, 4000, True), (50, 60, True)])
def test_reading_is_kept_until_enough_segments_were_sent(tmp_path, sent, seconds, expected):
    first = counters.read_counters(fake_kernel(tmp_path, sent=100))
    later = counters.read_counters(fake_kernel(tmp_path, sent=sent, uptime=1e5 + seconds))
    assert counters.should_replace(first, later) == expected
    assert counters.should_replace(None, first)


def test_missing_tcp_counters_are_an_error(tmp_path):
    with pytest.raises(InputError, match="snmp: OutSegs"):
        counters.read_counters(str(tmp_path))


READING = ('{"boot_id": "b", "uptime_s": 1.5, "segments_sent": 7, "segments_retransmitted": 0, '
           '"spurious_retransmits": 0, "bandwidth": 0.0, "rdma_ports": {}}')


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"boot_id": "x"}',
                                  READING.replace("1.5", '"x"'), READING.replace("7", "Infinity"),
                                  READING.replace("{}", "[]"), READING.replace("{}", '{"p": [1]}')])
def test_load_reading_of_invalid_file_is_none(tmp_path, text):
    (tmp_path / "state").write_text(text)
    assert counters.load_reading(str(tmp_path / "state")) is None
    assert counters.load_reading(str(tmp_path / "missing")) is None


def test_reading_round_trips_as_json(tmp_path):
    reading = counters.read_counters(fake_kernel(tmp_path, sent=7, port=IB, speeds={"eth0": "1000"}))
    minimal = CounterReading("b", 1.5, 7, 0, 0, 0.0, {})
    for each, text in ((reading, json.dumps(reading.to_json())), (minimal, READING)):
        write(tmp_path / "state", text)
        assert counters.load_reading(str(tmp_path / "state")) == each


# --- spool files

SAMPLE = LinkSample("node", "n1", 5.0, "counters", loss=0.01)


def test_spool_files_hold_the_samples(tmp_path):
    spool_samples(str(tmp_path / "spool"), [])
    assert not (tmp_path / "spool").exists()
    spool_samples(str(tmp_path / "spool"), [SAMPLE, SAMPLE._replace(time=6.0)])
    path, = (tmp_path / "spool").iterdir()
    assert path.name.endswith(".jsonl")
    assert list(parse_sample_lines(path.read_text().splitlines())) == [SAMPLE, SAMPLE._replace(time=6.0)]
    with pytest.raises(UnavailableError, match="samples cannot be written"):
        spool_samples(str(path), [SAMPLE])


def test_spool_is_bounded_for_each_host(tmp_path, monkeypatch):
    hosts = {"a": 5, "b-a": MAX_SPOOL_FILES + 5}
    for host, count in hosts.items():
        monkeypatch.setattr(os, "uname", lambda host=host: SimpleNamespace(nodename=host))
        for number in range(count):
            spool_samples(str(tmp_path), [SAMPLE._replace(time=1000.0 + number)])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 5 + MAX_SPOOL_FILES
    assert all(name.endswith(".jsonl") for name in names)
    assert next(name for name in names if "-b-a-" in name).startswith("1005.")


# --- the command

def test_command_without_strict_is_silent_and_succeeds(tmp_path, capsys):
    state = tmp_path / "state"
    assert links.run(["counters", f"--state-dir={state}", "--node-name=n1"]) == 0
    assert (state / "counters.json").exists()
    assert not stat.S_IMODE((state / "counters.json").stat().st_mode) & 0o022
    blocked = tmp_path / "file"
    blocked.touch()
    assert links.run(["counters", f"--state-dir={blocked}/x"]) == 0
    assert capsys.readouterr() == ("", "")
    assert links.run(["counters", "--no-such-option"]) == 0
    out, stderr = capsys.readouterr()
    assert (out, len(stderr.splitlines())) == ("", 1)
    with pytest.raises(UsageError):
        links.run(["counters", "--no-such-option", "--strict"])
    with pytest.raises(UnavailableError):
        links.run(["counters", f"--state-dir={blocked}/x", "--strict"])


def test_command_does_not_import_slow_modules(tmp_path):
    code = (f"import sys; from slurmdl.cli.main import main; main(['links', 'counters', '--state-dir={tmp_path}']);"
            "print(*sys.modules)")
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(process.stdout.split())
    assert not loaded & {"numpy", "yaml", "subprocess", "asyncio", "sqlite3", "urllib.request", "torch", "mpi4py"}
