"""A rank that waits for others longer than the limit ends the run, and says for whom it waited."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mpi import mpirun, needs_mpi, torchrun

from slurmdl.train.transports.transport import StalledError, Tag, Watchdog

SCRIPT = str(Path(__file__).parent / "stall_script.py")
#: longer than the ranks start apart on a busy machine
LIMIT = {"SLURMDL_TRAIN_TIMEOUT": "10"}
STARTS = {"mpi": mpirun, "torch": torchrun}


def messages(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("slurmdl: ")]


@needs_mpi
@pytest.mark.parametrize(("start", "case", "strategy"), [
    ("mpi", "stop", "ps"),
    ("torch", "sleep", "allreduce"),
    pytest.param("torch", "sleep", "ps", marks=pytest.mark.nightly),
    pytest.param("torch", "sleep", "local-sgd", marks=pytest.mark.nightly),
    pytest.param("torch", "stop", "gossip", marks=pytest.mark.nightly),
    pytest.param("mpi", "sleep", "allreduce", marks=pytest.mark.nightly),
    pytest.param("mpi", "sleep", "gossip", marks=pytest.mark.nightly),
    pytest.param("mpi", "sleep", "local-sgd", marks=pytest.mark.nightly)])
def test_rank_that_does_not_answer_is_named(start: str, case: str, strategy: str) -> None:
    """The others wait for rank 1, in a ring also for each other."""
    result = STARTS[start](3, SCRIPT, case, "40", environ={**LIMIT, "SLURMDL_TRAIN_STRATEGY": strategy,
                                                           "SLURMD_NODENAME": "node7"}, timeout=100)
    assert result.returncode, result.stdout
    [message] = messages(result.stderr)
    assert message.startswith("slurmdl: train: rank 0 on node7: waited "), message
    assert message.endswith(" for rank 1 on node7, which is stopped, or does not wait for other ranks (--timeout 10)")
    assert "done" not in result.stdout


@needs_mpi
@pytest.mark.nightly
@pytest.mark.parametrize("start", ["mpi", "torch"])
def test_ranks_that_wait_for_each_other_are_ended(start: str) -> None:
    """Rank 1 makes a call that the others do not make."""
    result = STARTS[start](3, SCRIPT, "call", environ=LIMIT, timeout=100)
    assert result.returncode, result.stdout
    [message] = messages(result.stderr)
    assert ", and all ranks wait for each other; expected the same calls on all ranks (--timeout 10)" in message


@needs_mpi
@pytest.mark.parametrize(("start", "limit"), [
    ("torch", "20"), pytest.param("torch", "0", marks=pytest.mark.nightly),
    pytest.param("mpi", "20", marks=pytest.mark.nightly)])
def test_wait_below_the_limit_is_no_fault(start: str, limit: str) -> None:
    result = STARTS[start](3, SCRIPT, "late", environ={"SLURMDL_TRAIN_TIMEOUT": limit}, timeout=100)
    assert result.returncode == 0 and not messages(result.stderr), result.stderr
    assert result.stdout.count("done") == 3


class Mailbox:
    """Rank 1 of 4; the messages of the others are put in by the test."""

    rank, alive_ranks = 1, (0, 1, 2, 3)

    def __init__(self, arriving: list[tuple[int, Tag]]) -> None:
        self.arriving, self.sent = arriving, list[tuple[int, int]]()

    def isend(self, peer: int, array: object, tag: int = 0) -> None:
        self.sent.append((peer, tag))

    def irecv(self, peer: int, array: object, tag: int = 0) -> None:
        self.arriving.remove((peer, Tag(tag)))

    def iprobe(self, tag: int) -> int | None:
        return next((peer for peer, arrived in self.arriving if arrived == tag), None)

    def testall(self, requests: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def short_answer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmdl.train.transports.transport._ANSWER_S", 0.05)
    monkeypatch.setattr("slurmdl.train.transports.transport.CHECK_INTERVAL_S", 0.0)


def test_only_ranks_without_an_answer_are_named() -> None:
    mailbox = Mailbox([(0, Tag.ROLL_ANSWER), (2, Tag.ROLL_CALL)])
    watchdog = Watchdog(mailbox, 5.0)
    watchdog.check(4.9)
    assert mailbox.sent == [(2, Tag.ROLL_ANSWER)], "a rank that waits answers, and asks only after the limit"
    with pytest.raises(StalledError, match="waited 1 min 5 s for rank 2, rank 3, which are stopped, or do not wait"):
        watchdog.check(65.0)
    assert {peer for peer, tag in mailbox.sent if tag == Tag.ROLL_CALL} == {0, 2, 3}


def test_lowest_rank_that_has_waited_too_long_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = Mailbox([(0, Tag.ROLL_CALL)])
    watchdog = Watchdog(mailbox, 5.0)
    watchdog.check(6.0)
    watchdog.check(7.0)
    assert mailbox.sent == [(0, Tag.ROLL_ANSWER)]
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + 60)
    monkeypatch.setattr("slurmdl.train.transports.transport._ANSWER_S", -1.0)
    with pytest.raises(StalledError):  # rank 0 has not reported
        watchdog.check(66.0)


def test_lower_rank_that_calls_the_roll_later_reports() -> None:
    class LateCall(Mailbox):
        def isend(self, peer: int, array: object, tag: int = 0) -> None:
            super().isend(peer, array, tag)
            if peer == 3:
                self.arriving.append((0, Tag.ROLL_CALL))

    mailbox = LateCall([])
    Watchdog(mailbox, 5.0).check(6.0)
    assert mailbox.sent[-1] == (0, Tag.ROLL_ANSWER)


@pytest.mark.parametrize("case", ["library", "outer"])
def test_run_may_last_longer_than_the_limits_of_torch_distributed(case: str) -> None:
    """Only the watchdog limits waits, not the process groups, whose limits are shorter here."""
    script = str(Path(SCRIPT).with_name("long_run_script.py"))
    proc = torchrun(2, script, case, environ={"SLURMDL_TRAIN_TIMEOUT": "100"})
    assert proc.returncode == 0, proc.stderr
    models = {line for line in proc.stdout.splitlines() if line.startswith("done")}
    assert len(models) == 1 and proc.stdout.count("done") == 2
