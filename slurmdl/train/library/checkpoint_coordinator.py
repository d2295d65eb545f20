"""Signals that stop a run, and the agreement of ranks on a common checkpoint, without messages in normal operation.

A signaled rank sends a request to the first worker, which queries all workers. Each replies with the step that it
has just completed, or will have completed next if it is within one, and promises to start no further step before it
receives the maximum of the replies: the step at which all can stop. Ranks that wait for each other reply while they
wait, so this cannot deadlock. Workers without a common step stop when they receive the result.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np

from slurmdl.train.comm_thread import CommThread
from slurmdl.train.transports.transport import Tag, Transport

#: sent by Slurm before a time limit (sbatch --signal), at it, and at preemption
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: unreachable step number: this worker has made its last step
_NEVER = 1 << 62
#: kinds of messages, each with a number
_STOP_REQUEST, _STEP_QUERY, _STEP_REPLY, _STOP_STEP = range(4)
#: seconds between two polls for messages while a rank computes
_POLL_SECONDS = 0.1

_signals_received = 0


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _signals_received
    _signals_received += 1


def install_signal_handlers(handler: Callable[[int, FrameType | None], None] | int = _on_signal) -> None:
    """Record PREEMPTION_SIGNALS instead of exiting, or handle them otherwise; call in the main thread."""
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, handler)


def has_received_signal() -> bool:
    """Whether one of PREEMPTION_SIGNALS has arrived in this process, so that it must stop."""
    return _signals_received > 0


class CheckpointCoordinator:
    """One rank's part in the agreement on a checkpoint; the first worker coordinates.

    `completed_steps` returns the steps that this worker has made. If `lockstep`, all stop at the same step.
    """

    def __init__(self, transport: Transport, comm_thread: CommThread, workers: Sequence[int],
                 completed_steps: Callable[[], int], lockstep: bool) -> None:
        self._transport, self._comm_thread, self._workers = transport, comm_thread, workers
        self._completed_steps, self._lockstep = completed_steps, lockstep
        #: guards the promise, which the communication thread gives and the training thread keeps
        self._lock = threading.Lock()
        self._promised_step: int | None = None
        self._agreed_step: int | None = None
        self._finished = self._polling = False
        self._signals_handled = 0
        self._stop_requested = self._stops_after = self._query_open = False
        #: whether `due_checkpoint` has returned the last agreed checkpoint
        self._reported = False
        self._replies: dict[int, int] = {}
        self._pending_sends: list[Any] = []
        self._last_poll = transport.now()
        comm_thread.call(lambda: transport.set_poll_hook(Tag.CHECKPOINT, self._poll))

    def request(self) -> None:
        """Request a checkpoint of all ranks; called by the first worker."""
        self._comm_thread.call(self._start_query)

    def request_stop(self) -> None:
        """Request a checkpoint of all ranks after which they stop, as a signal does; called by the first worker."""
        self._comm_thread.submit(lambda: self._send(self._workers[0], _STOP_REQUEST))

    def due_checkpoint(self, last: bool = False) -> tuple[int, bool] | None:
        """Between two steps: number of the checkpoint that is due now, and whether the run stops after it.

        After its `last` step a worker waits for any pending decision.
        """
        step, now = self._completed_steps(), self._transport.now()
        own_step = _NEVER if last else step
        if not self._is_holding(own_step) and self._agreed_step is None and now - self._last_poll < _POLL_SECONDS:
            return None
        self._last_poll = now
        self._comm_thread.call(lambda: self._poll(0))
        while self._is_holding(own_step):
            self._comm_thread.call(self._wait_message)
        if self._agreed_step is None or (self._lockstep and step < self._agreed_step):
            return None
        number = self._agreed_step
        self._promised_step = self._agreed_step = None
        self._reported = True
        return None if number >= _NEVER else (number, self._stops_after)

    def checkpoint_done(self) -> None:
        """All ranks have written a checkpoint. If `due_checkpoint` returned it, the next query may start.

        Not earlier: a rank that has yet to act on the last result would drop its reply to the next query.
        """
        if self._reported:
            self._reported = self._query_open = False

    def finish(self) -> None:
        """This worker has made its last step and promises any step."""
        with self._lock:
            self._finished = True

    def _is_holding(self, step: int) -> bool:
        """Whether this worker must not start another step yet."""
        with self._lock:
            return self._promised_step is not None and step >= self._promised_step and self._agreed_step is None

    def _wait_message(self) -> None:
        self._polling = True  # or the poll hook would receive the message
        self._transport.wait_any_or_message([], Tag.CHECKPOINT)
        self._polling = False
        self._poll(0)

    def _poll(self, in_step: int = 1) -> None:
        """Handle signals and messages, as a comm op or poll hook; `in_step`: 0 between two steps, 1 if unknown."""
        if self._polling:
            return
        self._polling = True
        if self._signals_handled < _signals_received:
            self._signals_handled = _signals_received
            self._send(self._workers[0], _STOP_REQUEST)
        while (peer := self._transport.iprobe(Tag.CHECKPOINT)) is not None:
            message = np.empty(3, np.int64)
            self._transport.waitall([self._transport.irecv(peer, message, Tag.CHECKPOINT)])
            kind, number, stops = message.tolist()
            self._on_message(peer, kind, number, bool(stops), in_step)
        if self._stop_requested:
            self._start_query(in_step)
        self._polling = False

    def _send(self, peer: int, kind: int, number: int = 0, in_step: int = 1) -> None:
        if peer == self._transport.rank:
            self._on_message(peer, kind, number, self._stops_after, in_step)
        else:
            self._pending_sends.append(self._transport.isend(
                peer, np.array([kind, number, self._stops_after], np.int64), Tag.CHECKPOINT))

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
        if not self._query_open:
            self._query_open = True
            self._replies = {}
            for worker in self._workers:
                self._send(worker, _STEP_QUERY, in_step=in_step)

    def _decide(self) -> None:
        # a later request is not part of this decision and waits for the next query
        self._stops_after, self._stop_requested = self._stop_requested, False
        agreed_step = max(self._replies.values())
        for worker in self._workers:
            self._send(worker, _STOP_STEP, agreed_step)

    def _promise(self, in_step: int) -> int:
        with self._lock:
            self._promised_step = _NEVER if self._finished else self._completed_steps() + in_step
            return self._promised_step
