"""Fuzz `links ingest`, `agent` and `export` over TCP: each must survive all input and serve valid peers.

    python tests/fuzz/services.py SECONDS [SEED]

Many peers attack the processes concurrently: mutated samples, requests and probes, random bytes, partial lines,
resets, idle and slow connections, bursts of connections. Ingest also reads mutated spool files. Prints statistics as
JSON; the status is 1 if a service exited, logged an internal error, exceeded a limit or does not serve valid peers.
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
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.probe.channel import Deadline
from slurmdl.links.probe.measure import measure_pair
from slurmdl.links.probe.measurement import ProbeConfig
from slurmdl.links.probe.protocol import ControlChannel, ProbeSocket
from slurmdl.links.samples import LinkSample, format_sample_lines

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
BYTES = (b"\0", b"\xff", b"\n", b"\r\n", b'"', b"{", b"}", b"[", b"\\", b"\xed\xa0\x80", b"MUNGE:",
         b"MUNGE:A:\n", b" ")


def sample(rng: random.Random) -> str:
    """A JSON line of a sample with mutated keys and values."""
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


def request(rng: random.Random) -> bytes:
    """A mutated HTTP request."""
    method = rng.choice(("GET", "GET", "POST", "HEAD", "\x00", "G" * 70_000, ""))
    path = rng.choice(("/metrics", "/", "/x" * 40_000, "http://[::1", "/metrics?a=\x1b[2J", "//", ""))
    version = rng.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/" + "9" * 5000, "HTTP/1.x", ""))
    headers = "".join(f"{rng.choice(('Host', 'Content-Length', 'Expect', 'Connection', 'X' * 70_000, ''))}: "
                      f"{rng.choice(('a', '-1', '9' * 30, '100-continue', 'keep-alive', chr(233)))}\r\n"
                      for _ in range(rng.choice((0, 1, 3, 200))))
    return f"{method} {path} {version}\r\n{headers}\r\n".encode("latin-1")


def session(rng: random.Random, peer: socket.socket) -> None:
    """An authenticated probe session with mutated requests and datagrams."""
    control, datagrams = ControlChannel(peer, b"", Deadline(2), is_client=True), ProbeSocket(peer.getsockname()[0])
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


def probe(rng: random.Random) -> bytes:
    """Unauthenticated lines of the probe protocol with mutated values."""
    lines = [b"%032x\n" % rng.getrandbits(128)]
    for _ in range(rng.randrange(6)):
        op = rng.choice(('"echo"', '"receive_stream"', '"send_stream"', '"receive_train"', '"send_train"',
                          rng.choice(VALUES)))
        lines.append(f'{{"token": "", "udp": {rng.choice(("9", *VALUES))}, "op": {op}, "size": '
                     f'{rng.choice(("100000", *VALUES))}, "seconds": {rng.choice(("0.1", *VALUES))}}}\n'.encode())
    return b"".join(lines)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The data with a few bytes changed, removed or inserted."""
    for _ in range(rng.choice((0, 0, 1, 3, 10))):
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice((*BYTES, b"", bytes([rng.randrange(256)]))) + data[at + rng.randrange(3):]
    return data


def sample_lines(rng: random.Random) -> bytes:
    return "".join(sample(rng) for _ in range(rng.choice((1, 2, 20)))).encode(errors="surrogatepass")


GENERATORS: dict[str, Callable[[random.Random], bytes]] = {"ingest": sample_lines, "agent": probe, "export": request}


