"""Communication thread: ops and pollers."""

from __future__ import annotations

import threading
import time

import pytest

from slurmdl.train.p2p import MAX_POLL_SECONDS, CommThread


def test_poller_runs_between_ops_until_removed() -> None:
    comm_thread, polled, calls = CommThread(True), threading.Event(), []

    def idle() -> bool:
        calls.append(threading.current_thread().name)
        if len(calls) == 5:
            polled.set()
        return len(calls) % 2 == 0
    comm_thread.add_poller(idle)
    assert polled.wait(10)
    assert comm_thread.call(lambda: 3) == 3
    comm_thread.remove_poller(idle)
    before = comm_thread.call(lambda: len(calls))
    assert comm_thread.call(lambda: len(calls)) == before
    comm_thread.close()
    assert set(calls) == {"comm-thread"}


def test_poll_interval_backs_off_only_when_idle() -> None:
    def poll_rate(busy: bool) -> float:
        """Mean number of polls in MAX_POLL_SECONDS."""
        comm_thread, calls = CommThread(True), list[bool]()

        def idle() -> bool:
            calls.append(busy)
            return busy
        begin = time.perf_counter()
        comm_thread.add_poller(idle)
        threading.Event().wait(0.3)
        comm_thread.remove_poller(idle)
        elapsed = time.perf_counter() - begin
        comm_thread.close()
        return len(calls) * MAX_POLL_SECONDS / elapsed

    idle_rate = poll_rate(busy=False)
    assert idle_rate < 1.1
    assert idle_rate < poll_rate(busy=True)


def test_failed_poller_fails_all_later_ops() -> None:
    comm_thread = CommThread(True)
    comm_thread.add_poller(lambda: bool(1 / 0))
    with pytest.raises(ZeroDivisionError):
        for _ in range(1000):
            comm_thread.call(lambda: threading.Event().wait(1e-3))
    with pytest.raises(ZeroDivisionError):
        comm_thread.call(lambda: 3)
    comm_thread.close()


def test_call_raises_exception_of_op() -> None:
    for threaded in (True, False):
        comm_thread = CommThread(threaded)
        with pytest.raises(ZeroDivisionError):
            comm_thread.call(lambda: 1 / 0)
        assert comm_thread.call(lambda: 4) == 4
        comm_thread.close()
