"""`python -m slurmdl.network.probe.task`: one task a node of the step that probes; the first one leads.

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
from slurmdl.network.probe.channel import HANDSHAKE_S, Channel, Deadline, derived
from slurmdl.network.probe.measure import measure
from slurmdl.network.probe.pair import Effort, Pair
from slurmdl.network.probe.reflector import Reflector
from slurmdl.topology import hostlist

#: variable with the secret, in hexadecimal digits, by which the tasks of one probe authenticate each other
SECRET = "SLURMDL_PROBE_SECRET"
#: the last line of the leader
END = {"end": True}
#: seconds that tasks may take to start, and a pair beyond its own deadline
_START, _GRACE = 15.0, 0.5
#: a node whose probes failed so often is left alone
_FAILURES = 2
#: connections beyond one of each node that may not have proved yet that they know the secret
_SPARE = 64
#: range of the leader's ports, and how many of them it may try
_PORTS, _FIRST_PORT, _TRIES = 20_000, 30_000, 4


@dataclass(frozen=True)
class Work:
    """What the leader is to do.

    Attributes
    ----------
    nodes : their names; the rounds are pairs of indices of them.
    budget : seconds within which the last round must have begun to end.
    interface : to probe over, "" for that of the route to the leader.
    """

    nodes: tuple[str, ...]
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    effort: Effort
    budget: float
    interface: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Work:
        rounds = tuple(tuple((int(a), int(b)) for a, b in pairs) for pairs in data["rounds"])
        return cls(tuple(data["nodes"]), rounds, Effort(**data["effort"]), float(data["budget"]), data["interface"])


@dataclass
class _Member:
    """A task as the leader sees it.

    Attributes
    ----------
    name : its node; "" until it has proved that it knows the secret.
    address, port : where it answers probes.
    until : when it must have proved itself.
    asked : number of the probe that it has not answered yet.
    """

    line: Channel
    until: float
    name: str = ""
    address: str = ""
    port: int = 0
    asked: int | None = None


def note(text: str) -> None:
    """A remark for the user, who reads it from whoever started the step."""
    print(json.dumps({"note": text}), flush=True)


class _Leader:
    """Runs the rounds over the members that have come."""

    def __init__(self, server: socket.socket, secret: bytes) -> None:
        self._server, self._secret = server, secret
        self._members: dict[str, _Member] = {}
        self._unproved: dict[socket.socket, _Member] = {}  # the oldest first
        self._came: set[str] = set()  # nodes whose task has come, even if it has gone since
        self._selector = selectors.DefaultSelector()

    def gather(self, work: Work, seconds: float) -> None:
        """Wait until a task of every node has come, and say who has not.

        All who connect are heard at the same time, so nobody holds up others. Who does not prove in time that it
        knows the secret is refused; where too many have not done so yet, the oldest one is.
        """
        end, refused = time.monotonic() + seconds, 0
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        while len(self._came) < len(work.nodes) and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, 0.2)):
                member: _Member | None = key.data
                if member is None:
                    self._accept()
                elif not self._hear(member, work):
                    if member is self._members.get(member.name):
                        self._drop(member)
                    else:
                        refused += self._refuse(member)
            while (oldest := next(iter(self._unproved.values()), None)) is not None and (
                    oldest.until < time.monotonic() or len(self._unproved) > len(work.nodes) + _SPARE):
                refused += self._refuse(oldest)
        for key in list(self._selector.get_map().values()):
            if key.data is not None and self._members.get(key.data.name) is not key.data:
                refused += self._refuse(key.data)
        self._selector.unregister(self._server)
        self._server.close()
        here = next((other.line.socket.getsockname()[0] for other in self._members.values()
                     if not other.address.startswith("127.")), "")
        for beside in self._members.values():
            if beside.address.startswith("127.") and here:
                beside.address = here  # the task beside this one: others reach it where they reach this one
        missing = [node for node in work.nodes if node not in self._came]
        if missing:
            note(f"no task came from {hostlist.fold(missing)}; its links are not measured")
        if refused:
            note(f"{refused} connection{'s' * (refused > 1)} of other programs to this probe refused")

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)  # what is written is short; who does not read it is left out
            member = _Member(Channel(connection, self._secret, asks=False), time.monotonic() + HANDSHAKE_S)
            self._unproved[connection] = member
            self._selector.register(connection, selectors.EVENT_READ, member)

    def _hear(self, member: _Member, work: Work) -> bool:
        """Take what a task that joins has sent; whether it may go on."""
        line = member.line
        try:
            line.receive()
            while (message := line.next_message()) is not None:
                if not member.name:
                    member.name = work.nodes[work.nodes.index(message["node"])]
                    del self._unproved[line.socket]
                    line.write(effort=asdict(work.effort), interface=work.interface)
                else:
                    member.address, member.port = str(message["address"]), int(message["port"])
                    self._members[member.name] = member
                    self._came.add(member.name)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _refuse(self, member: _Member) -> bool:
        """End a connection; whether it was one of a program that had not proved that it knows the secret."""
        self._selector.unregister(member.line.socket)
        member.line.socket.close()
        return self._unproved.pop(member.line.socket, None) is not None

    def run(self, work: Work) -> Iterator[Pair]:
        """The pairs of all rounds for which there is time, as they come."""
        end, number = time.monotonic() + work.budget, 0
        failed: Counter[str] = Counter()
        for count, pairs in enumerate(work.rounds):
            if time.monotonic() + work.effort.expected > end:
                note(f"the time is over after {count} of {len(work.rounds)} rounds")
                break
            asked: dict[int, tuple[str, str]] = {}
            for first, second in ((work.nodes[a], work.nodes[b]) for a, b in pairs):
                number += 1
                if max(failed[first], failed[second]) < _FAILURES and self._ask(first, second, number):
                    asked[number] = (first, second)
            until = time.monotonic() + work.effort.deadline + _GRACE
            while asked and time.monotonic() < until:
                for name, answer in self._answers(until - time.monotonic()):
                    names = asked.pop(answer.get("probe", -1), None)
                    if names is None:
                        continue
                    if "pair" in answer:
                        yield Pair.from_json(answer["pair"])
                    else:
                        failed.update(names)
                        note(f"{name} with {answer.get('peer')}: {answer.get('error')}")
                asked = {key: names for key, names in asked.items() if names[0] in self._members}
            for first, second in asked.values():
                failed[first] += 1
                note(f"{first} with {second}: no answer in time")
        for member in self._members.values():
            try:
                member.line.write(end=True)
            except OSError:
                continue

    def _ask(self, first: str, second: str, number: int) -> bool:
        """Whether the first could be told to probe the second; one that still hangs in a probe is left alone."""
        member, peer = self._members.get(first), self._members.get(second)
        if member is None or peer is None or member.asked is not None:
            return False
        try:
            member.line.write(probe=number, peer=peer.name, address=(peer.address, peer.port))
        except OSError:
            self._drop(member)
            return False
        member.asked = number
        return True

    def _answers(self, wait: float) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, _ in self._selector.select(wait):
            member: _Member = key.data
            try:
                member.line.receive()
                while (answer := member.line.next_message()) is not None:
                    if answer.get("probe") == member.asked:
                        member.asked = None
                    yield member.name, answer
            except OSError:
                self._drop(member)

    def _drop(self, member: _Member) -> None:
        note(f"{member.name} has gone")
        self._selector.unregister(member.line.socket)
        member.line.socket.close()
        self._members.pop(member.name, None)


def address_of(interface: str) -> str:
    """IPv4 address of an interface (netdevice(7)); UnavailableError where it has none."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise UnavailableError(f"--interface {interface}: {error.strerror}") from error
    return socket.inet_ntoa(answer[20:24])


