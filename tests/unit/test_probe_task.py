"""The tasks of a probe as real processes on the loopback, while other programs take part without the secret."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from test_probe_peers import SHORT

from slurmdl.links.probe import tcp_task

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
ROUNDS = (((0, 1),), ((1, 2),), ((0, 2),))


@pytest.fixture
def probe() -> Iterator[Callable[..., list[dict[str, object]]]]:
    """A function that runs a probe of NODES and returns what its leader wrote."""
    children: list[subprocess.Popen[str]] = []

    def start(number: int, secret: str) -> subprocess.Popen[str]:
        env = {**os.environ, "SLURM_STEP_NODELIST": ",".join(NODES), "SLURMD_NODENAME": NODES[number],
               "SLURM_PROCID": str(number), tcp_task.SECRET_VARIABLE: secret}
        # fewer open files than connections that the leader lets wait
        children.append(subprocess.Popen(
            ["sh", "-c", f"ulimit -Sn 64; exec {sys.executable} -m slurmdl.links.probe.tcp_task"], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return children[-1]

    def run(secret: str, meanwhile: Callable[[], None] = lambda: None) -> list[dict[str, object]]:
        leader = start(0, secret)
        work = tcp_task.ProbeSchedule(NODES, ROUNDS, replace(SHORT, timeout_s=5.0), budget_s=30.0)
        leader.stdin.write(json.dumps(work.to_json()))
        leader.stdin.close()
        meanwhile()
        for number in (1, 2):
            start(number, secret)
        return [json.loads(line) for line in leader.stdout]

    yield run
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def complete(said: list[dict[str, object]]) -> bool:
    """Whether every pair was measured, with all its figures."""
    pairs = [line for line in said if "first" in line]
    return said[-1] == tcp_task.END_MESSAGE and [(p["first"], p["second"]) for p in pairs] == [
        (NODES[a], NODES[b]) for rounds in ROUNDS for a, b in rounds] and all(
        {"forward", "backward", "rtt", "loss"} <= set(pair) for pair in pairs)


def test_all_pairs_are_measured_and_nothing_is_said(probe):
    said = probe(secrets.token_hex())
    assert complete(said), said
    assert not [line for line in said if "note" in line], said


def connections(port: int, count: int) -> list[socket.socket]:
    """To the leader, as soon as it listens."""
    made: list[socket.socket] = []
    deadline = time.monotonic() + 20
    while len(made) < count:
        try:
            made.append(socket.create_connection(("127.0.0.1", port)))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    return made


def drip(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"0")
            time.sleep(0.2)


def test_the_leader_is_not_held_up_by_connections_without_the_secret(probe):
    """More than it lets wait, silent ones and such that send a byte now and then, before the first task comes."""
    secret = secrets.token_hex()
    made: list[socket.socket] = []

    def disturb() -> None:
        made.extend(connections(tcp_task.leader_ports(secret.encode())[0], 100))
        for connection in made[::2]:
            threading.Thread(target=drip, args=(connection,), daemon=True).start()
        for connection in made[1::4]:
            connection.sendall(b'{"token": "", "node": "127.0.0.2"}\n')

    try:
        said = probe(secret, disturb)
    finally:
        for connection in made:
            connection.close()
    assert complete(said), said
    notes = [line["note"] for line in said if "note" in line]
    assert notes == ["100 unauthenticated connections to this probe rejected"], notes


def test_a_program_that_has_the_leaders_port_learns_nothing_and_joins_nobody(probe):
    """Another user who guessed it: the leader takes the next port, and the tasks find it there."""
    secret, heard = secrets.token_hex(), []
    first, second = tcp_task.leader_ports(secret.encode())[:2]
    done = threading.Event()

    def greedy(server: socket.socket) -> None:
        """Take what the tasks say, answer as a leader would, and join under their names."""
        while not done.is_set():
            with contextlib.suppress(OSError):
                connection = server.accept()[0]
                connection.settimeout(1)
                connection.sendall(b"0" * 32 + b"\n")
                lines = connection.makefile("rb")
                heard.append(lines.readline() + lines.readline())
                connection.sendall(b"0" * 64 + b' {"config": {}, "interface": ""}\n')
                with socket.create_connection(("127.0.0.1", second)) as leader:
                    leader.sendall(heard[-1])
                    leader.recv(1)

    with socket.create_server(("127.0.0.1", first)) as server:
        server.settimeout(0.2)
        thread = threading.Thread(target=greedy, args=(server,))
        thread.start()
        try:
            said = probe(secret)
        finally:
            done.set()
            thread.join()
    assert complete(said), said
    assert len(heard) >= 2
    assert not any(secret.encode() in text or bytes.fromhex(secret) in text for text in heard)


def test_nobody_can_tell_the_ports_without_the_secret():
    assert len({port for number in range(50) for port in tcp_task.leader_ports(b"%d" % number)}) > 190
