"""A rank that waits for others longer than the limit ends the run, and says for whom it waited."""

from __future__ import annotations

import time

import pytest

from slurmdl.train.transports.transport import StalledError, Tag, Watchdog


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
