"""`python -m slurmdl.links.probe.tcp_task`: one task a node of the step that probes; the first one leads.

The leader reads the rounds from its standard input (srun hands it to task 0 alone, `--input=0`), tells in each round
who probes whom, and writes each pair to its standard output as soon as it is known, and a last line once all is done.
What it says and what the tasks answer goes over TCP, so nodes need share neither a file nor an MPI. A secret in the
step's environment, which only its user and root can read, authenticates each message between the tasks (channel.py),
and tells them where the leader listens. Who does not come, hangs or goes away costs its own pairs only.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from slurmdl.errors import InputError, SlurmdlError, UnavailableError
from slurmdl.links.probe.channel import HANDSHAKE_S, AuthenticatedChannel, Deadline, derive_secret
from slurmdl.links.probe.measure import measure_pair
from slurmdl.links.probe.measurement import PairMeasurement, ProbeConfig
from slurmdl.links.probe.reflector import Reflector
from slurmdl.slurm import hostlist

#: variable with the secret, in hexadecimal digits, by which the tasks of one probe authenticate each other
SECRET_VARIABLE = "SLURMDL_PROBE_SECRET"
#: the last line of the leader
END_MESSAGE = {"end": True}
#: seconds that tasks may take to start, and a pair beyond its own deadline
_START_TIMEOUT_S, _GRACE_S = 15.0, 0.5
#: a node whose probes failed so often is left alone
_MAX_FAILURES = 2
#: connections beyond one of each node that may not have proved yet that they know the secret
_MAX_EXTRA_CONNECTIONS = 64
#: range of the leader's ports, and how many of them it may try
_PORT_COUNT, _FIRST_PORT, _PORT_CANDIDATES = 20_000, 30_000, 4


@dataclass(frozen=True)
class ProbeSchedule:
    """What the leader is to do.

    Attributes
    ----------
    nodes : their names; the rounds are pairs of indices of them.
    budget : seconds within which the last round must have begun to end.
    interface : to probe over, "" for that of the route to the leader.
    """

    nodes: tuple[str, ...]
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    config: ProbeConfig
    budget_s: float
    interface: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ProbeSchedule:
        rounds = tuple(tuple((int(a), int(b)) for a, b in pairs) for pairs in data["rounds"])
        return cls(tuple(data["nodes"]), rounds, ProbeConfig(
            **data["effort"]), float(data["budget"]), data["interface"])


@dataclass
class _Follower:
    """A task as the leader sees it.

    Attributes
    ----------
    name : its node; "" until it has proved that it knows the secret.
    address, port : where it answers probes.
    until : when it must have proved itself.
    asked : number of the probe that it has not answered yet.
    """

    channel: AuthenticatedChannel
    join_deadline: float
    name: str = ""
    address: str = ""
    port: int = 0
    pending_probe: int | None = None


def send_note(text: str) -> None:
    """A remark for the user, who reads it from whoever started the step."""
    print(json.dumps({"note": text}), flush=True)


class _Leader:
    """Runs the rounds over the members that have come."""

    def __init__(self, server: socket.socket, secret: bytes) -> None:
        self._server, self._secret = server, secret
        self._followers: dict[str, _Follower] = {}
        self._unauthenticated: dict[socket.socket, _Follower] = {}  # the oldest first
        self._joined: set[str] = set()  # nodes whose task has come, even if it has gone since
        self._selector = selectors.DefaultSelector()

    def gather_followers(self, schedule: ProbeSchedule, timeout_s: float) -> None:
        """Wait until a task of every node has come, and say who has not.

        All who connect are heard at the same time, so nobody holds up others. Who does not prove in time that it
        knows the secret is refused; where too many have not done so yet, the oldest one is.
        """
        end, refused = time.monotonic() + timeout_s, 0
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        while len(self._joined) < len(schedule.nodes) and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, 0.2)):
                member: _Follower | None = key.data
                if member is None:
                    self._accept()
                elif not self._handle_join(member, schedule):
                    if member is self._followers.get(member.name):
                        self._remove_follower(member)
                    else:
                        refused += self._reject(member)
            while (oldest := next(iter(self._unauthenticated.values()), None)) is not None and (
                    oldest.join_deadline < time.monotonic() or len(self._unauthenticated) > len(schedule.nodes) + _MAX_EXTRA_CONNECTIONS):
                refused += self._reject(oldest)
        for key in list(self._selector.get_map().values()):
            if key.data is not None and self._followers.get(key.data.name) is not key.data:
                refused += self._reject(key.data)
        self._selector.unregister(self._server)
        self._server.close()
        here = next((other.channel.socket.getsockname()[0] for other in self._followers.values()
                     if not other.address.startswith("127.")), "")
        for beside in self._followers.values():
            if beside.address.startswith("127.") and here:
                beside.address = here  # the task beside this one: others reach it where they reach this one
        missing = [node for node in schedule.nodes if node not in self._joined]
        if missing:
            send_note(f"no task came from {hostlist.fold_hostlist(missing)}; its links are not measured")
        if refused:
            send_note(f"{refused} connection{'s' * (refused > 1)} of other programs to this probe refused")

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)  # what is written is short; who does not read it is left out
            member = _Follower(
    AuthenticatedChannel(
        connection,
        self._secret,
        is_client=False),
        time.monotonic() +
         HANDSHAKE_S)
            self._unauthenticated[connection] = member
            self._selector.register(connection, selectors.EVENT_READ, member)

    def _handle_join(self, follower: _Follower, schedule: ProbeSchedule) -> bool:
        """Take what a task that joins has sent; whether it may go on."""
        line = follower.channel
        try:
            line.receive_bytes()
            while (message := line.next_message()) is not None:
                if not follower.name:
                    follower.name = schedule.nodes[schedule.nodes.index(message["node"])]
                    del self._unauthenticated[line.socket]
                    line.write_message(effort=asdict(schedule.config), interface=schedule.interface)
                else:
                    follower.address, follower.port = str(message["address"]), int(message["port"])
                    self._followers[follower.name] = follower
                    self._joined.add(follower.name)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _reject(self, follower: _Follower) -> bool:
        """End a connection; whether it was one of a program that had not proved that it knows the secret."""
        self._selector.unregister(follower.channel.socket)
        follower.channel.socket.close()
        return self._unauthenticated.pop(follower.channel.socket, None) is not None

    def run_schedule(self, schedule: ProbeSchedule) -> Iterator[PairMeasurement]:
        """The pairs of all rounds for which there is time, as they come."""
        end, number = time.monotonic() + schedule.budget_s, 0
        failed: Counter[str] = Counter()
        for count, pairs in enumerate(schedule.rounds):
            if time.monotonic() + schedule.config.expected_s > end:
                send_note(f"the time is over after {count} of {len(schedule.rounds)} rounds")
                break
            asked: dict[int, tuple[str, str]] = {}
            for first, second in ((schedule.nodes[a], schedule.nodes[b]) for a, b in pairs):
                number += 1
                if max(failed[first], failed[second]) < _MAX_FAILURES and self._request_probe(first, second, number):
                    asked[number] = (first, second)
            until = time.monotonic() + schedule.config.timeout_s + _GRACE_S
            while asked and time.monotonic() < until:
                for name, answer in self._receive_answers(until - time.monotonic()):
                    names = asked.pop(answer.get("probe", -1), None)
                    if names is None:
                        continue
                    if "pair" in answer:
                        yield PairMeasurement.from_json(answer["pair"])
                    else:
                        failed.update(names)
                        send_note(f"{name} with {answer.get('peer')}: {answer.get('error')}")
                asked = {key: names for key, names in asked.items() if names[0] in self._followers}
            for first, second in asked.values():
                failed[first] += 1
                send_note(f"{first} with {second}: no answer in time")
        for member in self._followers.values():
            try:
                member.channel.write_message(end=True)
            except OSError:
                continue

    def _request_probe(self, first: str, second: str, probe_id: int) -> bool:
        """Whether the first could be told to probe the second; one that still hangs in a probe is left alone."""
        member, peer = self._followers.get(first), self._followers.get(second)
        if member is None or peer is None or member.pending_probe is not None:
            return False
        try:
            member.channel.write_message(probe=probe_id, peer=peer.name, address=(peer.address, peer.port))
        except OSError:
            self._remove_follower(member)
            return False
        member.pending_probe = probe_id
        return True

    def _receive_answers(self, timeout_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, _ in self._selector.select(timeout_s):
            member: _Follower = key.data
            try:
                member.channel.receive_bytes()
                while (answer := member.channel.next_message()) is not None:
                    if answer.get("probe") == member.pending_probe:
                        member.pending_probe = None
                    yield member.name, answer
            except OSError:
                self._remove_follower(member)

    def _remove_follower(self, follower: _Follower) -> None:
        send_note(f"{follower.name} has gone")
        self._selector.unregister(follower.channel.socket)
        follower.channel.socket.close()
        self._followers.pop(follower.name, None)


def interface_address(interface: str) -> str:
    """IPv4 address of an interface (netdevice(7)); UnavailableError where it has none."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise UnavailableError(f"--interface {interface}: {error.strerror}") from error
    return socket.inet_ntoa(answer[20:24])


