"""Compare the ranks of a running step with its plan: one line on the stderr of the first task.

The task shell starts this program next to a launcher such as torchrun, once per node. It reads RANK in the
environment of the processes below its task (proc(5), /proc/PID/environ), so the user's program does not change. The
nodes report to the first task over TCP; a secret in the step's environment authenticates the reports.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

if __package__ in (None, ""):  # started by its path, with `python -I`
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from slurmdl import plan as plans
from slurmdl.errors import warn
from slurmdl.launch.task_command import pick_free_port
from slurmdl.links.probe.channel import HANDSHAKE_S, AuthenticatedChannel, Deadline
from slurmdl.slurm import process
from slurmdl.slurm.hostlist import fold_hostlist

#: variable of the step that starts the check: port, secret, and "strict" or "warn"; users set it to 0 to prevent the
#: check
ENV_VARIABLE = "SLURMDL_VERIFY"
#: seconds in which all ranks must start
START_TIMEOUT_S = 600.0
#: seconds between two looks at the processes of a node
_POLL_S = 0.5
#: misplaced ranks and nodes that the line names
_MAX_NAMED = 3


@dataclass(frozen=True)
class NodeReport:
    """The ranks that run on a node; `world_sizes` are the values of their WORLD_SIZE."""

    node: str
    ranks: tuple[int, ...]
    world_sizes: tuple[int, ...]


def variables(strict: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which the task shell starts the check; none if the user does not want it."""
    if environ.get(ENV_VARIABLE) == "0":
        return {}
    return {ENV_VARIABLE: f"{pick_free_port()} {secrets.token_hex(16)} {'strict' if strict else 'warn'}",
            "SLURMDL_VERIFY_PYTHON": sys.executable, "SLURMDL_VERIFY_SCRIPT": os.path.abspath(__file__)}


def format_result(planned: Sequence[str], reports: Sequence[NodeReport]) -> tuple[bool, str]:
    """Return whether all ranks run on their planned nodes, and the line that says so.

    `planned` is the node of each rank in the plan.
    """
    actual = {rank: report.node for report in reports for rank in report.ranks}
    sizes = sorted({size for report in reports for size in report.world_sizes} - {len(planned)})
    if sizes:
        return False, f"the launcher started a world of {sizes[0]} ranks; the plan has {len(planned)}"
    correct = sum(actual.get(rank) == node for rank, node in enumerate(planned))
    line = f"{correct} of {len(planned)} ranks on their planned nodes"
    wrong = [rank for rank, node in enumerate(planned) if actual.get(rank, node) != node]
    if wrong:
        named = ", ".join(f"rank {rank} runs on {actual[rank]}, planned {planned[rank]}"
                          for rank in wrong[:_MAX_NAMED])
        by_name = [node for node in sorted(set(planned)) for _ in range(planned.count(node))]
        cause = "the nodes are numbered by host name, as in a c10d rendezvous" \
            if all(actual.get(rank, node) == node for rank, node in enumerate(by_name)) \
            else "the launcher got another node rank than SLURM_PROCID"
        return False, f"{line}; {named}{', ...' if len(wrong) > _MAX_NAMED else ''}; likely cause: {cause}"
    if correct < len(planned):
        silent = sorted({node for rank, node in enumerate(planned) if rank not in actual})
        return False, f"{line}; the other ranks were not seen on {fold_hostlist(silent)}"
    return True, line


def read_rank(pid: int) -> tuple[int, int] | None:
    """RANK and WORLD_SIZE in the environment of a process; None without them, or if it has ended."""
    values: dict[bytes, bytes] = {}
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        values = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
    rank, size = values.get(b"RANK", b""), values.get(b"WORLD_SIZE", b"")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else None


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


def collect_ranks(node: str, task_pid: int, count: int, timeout_s: float = START_TIMEOUT_S) -> NodeReport:
    """Wait until `count` ranks run below a task, until the task has ended, or for `timeout_s`."""
    found: dict[int, int] = {}
    end = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < end:
        found.update(filter(None, map(read_rank, processes_below(task_pid))))
        if len(found) < count:
            time.sleep(_POLL_S)
            if not os.path.exists(f"/proc/{task_pid}"):
                break
    return NodeReport(node, tuple(sorted(found)), tuple(sorted(set(found.values()))))


def send_report(report: NodeReport, host: str, port: int, secret: bytes) -> None:
    """Send a report to the first task. OSError if that fails."""
    with socket.create_connection((host, port), timeout=HANDSHAKE_S) as connection:
        channel = AuthenticatedChannel(connection, secret, is_client=True, deadline=Deadline(HANDSHAKE_S))
        channel.write_message(**vars(report))
        channel.read_message()  # the acknowledgement


def receive_reports(server: socket.socket, secret: bytes, nodes: set[str], task_pid: int) -> list[NodeReport]:
    """Receive the reports of `nodes`, until the task has ended or START_TIMEOUT_S are over."""
    reports: dict[str, NodeReport] = {}
    end = time.monotonic() + START_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while nodes - reports.keys() and time.monotonic() < end and os.path.exists(f"/proc/{task_pid}"):
            if not selector.select(_POLL_S):
                continue
            with suppress(OSError, KeyError, TypeError, ValueError):
                connection, _ = server.accept()
                with connection:
                    channel = AuthenticatedChannel(connection, secret, is_client=False,
                                                   deadline=Deadline(HANDSHAKE_S))
                    message = channel.read_message()
                    channel.write_message(received=True)
                report = NodeReport(str(message["node"]), tuple(map(int, message["ranks"])),
                                    tuple(map(int, message["world_sizes"])))
                reports[report.node] = report
    return list(reports.values())


def check_step(task_pid: int, environ: Mapping[str, str]) -> None:
    """Check the ranks of this node; in the first task collect the reports of all nodes and print the result."""
    port, secret, mode = environ[ENV_VARIABLE].split(" ")[:3]
    plan = plans.plan_from_environ(environ)
    if plan is None:
        return
    node, host = environ["SLURMD_NODENAME"], environ["SLURMDL_MASTER_ADDR"]
    is_first = environ["SLURM_PROCID"] == "0"
    server = socket.create_server(("", int(port))) if is_first else None
    report = collect_ranks(node, task_pid, int(environ["SLURMDL_RANKS_PER_TASK"]))
    if server is None:
        send_report(report, host, int(port), secret.encode())
        return
    with server:
        others = receive_reports(server, secret.encode(), set(plan.nodes) - {node}, task_pid)
    is_correct, line = format_result(plan.nodes, [report, *others])
    warn(line)
    if mode == "strict" and not is_correct:
        warn("--dl-strict: the step is canceled")
        process.run_command(["scancel", f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"])


if __name__ == "__main__":
    try:
        check_step(int(sys.argv[1]), os.environ)
    except Exception as error:  # the check must not disturb the program
        if os.environ.get("SLURM_PROCID") == "0":
            warn(f"the nodes of the ranks were not checked: {error}")
