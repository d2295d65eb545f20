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

from slurmdl.train.comm_thread import CommThread
from slurmdl.train.transports.transport import Transport

#: what Slurm sends before a time limit (sbatch --signal), at it, and at preemption
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: of messages about stopping
TAG = 3
#: a step that no run gets to: this worker has made its last one
_NEVER = 1 << 62
#: words of messages, each with a number
_STOP_REQUEST, _STEP_QUERY, _STEP_REPLY, _STOP_STEP = range(4)
#: seconds between two looks at messages while a rank computes
_POLL_SECONDS = 0.1

_signals_received = 0


def install_signal_handlers() -> None:
    """From now on SIGNALS do not end this process; a call of the main thread."""
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _signals_received
    _signals_received += 1


class CheckpointCoordinator:
    """One rank's part in agreeing on a checkpoint that does not come by itself.

    Parameters
    ----------
    workers : ranks; the first of them calls the others.
    step : steps that this worker has made.
    together : whether all are to stop at the same step.
    """

    def __init__(self, transport: Transport, comm_thread: CommThread, workers: Sequence[int], completed_steps: Callable[[], int],
                 lockstep: bool) -> None:
        self._transport, self._comm_thread, self._workers = transport, comm_thread, workers
        self._completed_steps, self._lockstep = completed_steps, lockstep
        #: guards the promise: it is given by the communication thread, and kept by the training thread
        self._lock = threading.Lock()
        self._promised_step: int | None = None
        self._agreed_step: int | None = None
        self._finished = self._polling = False
        self._signals_handled = 0
        self._stop_requested = self._stops_after = self._query_open = False
        #: whether `due` has named the checkpoint that was called last
        self._reported = False
        self._replies: dict[int, int] = {}
        #: kept, since what is under way must stay as it is
        self._pending_sends: list[Any] = []
        self._last_poll = transport.now()
        comm_thread.call(lambda: transport.set_poll_hook(TAG, self._poll))

    def request(self) -> None:
        """Let all make a checkpoint soon, and go on; a call of the first worker."""
        self._comm_thread.call(self._start_query)

    def due_checkpoint(self, last: bool = False) -> tuple[int, bool] | None:
        """Whether all make a checkpoint now, between two steps of this worker: its number, and whether they stop.

        Parameters
        ----------
        last : this worker has made its last step, so that it hears what is decided on with its promise, in any case.
        """
        step, now = self._completed_steps(), self._transport.now()
        at = _NEVER if last else step
        if not self._is_holding(at) and self._agreed_step is None and now - self._last_poll < _POLL_SECONDS:
            return None
        self._last_poll = now
        self._comm_thread.call(lambda: self._poll(0))
        while self._is_holding(at):
            self._comm_thread.call(self._wait_message)
        if self._agreed_step is None or (self._lockstep and step < self._agreed_step):
            return None
        number = self._agreed_step
        self._promised_step = self._agreed_step = None
        self._reported = True
        return None if number >= _NEVER else (number, self._stops_after)

    def checkpoint_done(self) -> None:
        """All ranks have made a checkpoint. If `due` named it, the first worker may call the next one from now on.

        Not earlier: a rank that still has to act on the last call would drop its answer to the next one.
        """
        if self._reported:
            self._reported = self._query_open = False

    def finish(self) -> None:
        """This worker has made its last step: nobody waits for it any more."""
        with self._lock:
            self._finished = True

    def _is_holding(self, step: int) -> bool:
        """Whether this worker may not begin another step yet."""
        with self._lock:
            return self._promised_step is not None and step >= self._promised_step and self._agreed_step is None

    def _wait_message(self) -> None:
        """Wait for a message; an errand."""
        self._polling = True  # or it would be read while it is waited for
        self._transport.wait_any_or_message([], TAG)
        self._polling = False
        self._poll(0)

    def _poll(self, in_step: int = 1) -> None:
        """Answer what there is; an errand, or while an errand waits.

        Parameters
        ----------
        under_way : 0 where it is known that no step is under way, else 1.
        """
        if self._polling:
            return
        self._polling = True
        if self._signals_handled < _signals_received:
            self._signals_handled = _signals_received
            self._send(self._workers[0], _STOP_REQUEST, 0)
        while (peer := self._transport.iprobe(TAG)) is not None:
            message = np.empty(3, np.int64)
            self._transport.waitall([self._transport.irecv(peer, message, TAG)])
            word, number, stops = message.tolist()
            self._on_message(peer, word, number, bool(stops), in_step)
        if self._stop_requested:
            self._start_query(in_step)
        self._polling = False

    def _send(self, peer: int, kind: int, number: int) -> None:
        if peer == self._transport.rank:
            self._on_message(peer, kind, number, self._stops_after)
        else:
            self._pending_sends.append(self._transport.isend(
                peer, np.array([kind, number, self._stops_after], np.int64), TAG))

    def _on_message(self, peer: int, kind: int, number: int, stops: bool, in_step: int = 1) -> None:
        if kind == _STOP_REQUEST:
            self._stop_requested = True
        elif kind == _STEP_QUERY:
            self._send(self._workers[0], _STEP_REPLY, self._promise(in_step))
        elif kind == _STOP_STEP:
            self._stops_after = stops
            self._agreed_step = number
        else:
            self._replies[peer] = number
            if len(self._replies) == len(self._workers):
                self._decide()

    def _start_query(self, in_step: int = 1) -> None:
        if self._query_open:
            return
        self._query_open = True
        self._replies = {self._transport.rank: self._promise(in_step)}
        for worker in self._workers[1:]:
            self._send(worker, _STEP_QUERY, 0)
        if len(self._workers) == 1:
            self._decide()

    def _decide(self) -> None:
        # a request that comes later is not part of this decision, and waits for the next call
        self._stops_after, self._stop_requested = self._stop_requested, False
        until = max(self._replies.values())
        for worker in self._workers[1:]:
            self._send(worker, _STOP_STEP, until)
        self._agreed_step = until

    def _promise(self, in_step: int) -> int:
        with self._lock:
            self._promised_step = _NEVER if self._finished else self._completed_steps() + in_step
            return self._promised_step
