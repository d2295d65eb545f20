"""Kernel counters of a node, the samples made of them, and their transfer to the collector."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slurmdl.cli.links import counters as counters_command
from slurmdl.errors import InputError, UnavailableError, UsageError
from slurmdl.links import counters, sender
from slurmdl.links.counters import CounterReading
from slurmdl.links.samples import LinkSample, parse_sample_lines

SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens InSegs OutSegs RetransSegs InErrs
Tcp: 1 200 120000 -1 10 900 {sent} {again} 0
"""
NETSTAT = """\
TcpExt: SyncookiesSent TCPLostRetransmit TCPDSACKRecv
TcpExt: 0 3 {needless}
IpExt: InNoRoutes InOctets
IpExt: 0 99
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def kernel(root: Path, *, sent: int = 0, again: int = 0, needless: int = 0, boot: str = "one", uptime: float = 1e5,
           speeds: dict[str, str] | None = None, port: dict[str, int] | None = None,
           rate: str = "100 Gb/sec (4X EDR)", state: str = "4: ACTIVE") -> str:
    """Write a tree of /proc and /sys; interfaces have a device unless their name starts with v."""
    write(root / "proc/net/snmp", SNMP.format(sent=sent, again=again))
    write(root / "proc/net/netstat", NETSTAT.format(needless=needless))
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


def sample_of_two(tmp_path: Path, first: dict, second: dict) -> LinkSample | None:
    before = counters.read_counters(kernel(tmp_path, **first))
    return counters.sample_from_counters(before, counters.read_counters(kernel(tmp_path, **second)), "n1", 5.0)


def test_loss_is_retransmissions_without_spurious_ones(tmp_path):
    sample = sample_of_two(tmp_path, {"sent": 1000, "again": 50, "needless": 20},
                {"sent": 11000, "again": 350, "needless": 120, "uptime": 1e5 + 60})
    assert sample == LinkSample("node", "n1", 5.0, "counters", loss=0.02)


@pytest.mark.parametrize(("first", "second"), [
    ({"sent": 1000}, {"sent": 1999, "again": 500}),                      # too few segments
    ({"sent": 5000}, {"sent": 9000, "again": 100, "boot": "two"}),       # reboot
    ({"sent": 5000, "again": 90}, {"sent": 9000, "again": 10}),          # counter wrap
    ({"sent": 5000}, {"sent": 100}),
    ({"sent": 0, "uptime": 9e5}, {"sent": 9000, "uptime": 10}),          # uptime decreased
])
def test_sample_without_usable_counters_is_none(tmp_path, first, second):
    assert sample_of_two(tmp_path, first, second) is None


def test_sample_of_first_reading_has_no_loss(tmp_path):
    now = counters.read_counters(kernel(tmp_path, sent=10**9, again=10**6, speeds={"eth0": "1000"}))
    assert counters.sample_from_counters(None, now, "n1", 5.0) == LinkSample("node", "n1", 5.0, "counters", 125e6)


def test_bandwidth_is_that_of_physical_interfaces(tmp_path):
    root = kernel(tmp_path, speeds={"eth0": "-1", "eth1": "25000", "eth2": "1000", "veth9": "100000"})
    os.symlink("/nonexistent", tmp_path / "sys/class/net/down")
    assert counters.read_counters(root).bandwidth == 25000 * 125_000
    assert counters.read_counters(root, "eth2").bandwidth == 125e6
    assert counters.read_counters(root, "veth9").bandwidth == 0
    assert counters.read_counters(root, "none").bandwidth == 0


IB = {"port_rcv_packets": 1000, "port_xmit_packets": 1000, "port_rcv_errors": 5, "port_xmit_discards": 5}


def test_rdma_port_replaces_tcp_counters(tmp_path):
    later = {**IB, "port_rcv_packets": 11_000, "port_rcv_errors": 105}
    sample = sample_of_two(tmp_path, {"port": IB, "sent": 0}, {"port": later, "sent": 10**6, "again": 10**5})
    assert sample == LinkSample("node", "n1", 5.0, "counters", 100 * 125e6, loss=0.01, rdma=True)
    again = counters.read_counters(kernel(tmp_path, port=IB))
    decreased = counters.sample_from_counters(counters.read_counters(kernel(tmp_path, port=later)), again, "n1", 5.0)
    assert decreased.loss is None
    assert counters.read_counters(kernel(tmp_path, port=IB, state="1: DOWN")).rdma_ports == {}
    assert counters.read_counters(kernel(tmp_path, port=IB, rate="unknown")).rdma_ports["mlx5_0/1"].bandwidth == 0


def test_reading_is_kept_until_enough_segments_were_sent(tmp_path):
    first = counters.read_counters(kernel(tmp_path, sent=100))
    later = counters.read_counters(kernel(tmp_path, sent=700, uptime=1e5 + 60))
    assert not counters.should_replace(first, later)
    assert counters.should_replace(first, counters.read_counters(kernel(tmp_path, sent=1300, uptime=1e5 + 120)))
    assert counters.should_replace(first, counters.read_counters(kernel(tmp_path, sent=700, uptime=1e5 + 4000)))
    assert counters.should_replace(first, counters.read_counters(kernel(tmp_path, sent=50, uptime=1e5 + 60)))
    assert counters.should_replace(None, first)


def test_missing_tcp_counters_are_an_error(tmp_path):
    with pytest.raises(InputError, match="snmp: OutSegs"):
        counters.read_counters(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"boot_id": "x"}',
                                  '{"boot_id":"","uptime_s":"x"}'])
def test_load_reading_of_invalid_file_is_none(tmp_path, text):
    (tmp_path / "state").write_text(text)
    assert counters.load_reading(str(tmp_path / "state")) is None
    assert counters.load_reading(str(tmp_path / "missing")) is None


def test_reading_round_trips_as_json(tmp_path):
    reading = counters.read_counters(kernel(tmp_path, sent=7, port=IB, speeds={"eth0": "1000"}))
    assert CounterReading.from_json(json.loads(json.dumps(reading.to_json()))) == reading


# --- transfer to the collector

SAMPLE = LinkSample("node", "n1", 5.0, "counters", loss=0.01)


def collector(answer: bytes, received: list[bytes]) -> tuple[str, int]:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, server.accept()[0] as connection:
            received.append(connection.makefile("rb").read())
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    address: tuple[str, int] = server.getsockname()
    return address


def test_unsent_samples_stay_in_the_spool_and_are_sent_later(tmp_path):
    spool, received = str(tmp_path / "spool"), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    with pytest.raises(UnavailableError, match="samples are kept in"):
        sender.send_samples(closed, [SAMPLE], spool)
    with pytest.raises(UnavailableError, match="rejected"):
        sender.send_samples(collector(b"rejected\n", []), [SAMPLE._replace(time=6.0)], spool)
    sender.send_samples(collector(b"stored 3\n", received), [SAMPLE._replace(time=7.0)], spool)
    assert [sample.time for sample in parse_sample_lines(received[0].decode().splitlines())] == [5.0, 6.0, 7.0]
    assert os.listdir(spool) == []
    with pytest.raises(UnavailableError, match=r"Connection refused$"):  # no samples
        sender.send_samples(closed, [], spool)
    assert os.listdir(spool) == []


def test_spool_is_bounded_and_holds_complete_files(tmp_path):
    for number in range(sender.MAX_SPOOL_FILES + 5):
        sender.spool_samples(str(tmp_path), [SAMPLE._replace(time=1000.0 + number)])
    names = sorted(os.listdir(tmp_path))
    assert len(names) == sender.MAX_SPOOL_FILES
    assert names[0].startswith("1005.")
    assert all(name.endswith(".jsonl") for name in names)


# --- the command

def test_command_without_strict_is_silent_and_succeeds(tmp_path, capsys):
    state = tmp_path / "state"
    assert counters_command.run([f"--state-dir={state}", "--node-name=n1"]) == 0
    assert (state / "counters.json").exists()
    assert not stat.S_IMODE((state / "counters.json").stat().st_mode) & 0o022
    blocked = tmp_path / "file"
    blocked.touch()
    assert counters_command.run([f"--state-dir={blocked}/x"]) == 0
    assert counters_command.run([f"--state-dir={state}", "--collector=127.0.0.1:1"]) == 0
    assert capsys.readouterr() == ("", "")
    assert counters_command.run(["--collector=nowhere"]) == 0
    assert counters_command.run(["--no-such-option"]) == 0
    out, stderr = capsys.readouterr()
    assert (out, len(stderr.splitlines())) == ("", 2)
    with pytest.raises(UsageError):
        counters_command.run(["--collector=nowhere", "--strict"])
    with pytest.raises(UnavailableError):
        counters_command.run([f"--state-dir={blocked}/x", "--strict"])


def test_command_does_not_import_slow_modules(tmp_path):
    code = (f"import sys; from slurmdl.cli.main import main; main(['links', 'counters', '--state-dir={tmp_path}']);"
            "print(*sys.modules)")
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(process.stdout.split())
    assert not loaded & {"numpy", "yaml", "subprocess", "asyncio", "sqlite3", "urllib.request", "torch", "mpi4py"}
