"""The communication thread: messages go on while the training thread computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from slurmdl.train.trace import MESSAGES, Trace

#: seconds from one look at what others may ask for to the next: the shortest and the longest
SHORTEST, LONGEST = 2e-4, 2e-3


class Courier:
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

    def __init__(self, threaded: bool, now: Callable[[], float] = time.perf_counter,
                 waited: Callable[[], float] = lambda: 0.0, trace: Trace | None = None) -> None:
        self.seconds = self.waiting = self.busy = 0.0
        self._now, self._waited, self._trace = now, waited, trace
        self._idle: tuple[Callable[[], bool], ...] = ()
        self._failure: BaseException | None = None
        self._errands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def give(self, errand: Callable[[], Any]) -> Future[Any]:
        """Begin an errand."""
        future: Future[Any] = Future()
        if self._thread:
            self._errands.put((errand, future))
        else:
            with self._waiting():
                self._carry_out(errand, future)
        return future

    @property
    def pending(self) -> bool:
        """Whether an errand waits for the one that is carried out now."""
        return self._thread is not None and not self._errands.empty()

    def wait(self, future: Future[Any]) -> Any:
        """The result of an errand, or what it raised."""
        with self._waiting():
            return future.result()

    def do(self, errand: Callable[[], Any]) -> Any:
        """Carry out an errand and wait for it."""
        return self.wait(self.give(errand))

    def attend(self, idle: Callable[[], bool]) -> None:
        """Call this, too, while there is nothing to do, again and again: for what others may ask for at any time.

        It returns whether something came, or is under way, and is called again soon; else the pause becomes longer
        and longer, as each look takes some 20 us from those who compute.
        """
        self._idle = (*self._idle, idle)
        self.give(lambda: None)  # a thread that waits for errands looks again

    def neglect(self, idle: Callable[[], bool]) -> None:
        """Call this no more."""
        self._idle = tuple(its for its in self._idle if its != idle)
        self.give(lambda: None)

    def forgive(self) -> None:
        """Attend to nothing more, and forget what that has raised, so that errands are carried out again."""
        self._idle = ()
        self.give(lambda: None).exception()  # the thread may still be in it
        self._failure = None

    def close(self) -> None:
        """Carry out what was given, and end the thread; what is given later is carried out at once."""
        if self._thread:
            self._errands.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        pause = 0.0
        while True:
            try:
                given = self._errands.get(timeout=pause if self._idle else None)
            except queue.Empty:
                # an errand that comes in a pause ends it
                pause = SHORTEST if self._helps() else min(max(2 * pause, SHORTEST), LONGEST)
                continue
            if given is None:
                return
            self._carry_out(*given)
            pause = 0.0

    def _helps(self) -> bool:
        """Call what there is to attend to; what it raises is raised by all errands that follow."""
        try:
            return bool(sum(idle() for idle in self._idle))
        except BaseException as error:
            self._idle, self._failure = (), error
            return False

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start, waited = self._now(), self._waited()
        try:
            yield
        finally:
            self.seconds += self._now() - start
            self.waiting += self._waited() - waited

    def _carry_out(self, errand: Callable[[], Any], future: Future[Any]) -> None:
        start = self._now()
        came: Any = None
        tell: Callable[[Any], None] = future.set_result
        try:
            if self._failure:
                raise self._failure
            came = errand()
        except BaseException as error:
            tell, came = future.set_exception, error
        end = self._now()
        self.busy += end - start
        if self._trace:
            self._trace.add("errand", start, end, MESSAGES)
        tell(came)  # last of all: who waits for it goes on, and may read what was counted
