"""Detection of slow ranks in a run of the library: the workers' compute times, collected by the first worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.library.context import RunContext
from slurmdl.train.slow_ranks import WINDOW_STEPS, SlowRankReporter, start_requeue, warn_of_refusal
from slurmdl.train.transports.transport import Tag
from slurmdl.train.transports.virtual import VirtualTransport


class SlowRankMonitor:
    """One rank's part in the detection of slow ranks.

    At the end of each window of WINDOW_STEPS steps every worker sends the median of its compute times to the first
    alive worker, which reads them half a window later, when ranks that are some steps behind have sent theirs, too.
    Nobody waits: a missing value is judged with the next window. The time of a step is that without communication and
    waiting for peers, whatever the strategy (PhaseTimer); it includes the batch.

    Nothing is monitored with one worker, on a parameter server, with virtual ranks, whose clocks are no measure, and
    with load balancing (see slow_ranks).

    Args:
        request_stop: requests a checkpoint of all ranks after which the run stops; None without checkpoints.

    Attributes:
        nodes_to_leave: node -> reason, on the first worker after it has requested a stop so that the job starts again
            without these nodes; else empty.
    """

    def __init__(self, ctx: RunContext, request_stop: Callable[[], None] | None) -> None:
        world = self._world = ctx.world
        self._comm_thread, self._request_stop = ctx.comm_thread, request_stop
        self._is_active = not isinstance(world.transport, VirtualTransport) and not world.is_server \
            and world.worker_count > 1 and not world.config.load_balance
        self._reporter = SlowRankReporter(dict(enumerate(world.nodes)))
        self.nodes_to_leave: dict[str, str] = {}
        self._times: list[float] = []
        #: the main rank's own time of the last window, and the others' that are being received
        self._own_seconds: float | None = None
        self._receiving: Future[dict[int, float]] | None = None
        self._first_step = 0
        self._sends: list[tuple[Any, npt.NDArray[np.float64]]] = []
        #: the check whether the job can be requeued without the slow nodes
        self._requeue_check: Future[str] | None = None

    @property
    def found(self) -> list[dict[str, Any]]:
        """See SlowRankReporter; empty except on the first worker."""
        return self._reporter.found

    def after_step(self, step: int, seconds: float) -> None:
        """Record the compute time of a step in s; `step` is the number of completed steps."""
        if not self._is_active:
            return
        self._times.append(seconds)
        offset = step % WINDOW_STEPS
        if not offset:
            # after a resume the first window may be shorter
            if len(self._times) == WINDOW_STEPS:
                self._end_window(step)
            self._times.clear()
        elif offset == WINDOW_STEPS // 2 and self._own_seconds is not None:
            self._receiving = self._comm_thread.submit(self._receive)
        if self._receiving and self._receiving.done():
            self._judge(self._receiving)
        if self._requeue_check and self._requeue_check.done():
            self._stop_if_possible(self._requeue_check)

    def finish(self) -> None:
        """After the last step of all workers: receive what no window has read."""
        if self._is_active and self._world.is_main:
            self._comm_thread.call(self._receive)

    def continue_with_all_nodes(self, error: object) -> None:
        """The job was not requeued, so the run continues."""
        if self.nodes_to_leave:
            warn_of_refusal(self.nodes_to_leave, error)
            self.nodes_to_leave = {}

    def _end_window(self, step: int) -> None:
        seconds = median(self._times)
        if self._world.is_main:
            self._own_seconds, self._first_step = seconds, step - WINDOW_STEPS + 1
        else:
            self._comm_thread.submit(lambda: self._send(seconds))

    def _send(self, seconds: float) -> None:
        # if a rank has failed, the calls raise errors; the strategy's next op reports the failure
        transport, array = self._world.transport, np.array([seconds])
        pending, self._sends = self._sends, []
        self._sends = [(request, sent) for request, sent in pending if not transport.testall([request])]
        self._sends.append((transport.isend(self._world.alive_with_role("worker")[0], array, Tag.STEP_TIME), array))

    def _receive(self) -> dict[int, float]:
        """The newest value of each rank that has sent one."""
        transport, seconds = self._world.transport, dict[int, float]()
        while (peer := transport.iprobe(Tag.STEP_TIME)) is not None:
            array = np.empty(1)
            transport.waitall([transport.irecv(peer, array, Tag.STEP_TIME)])
            seconds[peer] = float(array[0])
        return seconds

    def _judge(self, received: Future[dict[int, float]]) -> None:
        own_seconds, self._own_seconds, self._receiving = self._own_seconds, None, None
        if received.exception() or own_seconds is None:
            return
        seconds = {self._world.rank: own_seconds, **received.result()}
        if self._reporter.add_window(seconds, self._first_step):
            nodes = self._reporter.nodes_to_exclude
            if self._request_stop:
                self._requeue_check = start_requeue(nodes, dry_run=True)
            else:
                warn_of_refusal(nodes, "it has no checkpoints to resume from (--checkpoint-dir)")

    def _stop_if_possible(self, check: Future[str]) -> None:
        self._requeue_check = None
        if error := check.exception():
            warn_of_refusal(self._reporter.nodes_to_exclude, error)
        elif self._request_stop:
            self.nodes_to_leave = self._reporter.nodes_to_exclude
            self._request_stop()