def run_follower(host: str, ports: list[int], secret: bytes, node: str) -> None:
    """One task: probe whom the leader names, and answer those who probe this node, until the leader ends it."""
    line, told = _connect_to_leader(host, ports, secret, node)
    effort, interface = ProbeConfig(**told["effort"]), str(told["interface"])
    source = interface_address(interface) if interface else ""
    reflector = Reflector(source, secret=derive_secret(secret, node))
    line.write_message(port=reflector.port, address=source or line.socket.getsockname()[0])
    while True:
        order = line.read_message()
        if "probe" not in order:
            return
        peer, (address, port) = order["peer"], order["address"]
        try:
            pair = measure_pair(
    (node, peer), (address, port), effort, secret=derive_secret(
        secret, peer), source=source)
        except OSError as error:
            line.write_message(probe=order["probe"], peer=peer, error=str(error))
        else:
            line.write_message(probe=order["probe"], pair=pair.to_json())


def _connect_to_leader(host: str, ports: list[int], secret: bytes,
                       node: str) -> tuple[AuthenticatedChannel, dict[str, Any]]:
    """The connection to the leader, which may not listen yet, at one of its ports, and its first message.

    Another program may listen at the other ports; it learns nothing, and costs no more than the handshake.
    """
    end = time.monotonic() + _START_TIMEOUT_S
    while True:
        for port in ports:
            connection = None
            try:
                connection = socket.create_connection((host, port), timeout=1.0)
                line = AuthenticatedChannel(connection, secret, is_client=True, deadline=Deadline(HANDSHAKE_S))
                line.write_message(node=node)
                told = line.read_message()
            except OSError as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() > end:
                    raise UnavailableError(f"probe: the leader on {host} is not reached ({error})") from error
            else:
                line.deadline = None  # its orders come when they are due
                return line, told
        time.sleep(0.05)


