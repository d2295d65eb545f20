"""The communication thread: messages go on while the training thread computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from slurmdl.train.trace import COMM_ROW, Trace

#: seconds from one look at what others may ask for to the next: the shortest and the longest
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 2e-4, 2e-3


class CommThread:
    """Carries out errands, one after the other, in the order in which they are given.

    After the start of the training it alone talks to the transport. Where the transport may not be called from
    another thread, an errand is carried out at once, where it is given.

    Parameters
    ----------
    threaded : see transports.Transport.
    now : the clock of the training thread, in s.
    waited : see Messages.waited.
    trace : where errands are written down.

    Attributes
    ----------
    seconds : time for which the training thread has waited here, in s.
    waiting : the part of it in which nothing was there yet of a message that was expected.
    busy : time for which errands were carried out, in s, whether the training thread waited for them or not.
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
        """Begin an errand."""
        future: Future[Any] = Future()
        if self._thread:
            self._ops.put((op, future))
        else:
            with self._timing_blocked():
                self._execute(op, future)
        return future

    @property
    def has_queued(self) -> bool:
        """Whether an errand waits for the one that is carried out now."""
        return self._thread is not None and not self._ops.empty()

    def wait(self, future: Future[Any]) -> Any:
        """The result of an errand, or what it raised."""
        with self._timing_blocked():
            return future.result()

    def call(self, op: Callable[[], Any]) -> Any:
        """Carry out an errand and wait for it."""
        return self.wait(self.submit(op))

    def add_poller(self, poller: Callable[[], bool]) -> None:
        """Call this, too, while there is nothing to do, again and again: for what others may ask for at any time.

        It returns whether something came, or is under way, and is called again soon; else the pause becomes longer
        and longer, as each look takes some 20 us from those who compute.
        """
        self._pollers = (*self._pollers, poller)
        self.submit(lambda: None)  # a thread that waits for errands looks again

    def remove_poller(self, poller: Callable[[], bool]) -> None:
        """Call this no more."""
        self._pollers = tuple(its for its in self._pollers if its != poller)
        self.submit(lambda: None)

    def reset(self) -> None:
        """Attend to nothing more, and forget what that has raised, so that errands are carried out again."""
        self._pollers = ()
        self.submit(lambda: None).exception()  # the thread may still be in it
        self._failure = None

    def close(self) -> None:
        """Carry out what was given, and end the thread; what is given later is carried out at once."""
        if self._thread:
            self._ops.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        pause = 0.0
        while True:
            try:
                given = self._ops.get(timeout=pause if self._pollers else None)
            except queue.Empty:
                # an errand that comes in a pause ends it
                pause = MIN_POLL_SECONDS if self._poll() else min(max(2 * pause, MIN_POLL_SECONDS), MAX_POLL_SECONDS)
                continue
            if given is None:
                return
            self._execute(*given)
            pause = 0.0

    def _poll(self) -> bool:
        """Call what there is to attend to; what it raises is raised by all errands that follow."""
        try:
            return bool(sum(idle() for idle in self._pollers))
        except BaseException as error:
            self._pollers, self._failure = (), error
            return False

    @contextmanager
    def _timing_blocked(self) -> Iterator[None]:
        start, waited = self._clock(), self._peer_wait_clock()
        try:
            yield
        finally:
            self.blocked_seconds += self._clock() - start
            self.peer_wait_seconds += self._peer_wait_clock() - waited

    def _execute(self, op: Callable[[], Any], future: Future[Any]) -> None:
        start = self._clock()
        came: Any = None
        tell: Callable[[Any], None] = future.set_result
        try:
            if self._failure:
                raise self._failure
            came = op()
        except BaseException as error:
            tell, came = future.set_exception, error
        end = self._clock()
        self.busy_seconds += end - start
        if self._trace:
            self._trace.add("comm op", start, end, COMM_ROW)
        tell(came)  # last of all: who waits for it goes on, and may read what was counted
