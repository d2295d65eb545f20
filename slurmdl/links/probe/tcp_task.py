"""`python -m slurmdl.links.probe.tcp_task`: the task of a probe step, one per node; task 0 is the leader.

The leader reads the schedule from stdin (`srun --input=0`), tells the followers whom to probe in each round, and
writes each measurement as a LeaderMessage to stdout. Leader and followers use TCP, so neither MPI nor a shared
file system is needed. A secret in the step's environment, readable by its user and root alone, authenticates their
messages (see channel) and determines the leader's ports. A missing, hung or ended task loses its own pairs only.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from slurmdl import records
from slurmdl.errors import InputError, SlurmdlError, UnavailableError
from slurmdl.links.probe.channel import HANDSHAKE_S, AuthenticatedChannel, Deadline, derive_secret
from slurmdl.links.probe.pair_probe import (
    PairMeasurement,
    ProbeConfig,
    Reflector,
    measure_pair,
    peers_to_check,
    unreachable_peers,
)
from slurmdl.slurm import hostlist
from slurmdl.text import pluralize

#: environment variable with the secret of the probe, in hexadecimal
SECRET_VARIABLE = "SLURMDL_PROBE_SECRET"
#: seconds in which tasks must start, and grace period of a pair after its own timeout
_START_TIMEOUT_S, _GRACE_S = 15.0, 0.5
_MAX_FAILURES = 2  # failed probes after which a node is skipped
#: time limit of the check of all pairs: this share of the budget of the probe, and so many seconds in addition
_CHECK_SHARE, _EXTRA_CHECK_S = 0.2, 3.0
_PEERS_PER_REQUEST = 100  # names and addresses of this number fit in one message
_MAX_EXTRA_CONNECTIONS = 64  # unauthenticated connections, in addition to one per node
_CHECK_ID = 0  # in the place of a probe's id; those start at 1
#: the leader's ports: range, below the ports of outgoing connections (ip_local_port_range in ip(7)), and candidates
_FIRST_PORT, _PORT_COUNT, _PORT_CANDIDATES = 12_000, 20_000, 4


@dataclass(frozen=True)
class ProbeSchedule:
    """Input of the leader.

    Attributes:
        rounds: pairs of indices of `nodes`.
        budget_s: seconds for all rounds; a round that would not fit is not started.
        interface: to probe over, "" for that of the route to the leader.
        checks_all_pairs: first check that every pair of nodes can exchange data.
    """

    nodes: Sequence[str]
    rounds: Sequence[Sequence[tuple[int, int]]]
    config: ProbeConfig
    budget_s: float
    interface: str = ""
    checks_all_pairs: bool = False

    @property
    def check_limit_s(self) -> float:
        """Time limit of the check of all pairs."""
        return _EXTRA_CHECK_S + _CHECK_SHARE * self.budget_s if self.checks_all_pairs else 0.0


@dataclass(frozen=True)
class LeaderMessage:
    """A line of the leader's output.

    Attributes:
        pair: a measurement.
        unreachable: two nodes that cannot exchange data.
        note: for the user.
        is_last: whether the schedule has ended.
    """

    pair: PairMeasurement | None = None
    unreachable: tuple[str, str] | None = None
    note: str = ""
    is_last: bool = False

    def send(self) -> None:
        print(json.dumps(records.to_json(self)), flush=True)


@dataclass
class _Follower:
    """A follower, as the leader knows it.

    Attributes:
        join_deadline: by which it must authenticate.
        name: its node; "" until it is authenticated.
        address, port: of its reflector.
        pending_probe: id of the request that it has not answered yet.
    """

    channel: AuthenticatedChannel
    join_deadline: float
    name: str = ""
    address: str = ""
    port: int = 0
    pending_probe: int | None = None


def send_note(text: str) -> None:
    """Write a note, which the launcher of the step shows."""
    LeaderMessage(note=text).send()


class _Leader:
    """Runs the schedule on the followers that have joined."""

    def __init__(self, server: socket.socket, secret: bytes) -> None:
        self._server, self._secret = server, secret
        self._followers: dict[str, _Follower] = {}
        self._unauthenticated: dict[socket.socket, _Follower] = {}  # oldest first
        self._joined: set[str] = set()  # nodes whose task has joined, even if it has exited since
        self._unreachable: set[frozenset[str]] = set()  # pairs of nodes
        self._selector = selectors.DefaultSelector()

    def gather_followers(self, schedule: ProbeSchedule, timeout_s: float) -> None:
        """Wait until the tasks of all nodes have joined, and report the missing ones.

        Connections are handled concurrently. A connection that does not authenticate in time is closed; if there are
        too many of them, the oldest is closed first.
        """
        end, rejected = time.monotonic() + timeout_s, 0
        max_unauthenticated = len(schedule.nodes) + _MAX_EXTRA_CONNECTIONS
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        while len(self._joined) < len(schedule.nodes) and (remaining_s := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(remaining_s, 0.2)):
                follower: _Follower | None = key.data
                if follower is None:
                    self._accept()
                elif not self._handle_join(follower, schedule):
                    rejected += self._drop(follower)
            while (oldest := next(iter(self._unauthenticated.values()), None)) is not None and (
                    oldest.join_deadline < time.monotonic() or len(self._unauthenticated) > max_unauthenticated):
                rejected += self._drop(oldest)
        for key in list(self._selector.get_map().values()):
            if key.data is not None and self._followers.get(key.data.name) is not key.data:
                rejected += self._drop(key.data)
        self._selector.unregister(self._server)
        self._server.close()
        # the follower on this host connects over loopback: peers reach it at the leader's address
        own_address = next((follower.channel.socket.getsockname()[0] for follower in self._followers.values()
                            if not follower.address.startswith("127.")), "")
        for local in self._followers.values():
            if local.address.startswith("127.") and own_address:
                local.address = own_address
        if missing := [node for node in schedule.nodes if node not in self._joined]:
            send_note(f"no task started on {hostlist.fold_hostlist(missing)}; its links are not measured")
        if rejected:
            send_note(f"{pluralize(rejected, 'unauthenticated connection')} to this probe rejected")

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)  # a handshake must not block the other tasks
            follower = _Follower(AuthenticatedChannel(connection, self._secret, is_client=False),
                                 time.monotonic() + HANDSHAKE_S)
            self._unauthenticated[connection] = follower
            self._selector.register(connection, selectors.EVENT_READ, follower)

    def _handle_join(self, follower: _Follower, schedule: ProbeSchedule) -> bool:
        """Handle the messages of a joining task; return False if it must be dropped."""
        channel = follower.channel
        try:
            channel.receive_bytes()
            while (message := channel.next_message()) is not None:
                if not follower.name:
                    follower.name = schedule.nodes[schedule.nodes.index(message["node"])]
                    del self._unauthenticated[channel.socket]
                    channel.write_message(config=records.to_json(schedule.config), interface=schedule.interface)
                else:
                    follower.address, follower.port = str(message["address"]), int(message["port"])
                    self._followers[follower.name] = follower
                    self._joined.add(follower.name)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _drop(self, follower: _Follower) -> bool:
        """Close the connection of a follower that may have joined; return whether it was unauthenticated."""
        if self._followers.get(follower.name) is follower:
            send_note(f"{follower.name}: connection lost")
            del self._followers[follower.name]
        self._selector.unregister(follower.channel.socket)
        follower.channel.socket.close()
        return self._unauthenticated.pop(follower.channel.socket, None) is not None

    def check_all_pairs(self, timeout_s: float) -> Iterator[tuple[str, str]]:
        """Let every pair of nodes exchange some data; yield the pairs that cannot, which are not probed later."""
        end = time.monotonic() + timeout_s
        requests = {node: [peers[i:i + _PEERS_PER_REQUEST] for i in range(0, len(peers), _PEERS_PER_REQUEST)]
                    for node, peers in peers_to_check(list(self._followers)).items()}
        checking = {node for node in requests if self._request_check(node, requests[node])}
        while checking and time.monotonic() < end:
            for node, answer in self._receive_answers(end - time.monotonic()):
                for peer in answer.get("unreachable", ()):
                    self._unreachable.add(frozenset((node, peer)))
                    yield node, peer
                if not self._request_check(node, requests[node]):
                    checking.discard(node)
            checking &= self._followers.keys()
        if late := [node for node in requests if node in checking or node not in self._followers]:
            send_note(f"out of time before all pairs of {pluralize(len(late), 'node')} were checked")

    def _request_check(self, node: str, requests: list[list[str]]) -> bool:
        """Ask a node for the next of its checks; return False if there is none, or the node is gone."""
        peers = [follower for name in (requests.pop() if requests else []) if (follower := self._followers.get(name))]
        return bool(peers) and self._send_request(
            node, _CHECK_ID, peers=[(peer.name, peer.address, peer.port) for peer in peers])

    def run_schedule(self, schedule: ProbeSchedule) -> Iterator[PairMeasurement]:
        """Run the rounds within the budget and yield the measurements as they arrive."""
        end, probe_id = time.monotonic() + schedule.budget_s, _CHECK_ID
        failures: Counter[str] = Counter()
        for count, pairs in enumerate(schedule.rounds):
            if time.monotonic() + schedule.config.expected_s > end:
                send_note(f"out of time after {count} of {len(schedule.rounds)} rounds")
                break
            pending: dict[int, tuple[str, str]] = {}
            for first, second in ((schedule.nodes[a], schedule.nodes[b]) for a, b in pairs):
                probe_id += 1
                peer = self._followers.get(second)
                if peer and max(failures[first], failures[second]) < _MAX_FAILURES \
                        and frozenset((first, second)) not in self._unreachable \
                        and self._send_request(first, probe_id, peer=second, address=(peer.address, peer.port)):
                    pending[probe_id] = (first, second)
            round_end = time.monotonic() + schedule.config.timeout_s + _GRACE_S
            while pending and time.monotonic() < round_end:
                for name, answer in self._receive_answers(round_end - time.monotonic()):
                    names = pending.pop(answer.get("probe", -1), None)
                    if names is None:
                        continue
                    if "pair" in answer:
                        yield records.from_json(PairMeasurement, answer["pair"], "pair")
                    else:
                        failures.update(names)
                        send_note(f"{name} with {answer.get('peer')}: {answer.get('error')}")
                pending = {key: names for key, names in pending.items() if names[0] in self._followers}
            for first, second in pending.values():
                failures[first] += 1
                send_note(f"{first} with {second}: no answer in time")
        for follower in self._followers.values():
            with suppress(OSError):
                follower.channel.write_message(end=True)

    def _send_request(self, node: str, probe_id: int, **request: Any) -> bool:
        """Send a request to a node; return False if it is gone or still busy with the last one."""
        follower = self._followers.get(node)
        if follower is None or follower.pending_probe is not None:
            return False
        try:
            follower.channel.write_message(probe=probe_id, **request)
        except OSError:
            self._drop(follower)
            return False
        follower.pending_probe = probe_id
        return True

    def _receive_answers(self, timeout_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, _ in self._selector.select(timeout_s):
            follower: _Follower = key.data
            try:
                follower.channel.receive_bytes()
                while (answer := follower.channel.next_message()) is not None:
                    if answer.get("probe") == follower.pending_probe:
                        follower.pending_probe = None
                    yield follower.name, answer
            except OSError:
                self._drop(follower)


def interface_address(interface: str) -> str:
    """IPv4 address of an interface (netdevice(7)); UnavailableError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query_socket:
        try:
            ifreq = fcntl.ioctl(query_socket, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise UnavailableError(f"--interface {interface}: {error.strerror}") from error
    return socket.inet_ntoa(ifreq[20:24])


def run_follower(host: str, ports: list[int], secret: bytes, node: str) -> None:
    """Run one task: probe the peers that the leader names, and answer probes, until the leader ends it."""
    channel, welcome = _connect_to_leader(host, ports, secret, node)
    config, interface = records.from_json(ProbeConfig, welcome["config"], "probe: config"), str(welcome["interface"])
    source = interface_address(interface) if interface else ""
    reflector = Reflector(source, derive_secret(secret, node))
    channel.write_message(port=reflector.port, address=source or channel.socket.getsockname()[0])
    while True:
        request = channel.read_message()
        if "probe" not in request:
            return
        if "peers" in request:
            failed = unreachable_peers(request["peers"], secret, source)
            channel.write_message(probe=request["probe"], unreachable=failed)
            continue
        peer, (address, port) = request["peer"], request["address"]
        try:
            pair = measure_pair((node, peer), (address, port), config, derive_secret(secret, peer), source)
        except OSError as error:
            channel.write_message(probe=request["probe"], peer=peer, error=str(error))
        else:
            channel.write_message(probe=request["probe"], pair=records.to_json(pair))


def _connect_to_leader(host: str, ports: list[int], secret: bytes,
                       node: str) -> tuple[AuthenticatedChannel, dict[str, Any]]:
    """Connect to the leader, which may not listen yet, on one of its ports; return its first message, too.

    Other programs may listen on these ports: they fail the handshake.
    """
    end = time.monotonic() + _START_TIMEOUT_S
    while True:
        for port in ports:
            connection = None
            try:
                connection = socket.create_connection((host, port), timeout=1.0)
                channel = AuthenticatedChannel(connection, secret, is_client=True, deadline=Deadline(HANDSHAKE_S))
                channel.write_message(node=node)
                welcome = channel.read_message()
            except OSError as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() > end:
                    raise UnavailableError(f"probe: cannot connect to the leader on {host} ({error})") from error
            else:
                channel.deadline = None  # requests may come late
                return channel, welcome
        time.sleep(0.05)


def leader_ports(secret: bytes) -> list[int]:
    """Candidate ports of the leader, which cannot be guessed without the secret."""
    return [_FIRST_PORT + int.from_bytes(derive_secret(secret, f"port {number}")[:4], "big") % _PORT_COUNT
            for number in range(_PORT_CANDIDATES)]


def main() -> int:
    nodes = hostlist.expand_hostlist(os.environ.get("SLURM_STEP_NODELIST", ""))
    node, secret = os.environ.get("SLURMD_NODENAME", ""), os.environ.pop(SECRET_VARIABLE, "").encode()
    if not nodes or not secret:
        raise UnavailableError("probe task: must run in a step that `slurmdl links probe` starts")
    ports = leader_ports(secret)
    if os.environ.get("SLURM_PROCID") != "0":
        run_follower(nodes[0], ports, secret, node)
        return 0
    schedule = read_schedule()
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # one connection per task, and others
    server = _create_leader_listener(ports)
    threading.Thread(target=run_follower, args=("localhost", [server.getsockname()[1]], secret, node),
                     daemon=True).start()
    leader = _Leader(server, secret)
    leader.gather_followers(schedule, min(_START_TIMEOUT_S, schedule.budget_s))
    if schedule.checks_all_pairs:
        for names in leader.check_all_pairs(schedule.check_limit_s):
            LeaderMessage(unreachable=names).send()
    for pair in leader.run_schedule(schedule):
        LeaderMessage(pair).send()
    LeaderMessage(is_last=True).send()
    return 0


def read_schedule() -> ProbeSchedule:
    """Read the schedule from stdin; InputError if it is malformed."""
    try:
        return records.from_json(ProbeSchedule, json.load(sys.stdin), "probe: schedule")
    except ValueError as error:
        raise InputError(f"probe: malformed schedule on stdin ({error})") from error


def _create_leader_listener(ports: list[int]) -> socket.socket:
    for port in ports:
        with suppress(OSError):
            return socket.create_server(("", port), backlog=4096)
    raise UnavailableError(f"probe: none of the ports {', '.join(map(str, ports))} is free")


def run_task(task: Callable[[], int]) -> NoReturn:
    """Run a task and exit; report an error as a note."""
    try:
        sys.exit(task())
    except (SlurmdlError, OSError) as error:
        send_note(str(error))
        sys.exit(getattr(error, "exit_status", UnavailableError.exit_status))


if __name__ == "__main__":
    run_task(main)
