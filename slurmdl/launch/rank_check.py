"""Compare the ranks of a running step with its plan: one line on stderr.

The task shell starts this program next to a launcher such as torchrun, once per node. It reads RANK in the
environment of the processes below its task (proc(5), /proc/PID/environ), so the user's program does not change. The
nodes report to the first task over TCP; a secret in the step's environment authenticates the reports.
`slurmdl verify` does the same as the program of the step.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

if __package__ in (None, ""):  # started by its path, with `python -I`
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from slurmdl import plan as plans
from slurmdl.errors import UnavailableError, UsageError, warn
from slurmdl.links.probe.channel import HANDSHAKE_S, AuthenticatedChannel, Deadline
from slurmdl.slurm import process
from slurmdl.text import pluralize

#: variable of the step that starts the check: port, secret, and "strict" or "warn"; users set it to 0 to prevent the
#: check
ENV_VARIABLE = "SLURMDL_VERIFY"
#: seconds in which all ranks must start
START_TIMEOUT_S = 600.0
#: seconds between two looks at the processes of a node
_POLL_S = 0.5
#: seconds in which all ranks must start `slurmdl verify`
_VERIFY_TIMEOUT_S = 60.0
#: connections without a report, in addition to one per missing rank
_MAX_EXTRA_CONNECTIONS = 64


@dataclass(frozen=True)
class RankReport:
    """Ranks that run on a node; `world_sizes` are the values of their WORLD_SIZE."""

    node: str
    ranks: tuple[int, ...]
    world_sizes: tuple[int, ...]


def format_result(planned: Sequence[str], reports: Sequence[RankReport]) -> tuple[str, str]:
    """The outcome and the line of `compare_ranks`; "misplaced" also if the world has another size.

    `planned` is the node of each rank in the plan.
    """
    sizes = sorted({size for report in reports for size in report.world_sizes} - {len(planned)})
    if sizes:
        world = pluralize(sizes[0], "rank")
        return "misplaced", f"the launcher started a world of {world}; the plan has {len(planned)}"
    return plans.compare_ranks(planned, {rank: report.node for report in reports for rank in report.ranks})


def read_rank(pid: int, of_torchrun: bool = False) -> tuple[int, int, int] | None:
    """RANK, WORLD_SIZE and LOCAL_WORLD_SIZE (else 1) in the environment of a process.

    None without them, or if it has ended; with `of_torchrun` also if the task shell, not torchrun, has set them.
    """
    values: dict[bytes, bytes] = {}
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        values = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
    rank, size, local = (values.get(name, b"") for name in (b"RANK", b"WORLD_SIZE", b"LOCAL_WORLD_SIZE"))
    if not (rank.isdigit() and size.isdigit()) or (of_torchrun and b"GROUP_RANK" not in values):
        return None
    return int(rank), int(size), int(local) if local.isdigit() else 1


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process has ended or the time is over; return whether it has ended.

    It returns at once when the process ends: srun waits for this process too, which holds the step's stderr and gets
    no signal from Slurm but SIGKILL.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it has ended, or Linux is older than 5.3
        end = time.monotonic() + timeout_s
        while not has_ended(pid) and time.monotonic() < end:
            time.sleep(min(_POLL_S, timeout_s))
        return has_ended(pid)
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def processes_below(pid: int) -> set[int]:
    """The descendants of a process, by the parents in /proc/PID/stat."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])  # the name in parentheses may hold anything
            children.setdefault(parent, []).append(int(name))
    below, pending = set(), [pid]
    while pending:
        found = children.pop(pending.pop(), [])
        below.update(found)
        pending += found
    return below


def collect_ranks(node: str, task_pid: int, count: int, timeout_s: float = START_TIMEOUT_S) -> RankReport:
    """Wait until `count` ranks run below a task, until the task has ended, or for `timeout_s`.

    With `count` 0, which is unknown, wait for the ranks that a torchrun starts, if the program runs one.
    """
    found: dict[int, int] = {}
    start, missing = time.monotonic(), count or 1
    while missing > 0 and time.monotonic() < start + timeout_s:
        for process_id in processes_below(task_pid):
            if values := read_rank(process_id, of_torchrun=not count):
                found[values[0]] = values[1]
                missing = (count or values[2]) - len(found)
        if missing > 0 and wait_for_end(task_pid, max(_POLL_S, (time.monotonic() - start) / 10)):
            break
    return RankReport(node, tuple(sorted(found)), tuple(sorted(set(found.values()))))


def send_report(report: RankReport, address: tuple[str, int], secret: bytes, is_over: Callable[[], bool]) -> None:
    """Send a report to the first task, which may not listen yet. OSError if that fails until `is_over`."""
    while True:
        try:
            with socket.create_connection(address, timeout=HANDSHAKE_S) as connection:
                channel = AuthenticatedChannel(connection, secret, is_client=True, deadline=Deadline(HANDSHAKE_S))
                channel.write_message(**vars(report))
                channel.read_message()  # the acknowledgement
                return
        except OSError:
            if is_over():
                raise
            time.sleep(_POLL_S)


