"""Checks of running ranks: processes of one machine play the nodes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import slurmdl
from slurmdl import plan as plans
from slurmdl.cli.step import task_environ
from slurmdl.errors import InputError
from slurmdl.launch import rank_check
from slurmdl.launch.rank_check import RankReport
from slurmdl.launch.step_inputs import pick_free_port

SECRET = "5" * 32
PLAN = plans.Plan("allreduce", ("n1", "n1", "n10", "n10", "n2", "n2"), ("worker",) * 6, {})


@pytest.mark.parametrize(("planned", "actual", "outcome", "line"), [
    (PLAN.nodes, PLAN.nodes, "correct", "6 of 6 ranks on their planned nodes"),
    (("n1",), ("n1",), "correct", "1 of 1 rank on its planned node"),
    (PLAN.nodes, ("n1", "n1", "n2", "n2", "n10", "n10"), "misplaced",
     "2 of 6 ranks on their planned nodes; rank 2 runs on n2, planned n10, rank 3 .*, rank 4 .* n10, planned n2, "
     r"\.\.\.; likely cause: the launcher got another node rank than the planned one"),
    (("n1", "n3", "n2", "n4"), ("n1", "n2", "n3", "n4"), "misplaced",
     "2 of 4 .*, planned n2; likely cause: the nodes are numbered by host name, as in a c10d rendezvous"),
    (PLAN.nodes, PLAN.nodes[:4], "unseen", "4 of 6 ranks .*; the others were not seen, on n2"),
    (PLAN.nodes, (), "unseen", "0 of 6 ranks .* not seen, on n1, n10, n2")])
def test_result_names_the_misplaced_and_the_unseen_ranks(planned, actual, outcome, line):
    found = rank_check.format_result(planned, [RankReport(node, (rank,), (len(planned),))
                                               for rank, node in enumerate(actual)])
    assert found[0] == outcome and re.fullmatch(line, found[1]), found


def test_world_of_another_size_is_reported():
    assert rank_check.format_result(PLAN.nodes, [RankReport("n1", (0, 1), (2, 6))]) == (
        "misplaced", "the launcher started a world of 2 ranks; the plan has 6")


@pytest.fixture
def start() -> Iterator:
    """A function that starts a process; it is killed at the end of the test."""
    children = []

    def start_process(argv: list[str], **environ: str) -> subprocess.Popen[str]:
        children.append(subprocess.Popen(argv, env={**os.environ, **environ}, text=True, stderr=subprocess.PIPE,
                                         start_new_session=True))
        return children[-1]

    yield start_process
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def launcher(*ranks: int, seconds: int = 30) -> list[str]:
    """A program that starts ranks as torchrun does: with variables of their own, as children of a child."""
    starts = " ".join(f"RANK={rank} WORLD_SIZE=6 sleep {seconds} &" for rank in ranks)
    return ["sh", "-c", f"sh -c '{starts} wait'; true"]


def test_ranks_below_a_task_are_found_until_it_ends(start):
    assert rank_check.collect_ranks("n10", start(launcher(2, 3)).pid, 2) == RankReport("n10", (2, 3), (6,))
    task = start(["sleep", "0.2"])
    assert rank_check.collect_ranks("n10", task.pid, 2, timeout_s=1e6) == RankReport("n10", (), ())


def check(start, number: int, ranks: tuple[int, ...], mode: str, verify: str) -> subprocess.Popen[str]:
    """Start the task `number` of PLAN, which runs `ranks`, and its check."""
    node = list(dict.fromkeys(PLAN.nodes))[number]
    task = start(launcher(*ranks))
    return start([sys.executable, "-I", rank_check.__file__, str(task.pid)], SLURMD_NODENAME=node,
                 SLURM_PROCID=str(number), SLURMDL_MASTER_ADDR="localhost", SLURMDL_VERIFY_RANKS="2",
                 SLURMDL_PLAN=plans.encode_plan(PLAN), SLURMDL_VERIFY=f"{verify} {mode}")


@pytest.mark.parametrize(("ranks", "expected"), [
    (((0, 1), (2, 3), (4, 5)), "slurmdl: 6 of 6 ranks on their planned nodes\n"),
    (((0, 1), (4, 5), (2, 3)), "slurmdl: 2 of 6 ranks on their planned nodes; rank 2 runs on n2, planned n10, .*; "
     "the launcher was not recognized in the command, expected --dl-launcher=torchrun\n"),
    (((), (), ()), "")], ids=["correct", "misplaced", "programs that end at once"])
def test_first_task_prints_one_line_for_all_nodes(start, ranks, expected):
    verify = f"{pick_free_port()} {SECRET}"
    checks = [check(start, number, ranks[number], "warn", verify) for number in range(3)]
    lines = [child.communicate(timeout=60)[1] for child in checks]
    assert re.fullmatch(expected, lines[0]) and lines[1:] == ["", ""]


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_check_ends_with_the_program(start, monkeypatch, has_pidfd):
    """srun waits for the check, which looks less and less often for ranks that never come."""
    monkeypatch.setattr(rank_check, "_POLL_S", 1e6 if has_pidfd else 0.1)
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", lambda _: os.open("/nowhere", os.O_RDONLY))
    task = start(["sleep", "1000"])
    ended: list[bool] = []
    waiter = threading.Thread(target=lambda: ended.append(rank_check.wait_for_end(task.pid, 1e6)), daemon=True)
    waiter.start()
    waiter.join(0.5)
    assert waiter.is_alive()
    task.terminate()
    waiter.join(60)
    assert ended == [True]
    assert not rank_check.wait_for_end(os.getpid(), 0.1)


def test_report_without_the_secret_is_ignored(start):
    port = pick_free_port()
    first = check(start, 0, (0, 1), "warn", f"{port} {SECRET}")
    check(start, 1, (4, 5), "warn", f"{port} {'6' * 32}")
    time.sleep(1)  # it has reported
    others = [check(start, number, ranks, "warn", f"{port} {SECRET}") for number, ranks in ((1, (2, 3)), (2, (4, 5)))]
    assert first.communicate(timeout=60)[1] == "slurmdl: 6 of 6 ranks on their planned nodes\n"
    assert [child.wait(60) for child in others] == [0, 0]


def test_silent_peers_delay_no_report(monkeypatch):
    """Peers that send nothing, or a half, connect first; a single one would take all the time that there is."""
    monkeypatch.setattr(rank_check, "HANDSHAKE_S", 20.0)
    end = time.monotonic() + 15
    with socket.create_server(("localhost", 0)) as server, contextlib.ExitStack() as opened:
        address = server.getsockname()
        for number in range(10):
            peer = opened.enter_context(socket.create_connection(address))
            peer.sendall(b"0" * number)
        report = RankReport("n1", (0, 1), (2,))
        sender = threading.Thread(target=rank_check.send_report,
                                  args=(report, address, SECRET.encode(), lambda: True))
        sender.start()
        assert rank_check.receive_reports(server, SECRET.encode(), {0, 1}, lambda: time.monotonic() > end) == [report]
        sender.join()


@pytest.mark.parametrize("limit", [{"HANDSHAKE_S": 0.0}, {"_MAX_EXTRA_CONNECTIONS": -1}])
def test_peers_that_are_late_or_too_many_are_dropped(monkeypatch, limit):
    for name, value in limit.items():
        monkeypatch.setattr(rank_check, name, value)
    with socket.create_server(("localhost", 0)) as server, \
            socket.create_connection(server.getsockname(), timeout=60) as peer:
        is_closed = threading.Event()

        def wait_for_end() -> None:
            while peer.recv(100):
                pass
            is_closed.set()

        threading.Thread(target=wait_for_end, daemon=True).start()
        assert rank_check.receive_reports(server, SECRET.encode(), {0}, is_closed.is_set) == []


@pytest.mark.parametrize(("nodes", "status", "fact"), [
    (PLAN.nodes, 0, "6 of 6"), (("n1", "n1", "n2", "n2", "n10", "n10"), 1, "2 of 6")])
def test_verify_as_the_program_of_a_step(start, nodes, status, fact):
    verify = f"{pick_free_port()} {SECRET} warn"
    ranks = [start([sys.executable, "-m", "slurmdl", "verify"], SLURMD_NODENAME=node, RANK=str(rank), WORLD_SIZE="6",
                   SLURMDL_MASTER_ADDR="localhost", SLURMDL_PLAN=plans.encode_plan(PLAN), SLURMDL_VERIFY=verify)
             for rank, node in enumerate(nodes)]
    outputs = [child.communicate(timeout=90)[1] for child in ranks]
    assert ranks[0].returncode == status
    assert fact in outputs[0]
    assert outputs[1:] == [""] * 5 and [child.returncode for child in ranks[1:]] == [0] * 5


def test_verify_outside_a_step_is_a_usage_error(start):
    child = start([sys.executable, "-m", "slurmdl", "verify"], SLURMDL_PLAN="", SLURMDL_VERIFY="")
    assert "slurmdl srun slurmdl verify" in child.communicate(timeout=120)[1]
    assert child.returncode == 64


def test_planned_rank_is_the_rank_of_the_node_and_the_local_rank():
    environ = {"SLURMDL_PLAN": plans.encode_plan(PLAN), "SLURMD_NODENAME": "n10"}
    assert [slurmdl.planned_rank(local, environ) for local in (0, 1)] == [2, 3]
    with pytest.raises(InputError, match="2 ranks on node n10"):
        slurmdl.planned_rank(2, environ)
    with pytest.raises(InputError, match="0 ranks on node n9"):
        slurmdl.planned_rank(0, {**environ, "SLURMD_NODENAME": "n9"})
    with pytest.raises(InputError, match="slurmdl env"):
        slurmdl.planned_rank(0, {})


def test_env_of_a_task_has_its_planned_ranks():
    environ = {"SLURMDL_PLAN": plans.encode_plan(PLAN), "SLURMD_NODENAME": "n10", "SLURM_LOCALID": "1",
               "MASTER_ADDR": "n1", "MASTER_PORT": "12345"}
    assert task_environ(environ) == {
        "RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "NODE_RANK": "1", "PET_NODE_RANK": "1",
        "SLURMDL_ROLE": "worker", "SLURMDL_ROLE_RANK": "3",
        "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "12345", "PET_LOCAL_ADDR": "~1000001-n10"}
    assert task_environ({**environ, "SLURMD_NODENAME": "n1"})["PET_LOCAL_ADDR"] == "n1"


@pytest.mark.parametrize(("zones", "size", "text"), [
    ("aabb", "2", "; 2 of 2 segments of 2 nodes are whole"), ("aaab", "2", "; 1 of 2 segments of 2 nodes are whole"),
    ("abcd", "2", "; 0 of 2 segments of 2 nodes are whole"), ("aa", "2", "; 1 of 1 segment of 2 nodes is whole"),
    ("aabb", "1", ""), ("aabb", "3", ""), ("aabb", "", ""), ("aabb", "x", "")])
def test_whole_segments_are_counted(zones, size, text):
    """Two ranks on each node; Slurm names the segments' size in the environment."""
    paths = {f"n{i}": ("root", zone) for i, zone in enumerate(zones)}
    nodes = tuple(node for node in paths for _ in range(2))
    plan = plans.Plan("allreduce", nodes, ("worker",) * len(nodes), paths)
    assert plans.segments_text(plan, {"SLURM_JOB_SEGMENT_SIZE": size} if size else {}) == text
