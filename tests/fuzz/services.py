"""Fuzz the probe reflector over TCP, and the spool of `links ingest`: both must survive all input.

    python tests/fuzz/services.py SECONDS [SEED]

Many peers attack the reflector concurrently: mutated probes, random bytes, partial lines, resets, idle and slow
connections, bursts of connections. They also put mutated files into the spool. Prints statistics as JSON; the exit
status is 1 if a service exited, logged an internal error, exceeded a limit, or ignores valid peers and files.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmdl.links.probe.channel import Deadline
from slurmdl.links.probe.pair_probe import ProbeConfig, measure_pair
from slurmdl.links.probe.protocol import ControlChannel, ProbeSocket
from slurmdl.links.samples import LinkSample, format_sample_lines

SECRET = b"a secret of the probe"
#: program that runs a probe reflector until it is terminated
REFLECT = f"""
import signal, sys
from slurmdl.links.probe.pair_probe import Reflector

print("listening on port", Reflector("", {SECRET!r}).port, file=sys.stderr, flush=True)
signal.pause()
"""
PEERS, MAX_MEMORY_KB, MAX_FILES = 24, 600_000, 600
SHORT = ProbeConfig(rtt_probes=5, rtt_seconds=0.02, loss_probes=20, stream_bytes=10**5, stream_seconds=0.05,
                    timeout_s=3.0)
VALUES = ("null", "true", "false", "-1", "0", "1", "1e400", "-1e400", "NaN", "Infinity", "9" * 30, "9" * 5000,
          "0." + "1" * 400, "[]", "[1]", "{}", '{"a": 1}', '""',
          '"x"', '"\\ud800"', '"\\u0000"', '"\\u001b[2J"', '"a|b"', '"b|a"',
          "[" * 950 + "]" * 950, "[" * 50_000, '"' + "n" * 70_000 + '"', '"probe"', '"node"',
          '"inter_leaf"', '"\\u202e"')
ODD: tuple[Any, ...] = (None, True, -1, 0, 1e308, -1e308, float("inf"), float("nan"), 10**30, "", "x", [], {}, [[]])
KEYS = ("kind", "name", "time", "source", "throughput", "rtt", "rtt_p99", "loss", "rdma", "throughput_rse", "", "cls",
        "op", "size", "seconds", "udp", "end", "wait", "token")
BYTES = (b"\0", b"\xff", b"\n", b"\r\n", b'"', b"{", b"}", b"[", b"\\", b"\xed\xa0\x80", b" ")


def sample_line(rng: random.Random) -> str:
    """Return the JSON line of a sample with mutated keys and values."""
    fields = {"kind": '"node"', "name": f'"n{rng.randrange(50)}"', "time": repr(time.time()), "source": '"probe"',
              "throughput": "1e9", "loss": "0.01"}
    for _ in range(rng.choice((0, 1, 1, 2))):
        fields[rng.choice(KEYS)] = rng.choice(VALUES)
    pairs = [f'"{key}": {value}' for key, value in fields.items()]
    if rng.random() < 0.1:
        pairs.append(rng.choice(pairs))
    if rng.random() < 0.1:
        rng.shuffle(pairs)
        pairs.pop()
    return "{" + ", ".join(pairs) + "}\n"


def run_probe_session(rng: random.Random, peer: socket.socket) -> None:
    """Run an authenticated probe session with mutated requests and datagrams."""
    control, datagrams = ControlChannel(peer, SECRET, Deadline(2), is_client=True), ProbeSocket(peer.getsockname()[0])
    try:
        control.write_message(udp=rng.choice((datagrams.port, datagrams.port, datagrams.port, *ODD)))
        port = int(control.read_message()["udp"])
        datagrams.connect((peer.getpeername()[0], port), rng.choice((control.tag, b"no tag")))
        for _ in range(rng.randrange(6)):
            op = rng.choice(("echo", "receive_stream", "send_stream", "receive_train", "send_train", rng.choice(ODD)))
            control.write_message(op=op, size=rng.choice((10**5, *ODD)), seconds=rng.choice((0.1, *ODD)))
            for _ in range(rng.randrange(20)):
                datagrams.send(rng.randbytes(rng.choice((0, 1, 64, 1400))))
            if rng.random() < 0.3:
                peer.sendall(rng.randbytes(rng.choice((1, 20_000))))
            control.write_message(**{rng.choice(("end", "wait", "op")): rng.choice((True, 0.05, *ODD))})
            if rng.random() < 0.5:
                control.read_message()
    finally:
        datagrams.close()


def probe_lines(rng: random.Random) -> bytes:
    """Return unauthenticated lines of the probe protocol with mutated values."""
    lines = [b"%032x\n" % rng.getrandbits(128)]
    for _ in range(rng.randrange(6)):
        op = rng.choice(('"echo"', '"receive_stream"', '"send_stream"', '"receive_train"', '"send_train"',
                          rng.choice(VALUES)))
        lines.append(f'{{"token": "", "udp": {rng.choice(("9", *VALUES))}, "op": {op}, "size": '
                     f'{rng.choice(("100000", *VALUES))}, "seconds": {rng.choice(("0.1", *VALUES))}}}\n'.encode())
    return b"".join(lines)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Return the data with a few bytes changed, removed or inserted."""
    for _ in range(rng.choice((0, 0, 1, 3, 10))):
        position = rng.randrange(len(data) + 1)
        replacement = rng.choice((*BYTES, b"", bytes([rng.randrange(256)])))
        data = data[:position] + replacement + data[position + rng.randrange(3):]
    return data