def leader_ports(secret: bytes) -> list[int]:
    """Where the leader may listen, which nobody can tell who does not know the secret."""
    return [_FIRST_PORT + int.from_bytes(derive_secret(secret, f"port {number}")[:4], "big") % _PORT_COUNT
            for number in range(_PORT_CANDIDATES)]


def main() -> int:
    nodes = hostlist.expand_hostlist(os.environ.get("SLURM_STEP_NODELIST", ""))
    node, secret = os.environ.get("SLURMD_NODENAME", ""), os.environ.pop(SECRET_VARIABLE, "").encode()
    if not nodes or not secret:
        raise UnavailableError("the probe's task runs in a step that `slurmdl links probe` starts")
    ports = leader_ports(secret)
    if os.environ.get("SLURM_PROCID") != "0":
        run_follower(nodes[0], ports, secret, node)
        return 0
    work = read_schedule()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection of each task, and of others
    server = _create_leader_listener(ports)
    own = threading.Thread(
    target=run_follower, args=(
        "localhost", [
            server.getsockname()[1]], secret, node), daemon=True)
    own.start()
    leader = _Leader(server, secret)
    leader.gather_followers(work, min(_START_TIMEOUT_S, work.budget_s))
    for pair in leader.run_schedule(work):
        print(json.dumps(pair.to_json()), flush=True)
    print(json.dumps(END_MESSAGE), flush=True)
    return 0


def read_schedule() -> ProbeSchedule:
    """What is to be done, from standard input; InputError where it is malformed."""
    try:
        return ProbeSchedule.from_json(json.load(sys.stdin))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"probe: the rounds on stdin are malformed ({error})") from error


def _create_leader_listener(ports: list[int]) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server(("", port), backlog=4096)
        except OSError:
            continue
    raise UnavailableError(f"probe: none of the ports {', '.join(map(str, ports))} is free")


def run_task(task: Callable[[], int]) -> NoReturn:
    """Run a task, and tell whoever started the step why it fails, where it does."""
    try:
        sys.exit(task())
    except (SlurmdlError, OSError) as error:
        send_note(str(error))
        sys.exit(getattr(error, "exit_status", UnavailableError.exit_status))


if __name__ == "__main__":
    run_task(main)