def follow(host: str, ports: list[int], secret: bytes, node: str) -> None:
    """One task: probe whom the leader names, and answer those who probe this node, until the leader ends it."""
    line, told = _join(host, ports, secret, node)
    effort, interface = Effort(**told["effort"]), str(told["interface"])
    source = address_of(interface) if interface else ""
    reflector = Reflector(source, secret=derived(secret, node))
    line.write(port=reflector.port, address=source or line.socket.getsockname()[0])
    while True:
        order = line.read()
        if "probe" not in order:
            return
        peer, (address, port) = order["peer"], order["address"]
        try:
            pair = measure((node, peer), (address, port), effort, secret=derived(secret, peer), source=source)
        except OSError as error:
            line.write(probe=order["probe"], peer=peer, error=str(error))
        else:
            line.write(probe=order["probe"], pair=pair.to_json())


def _join(host: str, ports: list[int], secret: bytes, node: str) -> tuple[Channel, dict[str, Any]]:
    """The connection to the leader, which may not listen yet, at one of its ports, and its first message.

    Another program may listen at the other ports; it learns nothing, and costs no more than the handshake.
    """
    end = time.monotonic() + _START
    while True:
        for port in ports:
            connection = None
            try:
                connection = socket.create_connection((host, port), timeout=1.0)
                line = Channel(connection, secret, asks=True, deadline=Deadline(HANDSHAKE_S))
                line.write(node=node)
                told = line.read()
            except OSError as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() > end:
                    raise UnavailableError(f"probe: the leader on {host} is not reached ({error})") from error
            else:
                line.deadline = None  # its orders come when they are due
                return line, told
        time.sleep(0.05)


def ports_of(secret: bytes) -> list[int]:
    """Where the leader may listen, which nobody can tell who does not know the secret."""
    return [_FIRST_PORT + int.from_bytes(derived(secret, f"port {number}")[:4], "big") % _PORTS
            for number in range(_TRIES)]


def main() -> int:
    nodes = hostlist.expand(os.environ.get("SLURM_STEP_NODELIST", ""))
    node, secret = os.environ.get("SLURMD_NODENAME", ""), os.environ.pop(SECRET, "").encode()
    if not nodes or not secret:
        raise UnavailableError("the probe's task runs in a step that `slurmdl score probe` starts")
    ports = ports_of(secret)
    if os.environ.get("SLURM_PROCID") != "0":
        follow(nodes[0], ports, secret, node)
        return 0
    work = read_work()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection of each task, and of others
    server = _listen(ports)
    own = threading.Thread(target=follow, args=("localhost", [server.getsockname()[1]], secret, node), daemon=True)
    own.start()
    leader = _Leader(server, secret)
    leader.gather(work, min(_START, work.budget))
    for pair in leader.run(work):
        print(json.dumps(pair.to_json()), flush=True)
    print(json.dumps(END), flush=True)
    return 0


def read_work() -> Work:
    """What is to be done, from standard input; InputError where it is malformed."""
    try:
        return Work.from_json(json.load(sys.stdin))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"probe: the rounds on stdin are malformed ({error})") from error


def _listen(ports: list[int]) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server(("", port), backlog=4096)
        except OSError:
            continue
    raise UnavailableError(f"probe: none of the ports {', '.join(map(str, ports))} is free")


def run(task: Callable[[], int]) -> NoReturn:
    """Run a task, and tell whoever started the step why it fails, where it does."""
    try:
        sys.exit(task())
    except (SlurmdlError, OSError) as error:
        note(str(error))
        sys.exit(getattr(error, "exit_status", UnavailableError.exit_status))


if __name__ == "__main__":
    run(main)
