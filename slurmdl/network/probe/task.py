"""`python -m slurmdl.network.probe.task`: one task a node of the step that probes; the first one leads.

The leader reads the rounds from its standard input (srun hands it to task 0 alone, `--input=0`), tells in each round
who probes whom, and writes each pair to its standard output as soon as it is known, and a last line once all is done.
What it says and what the tasks answer goes over TCP, so nodes need share neither a file nor an MPI. Who does not
come, hangs or goes away costs its own pairs only.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from slurmdl.errors import InputError, SlurmdlError, UnavailableError
from slurmdl.network.probe.measure import measure
from slurmdl.network.probe.pair import Effort, Pair
from slurmdl.network.probe.reflector import Reflector
from slurmdl.network.probe.wire import Timeout
from slurmdl.topology import hostlist

#: variable with the word by which the tasks of one probe know each other
TOKEN = "SLURMDL_PROBE_TOKEN"
#: the last line of the leader
END = {"end": True}
#: seconds that tasks may take to start, and a pair beyond its own deadline
_START, _GRACE = 15.0, 0.5
#: a node whose probes failed so often is left alone
_FAILURES = 2
#: ports on which the leader may listen: from the ids of job and step, another one where it is taken
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


class _Line:
    """A connection whose messages are lines of JSON, read as they come."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._buffer = connection, b""

    def write(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """The messages that one read completes; OSError where the other side has gone."""
        data = self.socket.recv(65536)
        if not data:
            raise Timeout("the connection has ended")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def message(self) -> dict[str, Any]:
        """The next message of a side that sends one at a time."""
        while True:
            messages = self.read()
            if messages:
                return messages[0]


@dataclass
class _Member:
    """A task as the leader sees it; `asked` is the number of the probe that it has not answered yet."""

    name: str
    line: _Line
    address: str
    port: int
    asked: int | None = None


def note(text: str) -> None:
    """A remark for the user, who reads it from whoever started the step."""
    print(json.dumps({"note": text}), flush=True)


class _Leader:
    """Runs the rounds over the members that have come."""

    def __init__(self, server: socket.socket, token: str) -> None:
        self._server, self._token = server, token
        self._members: dict[str, _Member] = {}
        self._selector = selectors.DefaultSelector()

    def gather(self, work: Work, seconds: float) -> None:
        """Wait until a task of every node has come, and say who has not."""
        end, here = time.monotonic() + seconds, ""
        while len(self._members) < len(work.nodes) and (left := end - time.monotonic()) > 0:
            self._server.settimeout(left)
            try:
                connection, (host, _) = self._server.accept()
                connection.settimeout(2.0)
                line = _Line(connection)
                hello = line.message()
                if not hmac.compare_digest(str(hello["token"]).encode(), self._token.encode()):
                    raise Timeout("not one of ours")
                line.write(effort=asdict(work.effort), interface=work.interface)
                answer = line.message()
                member = _Member(str(hello["node"]), line, str(answer["address"] or host), int(answer["port"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
            here = here if host.startswith("127.") else connection.getsockname()[0]
            self._members[member.name] = member
            self._selector.register(connection, selectors.EVENT_READ, member)
        for member in self._members.values():
            if member.address.startswith("127.") and here:
                member.address = here  # the task beside this one: others reach it where they reach this one
        missing = [node for node in work.nodes if node not in self._members]
        if missing:
            note(f"no task came from {hostlist.fold(missing)}; its links are not measured")

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
                answers = member.line.read()
            except (OSError, ValueError):
                self._drop(member)
                continue
            for answer in answers:
                if answer.get("probe") == member.asked:
                    member.asked = None
                yield member.name, answer

    def _drop(self, member: _Member) -> None:
        note(f"{member.name} has gone")
        self._selector.unregister(member.line.socket)
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


def follow(host: str, ports: list[int], token: str, node: str) -> None:
    """One task: probe whom the leader names, and answer those who probe this node, until the leader ends it."""
    line = _Line(_connect(host, ports))
    line.write(token=token, node=node)
    told = line.message()
    effort, interface = Effort(**told["effort"]), str(told["interface"])
    source = address_of(interface) if interface else ""
    reflector = Reflector(source, token=token)
    line.write(port=reflector.port, address=source)
    while True:
        order = line.message()
        if "probe" not in order:
            return
        peer, (address, port) = order["peer"], order["address"]
        try:
            pair = measure((node, peer), (address, port), effort, token=token, source=source)
        except OSError as error:
            line.write(probe=order["probe"], peer=peer, error=str(error))
        else:
            line.write(probe=order["probe"], pair=pair.to_json())


def _connect(host: str, ports: list[int]) -> socket.socket:
    """The leader, which may not listen yet, at one of its ports."""
    end = time.monotonic() + _START
    while True:
        for port in ports:
            try:
                connection = socket.create_connection((host, port), timeout=1.0)
                connection.settimeout(None)
                return connection
            except OSError as error:
                if time.monotonic() > end:
                    raise UnavailableError(f"probe: the leader on {host} is not reached ({error})") from error
        time.sleep(0.05)


def main() -> int:
    nodes = hostlist.expand(os.environ.get("SLURM_STEP_NODELIST", ""))
    node, token = os.environ.get("SLURMD_NODENAME", ""), os.environ.get(TOKEN, "")
    if not nodes or not token:
        raise UnavailableError("the probe's task runs in a step that `slurmdl score probe` starts")
    seed = int(os.environ.get("SLURM_JOB_ID", "0")) * 31 + int(os.environ.get("SLURM_STEP_ID", "0"))
    ports = [_FIRST_PORT + (seed + i * 4241) % _PORTS for i in range(_TRIES)]
    if os.environ.get("SLURM_PROCID") != "0":
        follow(nodes[0], ports, token, node)
        return 0
    work = read_work()
    server = _listen(ports)
    own = threading.Thread(target=follow, args=("localhost", [server.getsockname()[1]], token, node), daemon=True)
    own.start()
    leader = _Leader(server, token)
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