class Services:
    """The three services as processes, with their ports; stderr goes to files."""

    def __init__(self, place: Path) -> None:
        self.place, self.spool = place, place / "spool"
        self.spool.mkdir()
        scores = LinkScores(nodes={f"n{i}": LinkScore(1e9) for i in range(50)}, time=time.time())
        (place / "given.json").write_text(scores.to_text())
        with socket.create_server(("", 0)) as free:
            served: int = free.getsockname()[1]
        words = {
            "ingest": ["--listen=:0", "--allow-unprivileged-ports", "--interval=1", f"--database={place}/h.db",
                       f"--spool-dir={self.spool}", f"--snapshot={place}/scores.json"],
            "agent": [f"--listen=:{served}", "--allow=127.0.0.0/8,::1", "--peers=0", "--max-sessions=8",
                      "--rate-limit=100M",
                      f"--spool-dir={place}/out"],
            "export": ["--listen=:0", f"--link-scores={place}/given.json"]}
        environ = {**os.environ, "SLURM_CONF": str(place / "slurm.conf"), "XDG_CONFIG_HOME": str(place / "xdg")}
        self.processes = {}
        for name, options in words.items():
            with (place / f"{name}.err").open("w") as stderr:
                self.processes[name] = subprocess.Popen([sys.executable, "-m", "slurmdl", "links", name, *options],
                                                        env=environ, stderr=stderr)
        self.ports = {name: served if name == "agent" else self._port(name) for name in words}

    def _port(self, name: str) -> int:
        while True:
            match = re.search(r"listening on port (\d+)", self.stderr_of(name))
            if match:
                return int(match[1])
            assert self.processes[name].poll() is None, self.stderr_of(name)
            time.sleep(0.05)

    def stderr_of(self, name: str) -> str:
        return (self.place / f"{name}.err").read_text(errors="replace")

    def faults(self) -> list[str]:
        """Faults of the services so far."""
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

    def serves(self, name: str) -> bool:
        """Whether a valid peer is served."""
        with contextlib.suppress(OSError, ValueError):
            if name == "export":
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=5) as answer:
                    return b'link="n7"' in answer.read()
            if name == "agent":
                return measure_pair(("a", "b"), ("127.0.0.1", self.ports[name]), SHORT).rtt is not None
            with socket.create_connection(("127.0.0.1", self.ports[name]), 5) as peer:
                peer.sendall(format_sample_lines([LinkSample("node", "good", time.time(), "probe", 1e9)]).encode())
                peer.shutdown(socket.SHUT_WR)
                return peer.makefile().read() == "stored 1\n"
        return False

    def wait_until_serving(self, name: str) -> bool:
        """Wait until a valid peer is served: slots of earlier peers may still be in use."""
        deadline = time.monotonic() + 40
        while not (served := self.serves(name)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return served

    def end(self) -> dict[str, int]:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(30) for name, process in self.processes.items()}


def attack(services: Services, rng: random.Random, end: float, sent: Counter[str]) -> None:
    """Attack with one peer after the other until `end`."""
    while time.monotonic() < end:
        name = rng.choice(tuple(GENERATORS))
        attack_kind = rng.choice(("whole", "whole", "whole", "garbage", "half", "reset", "silent", "slow", "crowd"))
        sent[f"{name}: {attack_kind}"] += 1
        if name == "ingest" and rng.random() < 0.2:
            put(services.spool, rng)
        address = rng.choice(("127.0.0.1", "127.0.0.9", "::1")), services.ports[name]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            if attack_kind == "crowd":
                crowd = [socket.create_connection(address, 2) for _ in range(20)]
                for peer in crowd:
                    peer.close()
                continue
            with socket.create_connection(address, 5) as peer:
                if attack_kind == "whole" and name == "agent":
                    session(rng, peer)
                    continue
                data = mutated(rng, GENERATORS[name](rng))
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


def put(spool: Path, rng: random.Random) -> None:
    """Put a mutated file, or something that is no file, into the spool."""
    name = f"{rng.getrandbits(40)}{rng.choice(('.jsonl', '.jsonl', '', chr(27) + '.jsonl'))}"
    path, part = spool / name, spool / f".{name}"
    with contextlib.suppress(OSError):
        kind = rng.random()
        if kind < 0.05:
            path.mkdir()
        elif kind < 0.1:
            os.mkfifo(path)
        elif kind < 0.15:
            path.symlink_to(rng.choice(("/dev/zero", "/nowhere", name)))
        else:
            part.write_bytes(mutated(rng, sample_lines(rng)))
            part.rename(path)


def fuzz(seconds: float, seed: int, place: Path) -> tuple[dict[str, object], list[str]]:
    """Run the attack; return its statistics and the faults of the services."""
    services, sent, end = Services(place), Counter[str](), time.monotonic() + seconds
    served: Counter[str] = Counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    atexit.register(services.end)
    peers = [threading.Thread(target=attack, args=(services, random.Random(f"{seed} {i}"), end, sent), daemon=True)
             for i in range(PEERS)]
    for name in services.ports:
        assert services.wait_until_serving(name), name
    for peer in peers:
        peer.start()
    faults: list[str] = []
    while time.monotonic() < end and not faults:
        time.sleep(0.5)
        faults = services.faults()
        served.update(name for name in services.ports if services.serves(name))
    for peer in peers:
        peer.join(60)
    faults = faults or [f"{name} does not serve" for name in services.ports if not services.wait_until_serving(name)]
    statuses = services.end()
    faults += [f"{name} ended with status {status}" for name, status in statuses.items()
               if status not in (0, -signal.SIGTERM)]
    if "good" not in (place / "scores.json").read_text():
        faults.append("ingest did not publish the samples of a valid peer")
    log_lines = {name: services.stderr_of(name).count("\n") for name in services.ports}
    return {"seed": seed, "seconds": seconds, "sent": dict(sorted(sent.items())), "connections": sent.total(),
            "valid peers served": dict(served), "log lines": log_lines}, faults


def main() -> int:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**9)
    with tempfile.TemporaryDirectory(prefix="slurmdl-fuzz-") as place:
        Path(place).chmod(0o755)
        report, faults = fuzz(seconds, seed, Path(place))
    print(json.dumps(report, indent=1))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
