"""Fuzz `links ingest`, `agent` and `export` over TCP: whatever peers send, each goes on and serves a good peer.

    python tests/fuzz/services.py SECONDS [SEED]

Real processes are attacked by many peers at once: with mutated samples, requests and probes, garbage, half lines,
resets, silence, a byte at a time, and crowds of connections. Ingest takes mutated files from its spool, too. Prints
what was sent as JSON; status 1 if a service ended, said something it should not, grew without bound or serves nobody.
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

PEERS, MOST_MEMORY_KB, MOST_FILES = 24, 600_000, 600
SHORT = ProbeConfig(
    rtt_probes=5,
    rtt_seconds=0.02,
    loss_probes=20,
    stream_bytes=10**5,
    stream_seconds=0.05,
     timeout_s=3.0)
VALUES = ("null", "true", "false", "-1", "0", "1", "1e400", "-1e400", "NaN", "Infinity", "9" * 30, "9" * 5000,
          "0." + "1" * 400, "[]", "[1]", "{}", '{"a": 1}', '""',
          '"x"', '"\\ud800"', '"\\u0000"', '"\\u001b[2J"', '"a|b"', '"b|a"',
          "[" * 950 + "]" * 950, "[" * 50_000, '"' + "n" * 70_000 + '"', '"probe"', '"node"', '"inter_leaf"', '"\\u202e"')
ODD: tuple[Any, ...] = (None, True, -1, 0, 1e308, -1e308, float("inf"), float("nan"), 10**30, "", "x", [], {}, [[]])
KEYS = ("kind", "name", "time", "source", "throughput", "rtt", "rtt_p99", "loss", "rdma", "throughput_rse", "", "cls",
        "op", "size", "seconds", "udp", "end", "wait", "token")
BYTES = (b"\0", b"\xff", b"\n", b"\r\n", b'"', b"{", b"}", b"[", b"\\", b"\xed\xa0\x80", b"MUNGE:",
         b"MUNGE:A:\n", b" ")


def sample(dice: random.Random) -> str:
    """A JSON line of a sample, in which some values and keys are others."""
    fields = {"kind": '"node"', "name": f'"n{dice.randrange(50)}"', "time": repr(time.time()), "source": '"probe"',
              "throughput": "1e9", "loss": "0.01"}
    for _ in range(dice.choice((0, 1, 1, 2))):
        fields[dice.choice(KEYS)] = dice.choice(VALUES)
    pairs = [f'"{key}": {value}' for key, value in fields.items()]
    if dice.random() < 0.1:
        pairs.append(dice.choice(pairs))
    if dice.random() < 0.1:
        dice.shuffle(pairs)
        pairs.pop()
    return "{" + ", ".join(pairs) + "}\n"


def request(dice: random.Random) -> bytes:
    """A request of HTTP, in which some words are others."""
    method = dice.choice(("GET", "GET", "POST", "HEAD", "\x00", "G" * 70_000, ""))
    path = dice.choice(("/metrics", "/", "/x" * 40_000, "http://[::1", "/metrics?a=\x1b[2J", "//", ""))
    version = dice.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/" + "9" * 5000, "HTTP/1.x", ""))
    headers = "".join(f"{dice.choice(('Host', 'Content-Length', 'Expect', 'Connection', 'X' * 70_000, ''))}: "
                      f"{dice.choice(('a', '-1', '9' * 30, '100-continue', 'keep-alive', chr(233)))}\r\n"
                      for _ in range(dice.choice((0, 1, 3, 200))))
    return f"{method} {path} {version}\r\n{headers}\r\n".encode("latin-1")


def session(dice: random.Random, peer: socket.socket) -> None:
    """Requests of a probe in the codes of the protocol, with some values that are others, and datagrams."""
    control, datagrams = ControlChannel(peer, b"", Deadline(2), is_client=True), ProbeSocket(peer.getsockname()[0])
    try:
        control.write_message(udp=dice.choice((datagrams.port, datagrams.port, datagrams.port, *ODD)))
        datagrams.connect(
    (peer.getpeername()[0], int(
        control.read_message()["udp"])), dice.choice(
            (control.tag, b"no tag")))
        for _ in range(dice.randrange(6)):
            op = dice.choice(("echo", "receive_stream", "send_stream", "receive_train", "send_train", dice.choice(ODD)))
            control.write_message(op=op, size=dice.choice((10**5, *ODD)), seconds=dice.choice((0.1, *ODD)))
            for _ in range(dice.randrange(20)):
                datagrams.send(dice.randbytes(dice.choice((0, 1, 64, 1400))))
            if dice.random() < 0.3:
                peer.sendall(dice.randbytes(dice.choice((1, 20_000))))
            control.write_message(**{dice.choice(("end", "wait", "op")): dice.choice((True, 0.05, *ODD))})
            if dice.random() < 0.5:
                control.read_message()
    finally:
        datagrams.close()


def probe(dice: random.Random) -> bytes:
    """Lines of the protocol of probes, in which some values are others."""
    lines = [b"%032x\n" % dice.getrandbits(128)]
    for _ in range(dice.randrange(6)):
        op = dice.choice(('"echo"', '"receive_stream"', '"send_stream"', '"receive_train"', '"send_train"',
                          dice.choice(VALUES)))
        lines.append(f'{{"token": "", "udp": {dice.choice(("9", *VALUES))}, "op": {op}, "size": '
                     f'{dice.choice(("100000", *VALUES))}, "seconds": {dice.choice(("0.1", *VALUES))}}}\n'.encode())
    return b"".join(lines)


def mutated(dice: random.Random, data: bytes) -> bytes:
    """The same with a few bytes changed, left out or put in."""
    for _ in range(dice.choice((0, 0, 1, 3, 10))):
        at = dice.randrange(len(data) + 1)
        data = data[:at] + dice.choice((*BYTES, b"", bytes([dice.randrange(256)]))) + data[at + dice.randrange(3):]
    return data


def lines_of_samples(dice: random.Random) -> bytes:
    return "".join(sample(dice) for _ in range(dice.choice((1, 2, 20)))).encode(errors="surrogatepass")


MAKE: dict[str, Callable[[random.Random], bytes]] = {"ingest": lines_of_samples, "agent": probe, "export": request}


class Services:
    """The three services as processes; each has its port, and what it says on stderr goes to a file."""

    def __init__(self, place: Path) -> None:
        self.place, self.spool = place, place / "spool"
        self.spool.mkdir()
        scores = LinkScores(nodes={f"n{i}": LinkScore(1e9) for i in range(50)}, time=time.time())
        (place / "given.json").write_text(scores.to_text())
        with socket.create_server(("", 0)) as free:
            served: int = free.getsockname()[1]
        words = {
            "ingest": ["--listen=:0", "--allow-unprivileged-ports", "--interval=1", f"--database={place}/h.db", f"--spool-dir={self.spool}",
                       f"--snapshot={place}/scores.json"],
            "agent": [f"--listen=:{served}", "--allow=127.0.0.0/8,::1", "--peers=0", "--max-sessions=8",
                      "--rate-limit=100M",
                      f"--spool-dir={place}/out"],
            "export": ["--listen=:0", f"--link-scores={place}/given.json"]}
        environ = {**os.environ, "SLURM_CONF": str(place / "slurm.conf"), "XDG_CONFIG_HOME": str(place / "xdg")}
        self.processes = {}
        for name, options in words.items():
            with (place / f"{name}.err").open("w") as said:
                self.processes[name] = subprocess.Popen([sys.executable, "-m", "slurmdl", "links", name, *options],
                                                        env=environ, stderr=said)
        self.ports = {name: served if name == "agent" else self._port(name) for name in words}

    def _port(self, name: str) -> int:
        while True:
            found = re.search(r"listening on port (\d+)", self.said(name))
            if found:
                return int(found[1])
            assert self.processes[name].poll() is None, self.said(name)
            time.sleep(0.05)

    def said(self, name: str) -> str:
        return (self.place / f"{name}.err").read_text(errors="replace")

    def faults(self) -> list[str]:
        """What is wrong with a service now."""
        found = []
        for name, process in self.processes.items():
            text = self.said(name)
            if process.poll() is not None:
                found.append(f"{name} ended with status {process.returncode}: {text[-2000:]}")
                continue
            if "Traceback" in text or "internal error" in text:
                found.append(f"{name} said: {text[:3000]}")
            memory = int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[0])
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            if memory > MOST_MEMORY_KB or files > MOST_FILES:
                found.append(f"{name} has {memory} kB and {files} files")
        return found

    def serves(self, name: str) -> bool:
        """Whether a good peer is served."""
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

    def served_in_the_end(self, name: str) -> bool:
        """The same, once the places that peers left are free again."""
        deadline = time.monotonic() + 40
        while not (served := self.serves(name)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return served

    def end(self) -> dict[str, int]:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(30) for name, process in self.processes.items()}


def attack(services: Services, dice: random.Random, end: float, sent: Counter[str]) -> None:
    """One peer after the other, until the time is over."""
    while time.monotonic() < end:
        name = dice.choice(tuple(MAKE))
        how = dice.choice(("whole", "whole", "whole", "garbage", "half", "reset", "silent", "slow", "crowd"))
        sent[f"{name}: {how}"] += 1
        if name == "ingest" and dice.random() < 0.2:
            put(services.spool, dice)
        where = dice.choice(("127.0.0.1", "127.0.0.9", "::1")), services.ports[name]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            if how == "crowd":
                crowd = [socket.create_connection(where, 2) for _ in range(20)]
                for peer in crowd:
                    peer.close()
                continue
            with socket.create_connection(where, 5) as peer:
                if how == "whole" and name == "agent":
                    session(dice, peer)
                    continue
                data = mutated(dice, MAKE[name](dice))
                if how == "garbage":
                    data = dice.randbytes(dice.choice((1, 100, 70_000, 1_100_000)))
                elif how == "half":
                    data = data[:dice.randrange(len(data) + 1)]
                elif how == "slow":
                    for byte in data[:20]:
                        peer.sendall(bytes([byte]))
                        time.sleep(dice.random() * 0.1)
                    continue
                if how != "silent":
                    peer.sendall(data)
                if how == "reset":
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    continue
                if how != "silent":
                    peer.shutdown(socket.SHUT_WR)
                peer.settimeout(dice.choice((0.01, 1.0)))
                while peer.recv(65536):
                    pass


def put(spool: Path, dice: random.Random) -> None:
    """A file for the spool, as those who may write there would put it, or not."""
    name = f"{dice.getrandbits(40)}{dice.choice(('.jsonl', '.jsonl', '', chr(27) + '.jsonl'))}"
    path, part = spool / name, spool / f".{name}"
    with contextlib.suppress(OSError):
        kind = dice.random()
        if kind < 0.05:
            path.mkdir()
        elif kind < 0.1:
            os.mkfifo(path)
        elif kind < 0.15:
            path.symlink_to(dice.choice(("/dev/zero", "/nowhere", name)))
        else:
            part.write_bytes(mutated(dice, lines_of_samples(dice)))
            part.rename(path)


def fuzz(seconds: float, seed: int, place: Path) -> tuple[dict[str, object], list[str]]:
    """What was sent, and what is wrong with the services afterwards."""
    services, sent, end = Services(place), Counter[str](), time.monotonic() + seconds
    served: Counter[str] = Counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    atexit.register(services.end)
    peers = [threading.Thread(target=attack, args=(services, random.Random(f"{seed} {i}"), end, sent), daemon=True)
             for i in range(PEERS)]
    for name in services.ports:
        assert services.served_in_the_end(name), name
    for peer in peers:
        peer.start()
    faults: list[str] = []
    while time.monotonic() < end and not faults:
        time.sleep(0.5)
        faults = services.faults()
        served.update(name for name in services.ports if services.serves(name))
    for peer in peers:
        peer.join(60)
    faults = faults or [f"{name} serves nobody" for name in services.ports if not services.served_in_the_end(name)]
    statuses = services.end()
    faults += [f"{name} ended with status {status}" for name, status in statuses.items()
               if status not in (0, -signal.SIGTERM)]
    if "good" not in (place / "scores.json").read_text():
        faults.append("ingest published nothing of what a good peer sent")
    said = {name: services.said(name).count("\n") for name in services.ports}
    return {"seed": seed, "seconds": seconds, "sent": dict(sorted(sent.items())), "connections": sent.total(),
            "good peers served meanwhile": dict(served), "lines said": said}, faults


def main() -> int:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**9)
    with tempfile.TemporaryDirectory(prefix="slurmdl-fuzz-") as place:
        Path(place).chmod(0o755)
        found, faults = fuzz(seconds, seed, Path(place))
    print(json.dumps(found, indent=1))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
