"""Tasks of a probe as processes on the loopback, with and without interference by other programs."""

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
from test_pair_probe import SHORT

from slurmdl import records
from slurmdl.links.probe import tcp_task

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
ROUNDS = (((0, 1),), ((1, 2),), ((0, 2),))


@pytest.fixture
def probe() -> Iterator[Callable[..., list[tcp_task.LeaderMessage]]]:
    """A function that runs a probe of NODES and returns the output of its leader."""
    children: list[subprocess.Popen[str]] = []

    def start(number: int, secret: str) -> subprocess.Popen[str]:
        env = {**os.environ, "SLURM_STEP_NODELIST": ",".join(NODES), "SLURMD_NODENAME": NODES[number],
               "SLURM_PROCID": str(number), tcp_task.SECRET_VARIABLE: secret}
        # a soft limit below the number of connections: the leader must raise it
        children.append(subprocess.Popen(
            ["sh", "-c", f"ulimit -Sn 64; exec {sys.executable} -m slurmdl.links.probe.tcp_task"], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return children[-1]

    def run(secret: str, meanwhile: Callable[[], None] = lambda: None) -> list[tcp_task.LeaderMessage]:
        leader = start(0, secret)
        schedule = tcp_task.ProbeSchedule(NODES, ROUNDS, replace(SHORT, timeout_s=5.0), budget_s=30.0,
                                         checks_all_pairs=True)
        leader.stdin.write(json.dumps(records.to_json(schedule)))
        leader.stdin.close()
        meanwhile()
        for number in (1, 2):
            start(number, secret)
        return [records.from_json(tcp_task.LeaderMessage, json.loads(line)) for line in leader.stdout]

    yield run
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def is_complete(output: list[tcp_task.LeaderMessage]) -> bool:
    """Whether every pair was measured, with all metrics."""
    pairs = [message.pair for message in output if message.pair]
    return output[-1].is_last and [(pair.first, pair.second) for pair in pairs] == [
        (NODES[a], NODES[b]) for rounds in ROUNDS for a, b in rounds] and all(
        None not in (pair.forward, pair.backward, pair.rtt, pair.loss) for pair in pairs)


def test_probe_measures_all_pairs_without_notes(probe):
    output = probe(secrets.token_hex())
    assert is_complete(output), output
    assert not [message for message in output if message.note], output


def connections(port: int, count: int) -> list[socket.socket]:
    """Connect to the leader as soon as it listens."""
    opened: list[socket.socket] = []
    deadline = time.monotonic() + 20
    while len(opened) < count:
        try:
            opened.append(socket.create_connection(("127.0.0.1", port)))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    return opened


def send_slowly(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"0")
            time.sleep(0.2)


def test_leader_is_not_blocked_by_unauthenticated_connections(probe):
    """More connections than the leader keeps, idle or slow, before the first task joins."""
    secret = secrets.token_hex()
    opened: list[socket.socket] = []

    def disturb() -> None:
        opened.extend(connections(tcp_task.leader_ports(secret.encode())[0], 100))
        for connection in opened[::2]:
            threading.Thread(target=send_slowly, args=(connection,), daemon=True).start()
        for connection in opened[1::4]:
            connection.sendall(b'{"token": "", "node": "127.0.0.2"}\n')

    try:
        output = probe(secret, disturb)
    finally:
        for connection in opened:
            connection.close()
    assert is_complete(output), output
    notes = [message.note for message in output if message.note]
    # a task that a busy machine delays in its handshake is rejected, too, and connects again
    count, words = notes[0].split(" ", 1)
    assert words == "unauthenticated connections to this probe rejected" and len(notes) == 1, notes
    assert 100 <= int(count) <= 100 + len(NODES)


def test_program_on_the_leader_port_gets_no_secret_and_cannot_join(probe):
    """A program listens on the leader's first port: the leader uses the next port, and the tasks connect to it."""
    secret, received = secrets.token_hex(), []
    first, second = tcp_task.leader_ports(secret.encode())[:2]
    stopped = threading.Event()

    def impersonate_leader(server: socket.socket) -> None:
        """Record the messages of the tasks, answer like a leader, and replay them to the leader."""
        while not stopped.is_set():
            with contextlib.suppress(OSError):
                connection = server.accept()[0]
                connection.settimeout(1)
                connection.sendall(b"0" * 32 + b"\n")
                lines = connection.makefile("rb")
                received.append(lines.readline() + lines.readline())
                connection.sendall(b"0" * 64 + b' {"config": {}, "interface": ""}\n')
                with socket.create_connection(("127.0.0.1", second)) as leader:
                    leader.sendall(received[-1])
                    leader.recv(1)

    with socket.create_server(("127.0.0.1", first)) as server:
        server.settimeout(0.2)
        thread = threading.Thread(target=impersonate_leader, args=(server,))
        thread.start()
        try:
            output = probe(secret)
        finally:
            stopped.set()
            thread.join()
    assert is_complete(output), output
    assert len(received) >= 2
    assert not any(secret.encode() in text or bytes.fromhex(secret) in text for text in received)


def test_leader_ports_depend_on_the_secret():
    assert len({port for number in range(50) for port in tcp_task.leader_ports(b"%d" % number)}) > 190