def receive_reports(server: socket.socket, secret: bytes, missing: set[int],
                    is_over: Callable[[], bool]) -> list[RankReport]:
    """Receive reports until they cover the ranks `missing`, or `is_over`.

    Connections are handled concurrently, so that a silent peer delays no other. One that does not report in time is
    closed; if there are too many, the oldest is closed first.
    """
    reports: list[RankReport] = []
    pending: dict[AuthenticatedChannel, Deadline] = {}  # oldest first
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def drop(channel: AuthenticatedChannel) -> None:
            del pending[channel]
            selector.unregister(channel.socket)
            channel.socket.close()

        while missing - {rank for report in reports for rank in report.ranks} and not is_over():
            for key, _ in selector.select(_POLL_S):
                if key.data is None:
                    with suppress(OSError):  # the peer has closed the connection
                        connection, _ = server.accept()
                        connection.setblocking(False)
                        channel = AuthenticatedChannel(connection, secret, is_client=False)
                        pending[channel] = Deadline(HANDSHAKE_S)
                        selector.register(connection, selectors.EVENT_READ, channel)
                    continue
                try:
                    report = _receive_report(key.data)
                except (OSError, KeyError, TypeError, ValueError):
                    drop(key.data)
                    continue
                if report:
                    reports.append(report)
                    drop(key.data)
            while pending and (len(pending) > len(missing) + _MAX_EXTRA_CONNECTIONS
                               or next(iter(pending.values())).has_passed()):
                drop(next(iter(pending)))
        for channel in list(pending):
            drop(channel)
    return reports


def _receive_report(channel: AuthenticatedChannel) -> RankReport | None:
    """Read what has arrived, and acknowledge the report if it is complete."""
    channel.receive_bytes()
    message = channel.next_message()
    if message is None:
        return None
    report = RankReport(str(message["node"]), tuple(map(int, message["ranks"])),
                        tuple(map(int, message["world_sizes"])))
    channel.write_message(received=True)
    return report


def check_node(task_pid: int, environ: Mapping[str, str]) -> None:
    """Check the ranks of this node; in the first task collect the reports of all nodes and print the result."""
    port, secret, mode = environ[ENV_VARIABLE].split(" ")
    plan = plans.plan_from_environ(environ)
    assert plan is not None
    end = time.monotonic() + START_TIMEOUT_S

    def is_over() -> bool:
        return time.monotonic() > end or has_ended(task_pid)

    count = int(environ["SLURMDL_VERIFY_RANKS"])
    report = collect_ranks(environ["SLURMD_NODENAME"], task_pid, count)
    planned = plan.nodes
    if not count:
        if not report.ranks or report.world_sizes == (len(report.ranks),):
            return  # no torchrun, or one on each node by itself
        planned = tuple(node for node in planned for _ in report.ranks)
    if environ["SLURM_PROCID"] != "0":
        send_report(report, (environ["SLURMDL_MASTER_ADDR"], int(port)), secret.encode(), is_over)
        return
    with socket.create_server(("", int(port)), backlog=1024) as server:
        others = receive_reports(server, secret.encode(), set(range(len(planned))) - set(report.ranks), is_over)
    reports = [report, *others]
    if not any(node_report.ranks for node_report in reports):
        return  # the program has ended at once, or its ranks have no RANK
    outcome, line = format_result(planned, reports)
    if outcome == "misplaced" and "SLURMDL_LAUNCHER" not in environ:
        line += "; the launcher was not recognized in the command, expected --dl-launcher=torchrun"
    warn(line + plans.segments_text(plan, environ))
    if mode == "strict" and outcome == "misplaced":
        warn("--dl-strict: the step is canceled")
        process.run_command(["scancel", f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"])


def verify_rank(environ: Mapping[str, str]) -> bool:
    """Report this rank to rank 0, which prints the result; return whether it is correct (True in other ranks).

    The rank is RANK, or SLURM_PROCID without it. Raises UsageError outside a mapped step, UnavailableError if rank 0
    cannot be reached.
    """
    plan = plans.plan_from_environ(environ)
    if plan is None or " " not in environ.get(ENV_VARIABLE, ""):
        raise UsageError("verify: not in a mapped step; expected `slurmdl srun slurmdl verify`, or behind a launcher "
                         "`slurmdl srun torchrun ... --no-python slurmdl verify`")
    port, secret, _ = environ[ENV_VARIABLE].split(" ")
    rank, size = ((environ["RANK"], environ["WORLD_SIZE"]) if "RANK" in environ and "WORLD_SIZE" in environ
                  else (environ["SLURM_PROCID"], environ["SLURM_NTASKS"]))
    report = RankReport(environ["SLURMD_NODENAME"], (int(rank),), (int(size),))
    end = time.monotonic() + _VERIFY_TIMEOUT_S
    address, key = (environ["SLURMDL_MASTER_ADDR"], int(port) + 1), secret.encode()  # next to the port of the check
    if rank == "0":
        with socket.create_server(("", address[1]), backlog=1024) as server:
            others = receive_reports(server, key, set(range(1, len(plan))), lambda: time.monotonic() > end)
        outcome, line = format_result(plan.nodes, [report, *others])
        warn(line + plans.segments_text(plan, environ))
        return outcome == "correct"
    try:
        send_report(report, address, key, lambda: time.monotonic() > end)
    except OSError as error:
        raise UnavailableError(f"verify: rank 0 cannot be reached on {address[0]} ({error})") from error
    return True


if __name__ == "__main__":
    try:
        check_node(int(sys.argv[1]), os.environ)
    except Exception as error:  # the check must not disturb the program
        if os.environ.get("SLURM_PROCID") == "0":
            warn(f"the nodes of the ranks were not checked: {error}")
