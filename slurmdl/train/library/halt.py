"""Signals that tell a run to stop, and how ranks agree on when: without any message as long as there is none.

A rank that is signalled tells the first worker, which calls all workers. Each of them answers with the step that it
has just ended, or will have ended next where it is found in the midst of one, and promises not to begin another
before it hears the largest of these numbers: that is where all can stop. Ranks that wait for each other answer while
they wait, so that nobody waits in vain. Workers without a common step stop where they are when they hear it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np

from slurmdl.train.courier import Courier
from slurmdl.train.transports.transport import Transport

#: what Slurm sends before a time limit (sbatch --signal), at it, and at preemption
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: of messages about stopping
TAG = 3
#: a step that no run gets to: this worker has made its last one
_NEVER = 1 << 62
#: words of messages, each with a number
_ASK, _CALL, _HERE, _UNTIL = range(4)
#: seconds between two looks at messages while a rank computes
_PAUSE = 0.1

_came = 0


def listen() -> None:
    """From now on SIGNALS do not end this process; a call of the main thread."""
    for number in SIGNALS:
        signal.signal(number, _come)


def _come(number: int, frame: FrameType | None) -> None:
    global _came
    _came += 1


class Halt:
    """One rank's part in agreeing on a checkpoint that does not come by itself.

    Parameters
    ----------
    workers : ranks; the first of them calls the others.
    step : steps that this worker has made.
    together : whether all are to stop at the same step.
    """

    def __init__(self, transport: Transport, courier: Courier, workers: Sequence[int], step: Callable[[], int],
                 together: bool) -> None:
        self._transport, self._courier, self._workers = transport, courier, workers
        self._step, self._together = step, together
        #: guards the promise: it is given by the communication thread, and kept by the training thread
        self._lock = threading.Lock()
        self._promise: int | None = None
        self._until: int | None = None
        self._finished = self._busy = False
        self._signals = 0
        self._wanted = self._stops = self._calling = False
        #: whether `due` has named the checkpoint that was called last
        self._acted = False
        self._answers: dict[int, int] = {}
        #: kept, since what is under way must stay as it is
        self._sent: list[Any] = []
        self._looked = transport.now()
        courier.do(lambda: transport.attend(TAG, self._attend))

    def call(self) -> None:
        """Let all make a checkpoint soon, and go on; a call of the first worker."""
        self._courier.do(self._begin)

    def due(self, last: bool = False) -> tuple[int, bool] | None:
        """Whether all make a checkpoint now, between two steps of this worker: its number, and whether they stop.

        Parameters
        ----------
        last : this worker has made its last step, so that it hears what is decided on with its promise, in any case.
        """
        step, now = self._step(), self._transport.now()
        at = _NEVER if last else step
        if not self._held(at) and self._until is None and now - self._looked < _PAUSE:
            return None
        self._looked = now
        self._courier.do(lambda: self._attend(0))
        while self._held(at):
            self._courier.do(self._await)
        if self._until is None or (self._together and step < self._until):
            return None
        number = self._until
        self._promise = self._until = None
        self._acted = True
        return None if number >= _NEVER else (number, self._stops)

    def over(self) -> None:
        """All ranks have made a checkpoint. If `due` named it, the first worker may call the next one from now on.

        Not earlier: a rank that still has to act on the last call would drop its answer to the next one.
        """
        if self._acted:
            self._acted = self._calling = False

    def finish(self) -> None:
        """This worker has made its last step: nobody waits for it any more."""
        with self._lock:
            self._finished = True

    def _held(self, step: int) -> bool:
        """Whether this worker may not begin another step yet."""
        with self._lock:
            return self._promise is not None and step >= self._promise and self._until is None

    def _await(self) -> None:
        """Wait for a message; an errand."""
        self._busy = True  # or it would be read while it is waited for
        self._transport.first([], TAG)
        self._busy = False
        self._attend(0)

    def _attend(self, under_way: int = 1) -> None:
        """Answer what there is; an errand, or while an errand waits.

        Parameters
        ----------
        under_way : 0 where it is known that no step is under way, else 1.
        """
        if self._busy:
            return
        self._busy = True
        if self._signals < _came:
            self._signals = _came
            self._tell(self._workers[0], _ASK, 0)
        while (peer := self._transport.probe(TAG)) is not None:
            message = np.empty(3, np.int64)
            self._transport.wait([self._transport.receive(peer, message, TAG)])
            word, number, stops = message.tolist()
            self._hear(peer, word, number, bool(stops), under_way)
        if self._wanted:
            self._begin(under_way)
        self._busy = False

    def _tell(self, peer: int, word: int, number: int) -> None:
        if peer == self._transport.rank:
            self._hear(peer, word, number, self._stops)
        else:
            self._sent.append(self._transport.send(peer, np.array([word, number, self._stops], np.int64), TAG))

    def _hear(self, peer: int, word: int, number: int, stops: bool, under_way: int = 1) -> None:
        if word == _ASK:
            self._wanted = True
        elif word == _CALL:
            self._tell(self._workers[0], _HERE, self._promised(under_way))
        elif word == _UNTIL:
            self._stops = stops
            self._until = number
        else:
            self._answers[peer] = number
            if len(self._answers) == len(self._workers):
                self._decide()

    def _begin(self, under_way: int = 1) -> None:
        if self._calling:
            return
        self._calling = True
        self._answers = {self._transport.rank: self._promised(under_way)}
        for worker in self._workers[1:]:
            self._tell(worker, _CALL, 0)
        if len(self._workers) == 1:
            self._decide()

    def _decide(self) -> None:
        # a request that comes later is not part of this decision, and waits for the next call
        self._stops, self._wanted = self._wanted, False
        until = max(self._answers.values())
        for worker in self._workers[1:]:
            self._tell(worker, _UNTIL, until)
        self._until = until

    def _promised(self, under_way: int) -> int:
        with self._lock:
            self._promise = _NEVER if self._finished else self._step() + under_way
            return self._promise
