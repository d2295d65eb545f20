"""Communication thread: exchanges messages while the training thread computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from slurmdl.train.meters import COMM_ROW, Trace

#: polling interval in seconds; doubles while idle
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 2e-4, 2e-3


class CommThread:
    """Run communication ops one at a time, in the order of submission.

    After startup only this thread calls the transport. If the transport is not thread-safe, `submit` runs the op in
    the calling thread.

    Args:
        threaded: see Transport.supports_comm_thread.
        clock: clock of the training thread, in s.
        peer_wait_clock: see MeteredP2P.peer_wait_seconds.

    Attributes:
        blocked_seconds: time that the training thread was blocked here.
        peer_wait_seconds: part of it before the first chunk of an expected message arrived.
        busy_seconds: total time of all ops.
    """

    def __init__(self, threaded: bool, clock: Callable[[], float] = time.perf_counter,
                 peer_wait_clock: Callable[[], float] = lambda: 0.0, trace: Trace | None = None) -> None:
        self.blocked_seconds = self.peer_wait_seconds = self.busy_seconds = 0.0
        self._clock, self._peer_wait_clock, self._trace = clock, peer_wait_clock, trace
        self._pollers: tuple[Callable[[], bool], ...] = ()
        self._failure: BaseException | None = None
        self._ops: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="comm-thread", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def submit(self, op: Callable[[], Any]) -> Future[Any]:
        """Schedule an op."""
        future: Future[Any] = Future()
        if self._thread:
            self._ops.put((op, future))
        else:
            with self._timing_blocked():
                self._execute(op, future)
        return future

    @property
    def has_queued(self) -> bool:
        """Whether an op is waiting for the running one."""
        return self._thread is not None and not self._ops.empty()

    def wait(self, future: Future[Any]) -> Any:
        """Wait for an op; return its result or raise its exception."""
        with self._timing_blocked():
            return future.result()

    def call(self, op: Callable[[], Any]) -> Any:
        """Submit an op and wait for it."""
        return self.wait(self.submit(op))

    def add_poller(self, poller: Callable[[], bool]) -> None:
        """Call `poller` repeatedly while idle, to serve requests that may arrive at any time.

        It returns whether it handled a message or has one in flight. If not, the interval doubles, since each poll
        takes some 20 us of computing time.
        """
        self._pollers = (*self._pollers, poller)
        self.submit(lambda: None)  # wakes a thread that waits for ops without a timeout

    def remove_poller(self, poller: Callable[[], bool]) -> None:
        self._pollers = tuple(active for active in self._pollers if active != poller)
        self.submit(lambda: None)

    def reset(self) -> None:
        """Remove all pollers and clear a poller's exception, so that ops run again."""
        self._pollers = ()
        self.submit(lambda: None).exception()  # the thread may still be in a poller
        self._failure = None

    def close(self) -> None:
        """Finish all submitted ops and stop the thread; later ops run in the calling thread."""
        if self._thread:
            self._ops.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        interval = 0.0
        while True:
            try:
                entry = self._ops.get(timeout=interval if self._pollers else None)
            except queue.Empty:
                interval = MIN_POLL_SECONDS if self._poll() else \
                    min(max(2 * interval, MIN_POLL_SECONDS), MAX_POLL_SECONDS)
                continue
            if entry is None:
                return
            self._execute(*entry)
            interval = 0.0

    def _poll(self) -> bool:
        """Call all pollers; all later ops raise the exception of a failed poller."""
        try:
            return bool(sum(poller() for poller in self._pollers))
        except BaseException as error:
            self._pollers, self._failure = (), error
            return False

    @contextmanager
    def _timing_blocked(self) -> Iterator[None]:
        start, peer_wait = self._clock(), self._peer_wait_clock()
        try:
            yield
        finally:
            self.blocked_seconds += self._clock() - start
            self.peer_wait_seconds += self._peer_wait_clock() - peer_wait

    def _execute(self, op: Callable[[], Any], future: Future[Any]) -> None:
        start = self._clock()
        try:
            if self._failure:
                raise self._failure
            resolve = partial(future.set_result, op())
        except BaseException as error:
            resolve = partial(future.set_exception, error)
        end = self._clock()
        self.busy_seconds += end - start
        if self._trace:
            self._trace.add("comm op", start, end, COMM_ROW)
        resolve()  # last: the waiting thread may read the counters