def sample_lines(rng: random.Random) -> bytes:
    return "".join(sample_line(rng) for _ in range(rng.choice((1, 2, 20)))).encode(errors="surrogatepass")


class Services:
    """Both services as processes, with the spool and the reflector's port; stderr is written to files."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.spool = directory, directory / "spool"
        self.spool.mkdir()
        arguments = {
            "ingest": ["-m", "slurmdl", "links", "ingest", "--interval=1", f"--database={directory}/h.db",
                       f"--spool-dir={self.spool}", f"--score-file={directory}/scores.json"],
            "reflector": ["-c", REFLECT]}
        environ = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf"),
                   "XDG_CONFIG_HOME": str(directory / "xdg")}
        self.processes = {}
        for name, options in arguments.items():
            with (directory / f"{name}.err").open("w") as stderr:
                self.processes[name] = subprocess.Popen([sys.executable, *options], env=environ, stderr=stderr)
        while not (match := re.search(r"listening on port (\d+)", self.stderr_of("reflector"))):
            assert self.processes["reflector"].poll() is None, self.stderr_of("reflector")
            time.sleep(0.05)
        self.port = int(match[1])

    def stderr_of(self, name: str) -> str:
        return (self.directory / f"{name}.err").read_text(errors="replace")

    def faults(self) -> list[str]:
        """Return the faults of the services so far."""
        faults = []
        for name, process in self.processes.items():
            text = self.stderr_of(name)
            if process.poll() is not None:
                faults.append(f"{name} ended with status {process.returncode}: {text[-2000:]}")
                continue
            if "Traceback" in text or "internal error" in text:
                faults.append(f"{name} logged: {text[:3000]}")
            memory = int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[0])
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            if memory > MAX_MEMORY_KB or files > MAX_FILES:
                faults.append(f"{name} has {memory} kB and {files} files")
        return faults

    def serves(self) -> bool:
        """Return whether the reflector serves a valid peer."""
        with contextlib.suppress(OSError, ValueError):
            return measure_pair(("a", "b"), ("127.0.0.1", self.port), SHORT, SECRET).rtt is not None
        return False

    def publishes(self, name: str) -> bool:
        """Put a valid file into the spool; return whether ingest publishes its node."""
        line = format_sample_lines([LinkSample("node", name, time.time(), "probe", 1e9)])
        (self.spool / f".{name}").write_text(line)
        (self.spool / f".{name}").rename(self.spool / f"{name}.jsonl")
        return wait_until(lambda: f'"{name}"' in (self.directory / "scores.json").read_text())

    def end(self) -> dict[str, int]:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(30) for name, process in self.processes.items()}


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait for at most 40 s: slots of earlier peers may still be in use; return whether the condition holds."""
    deadline = time.monotonic() + 40
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return holds


