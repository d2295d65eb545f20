"""The communication thread, and what it does between errands."""

from __future__ import annotations

import threading
import time

import pytest

from slurmdl.train.comm_thread import MAX_POLL_SECONDS, CommThread


def test_what_is_attended_to_goes_on_between_errands_and_ends() -> None:
    courier, enough, calls = CommThread(True), threading.Event(), []

    def idle() -> bool:
        calls.append(threading.current_thread().name)
        if len(calls) == 5:
            enough.set()
        return len(calls) % 2 == 0
    courier.add_poller(idle)
    assert enough.wait(10)
    assert courier.call(lambda: 3) == 3
    courier.remove_poller(idle)
    before = courier.call(lambda: len(calls))
    assert courier.call(lambda: len(calls)) == before
    courier.close()
    assert set(calls) == {"comm-thread"}


def test_looks_become_seldom_while_nothing_comes_and_not_while_something_is_under_way() -> None:
    def looks(comes: bool) -> float:
        """In the time of one long pause, on average."""
        courier, calls = CommThread(True), list[bool]()

        def idle() -> bool:
            calls.append(comes)
            return comes
        begin = time.perf_counter()
        courier.add_poller(idle)
        threading.Event().wait(0.3)
        courier.remove_poller(idle)
        taken = time.perf_counter() - begin
        courier.close()
        return len(calls) * MAX_POLL_SECONDS / taken

    seldom = looks(comes=False)
    assert seldom < 1.1
    assert seldom < looks(comes=True)


def test_what_fails_between_errands_fails_all_errands_that_follow() -> None:
    courier = CommThread(True)
    courier.add_poller(lambda: bool(1 / 0))
    with pytest.raises(ZeroDivisionError):
        for _ in range(1000):
            courier.call(lambda: threading.Event().wait(1e-3))
    with pytest.raises(ZeroDivisionError):
        courier.call(lambda: 3)
    courier.close()


def test_what_an_errand_raises_its_giver_gets() -> None:
    for threaded in (True, False):
        courier = CommThread(threaded)
        with pytest.raises(ZeroDivisionError):
            courier.call(lambda: 1 / 0)
        assert courier.call(lambda: 4) == 4
        courier.close()