def attack(services: Services, rng: random.Random, end: float, sent: Counter[str]) -> None:
    """Attack the services with one connection after another until `end`."""
    while time.monotonic() < end:
        attack_kind = rng.choice(("whole", "whole", "whole", "garbage", "half", "reset", "silent", "slow", "crowd"))
        sent[attack_kind] += 1
        if rng.random() < 0.2:
            put_spool_file(services.spool, rng)
        address = rng.choice(("127.0.0.1", "127.0.0.9", "::1")), services.port
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            if attack_kind == "crowd":
                crowd = [socket.create_connection(address, 2) for _ in range(20)]
                for peer in crowd:
                    peer.close()
                continue
            with socket.create_connection(address, 5) as peer:
                if attack_kind == "whole":
                    run_probe_session(rng, peer)
                    continue
                data = mutate(rng, probe_lines(rng))
                if attack_kind == "garbage":
                    data = rng.randbytes(rng.choice((1, 100, 70_000, 1_100_000)))
                elif attack_kind == "half":
                    data = data[:rng.randrange(len(data) + 1)]
                elif attack_kind == "slow":
                    for byte in data[:20]:
                        peer.sendall(bytes([byte]))
                        time.sleep(rng.random() * 0.1)
                    continue
                if attack_kind != "silent":
                    peer.sendall(data)
                if attack_kind == "reset":
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    continue
                if attack_kind != "silent":
                    peer.shutdown(socket.SHUT_WR)
                peer.settimeout(rng.choice((0.01, 1.0)))
                while peer.recv(65536):
                    pass


def put_spool_file(spool: Path, rng: random.Random) -> None:
    """Put a mutated file, directory, FIFO or symbolic link into the spool."""
    name = f"{rng.getrandbits(40)}{rng.choice(('.jsonl', '.jsonl', '', chr(27) + '.jsonl'))}"
    path, temporary = spool / name, spool / f".{name}"
    with contextlib.suppress(OSError):
        kind = rng.random()
        if kind < 0.05:
            path.mkdir()
        elif kind < 0.1:
            os.mkfifo(path)
        elif kind < 0.15:
            path.symlink_to(rng.choice(("/dev/zero", "/nowhere", name)))
        else:
            temporary.write_bytes(mutate(rng, sample_lines(rng)))
            temporary.rename(path)


def fuzz(seconds: float, seed: int, directory: Path) -> tuple[dict[str, object], list[str]]:
    """Run the attack; return its statistics and the faults of the services."""
    services, sent, end, served = Services(directory), Counter[str](), time.monotonic() + seconds, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    atexit.register(services.end)
    peers = [threading.Thread(target=attack, args=(services, random.Random(f"{seed} {i}"), end, sent), daemon=True)
             for i in range(PEERS)]
    assert wait_until((directory / "scores.json").exists) and wait_until(services.serves)
    for peer in peers:
        peer.start()
    faults: list[str] = []
    while time.monotonic() < end and not faults:
        time.sleep(0.5)
        faults = services.faults()
        served += services.serves()
    for peer in peers:
        peer.join(60)
    if not faults and not wait_until(services.serves):
        faults = ["reflector does not serve"]
    if not faults and not services.publishes("good"):
        faults = ["ingest does not publish the samples of a valid file"]
    statuses = services.end()
    faults += [f"{name} ended with status {status}" for name, status in statuses.items()
               if status not in (0, -signal.SIGTERM)]
    log_lines = {name: services.stderr_of(name).count("\n") for name in services.processes}
    return {"seed": seed, "seconds": seconds, "sent": dict(sorted(sent.items())), "connections": sent.total(),
            "valid peers served": served, "log lines": log_lines}, faults


def main() -> int:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**9)
    with tempfile.TemporaryDirectory(prefix="slurmdl-fuzz-") as directory:
        Path(directory).chmod(0o755)
        report, faults = fuzz(seconds, seed, Path(directory))
    print(json.dumps(report, indent=1))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
