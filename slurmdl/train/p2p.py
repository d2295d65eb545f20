"""Point-to-point messages between ranks, with meters of bytes by locality level and of waiting time.

Training data is exchanged by these messages alone, so the bytes on each link are known. A communication thread
exchanges them while the training thread computes.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.meters import COMM_ROW, LOCALITY_LEVELS, Trace
from slurmdl.train.transports.transport import CHUNK_BYTES, CommCoroutine, Transport

#: largest array that is sent before the receiver is known to be ready; see `rendezvous_handshake`
EAGER_MAX_BYTES = 60_000

Arrays = Sequence[tuple[int, npt.NDArray[Any]]]


class MeteredP2P:
    """Messages of one rank.

    Args:
        levels: entry i is the locality level of a message to rank i.

    Attributes:
        bytes_sent: locality level -> payload bytes sent by this rank.
    """

    def __init__(self, transport: Transport, levels: Sequence[str]) -> None:
        self.transport = transport
        self._levels = tuple(levels)
        self._chunk_bytes = dict.fromkeys(LOCALITY_LEVELS, CHUNK_BYTES) | {
            "inter_zone": transport.inter_zone_chunk_bytes}
        self.rank = transport.rank
        self.bytes_sent = dict.fromkeys(LOCALITY_LEVELS, 0)
        self._lock = threading.Lock()
        self._peer_wait, self._wait_start = 0.0, math.inf

    def peer_wait_seconds(self) -> float:
        """Total time so far before the first chunk of an expected message arrived, in s."""
        return self._peer_wait + max(self.transport.now() - self._wait_start, 0.0)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], tag: int = 0) -> None:
        """Send and receive contiguous arrays (peer, array) concurrently, and wait for completion."""
        recv_requests = [self.transport.irecv(peer, array, tag) for peer, array in receives]
        send_requests = [self.isend(peer, array, tag) for peer, array in sends]
        self.wait_first_chunk(recv_requests[:1])
        self.transport.waitall(recv_requests + send_requests)

    def rendezvous_handshake(self, sends: Arrays, receives: Arrays) -> None:
        """Before an exchange: wait until the receivers of more than EAGER_MAX_BYTES are ready.

        An early message would take bandwidth from messages in flight. All ranks of the exchange pass the same arrays.
        """
        empty = np.empty(0, np.uint8)
        self.exchange([(peer, empty) for peer, array in receives if array.nbytes > EAGER_MAX_BYTES],
                      [(peer, empty) for peer, array in sends if array.nbytes > EAGER_MAX_BYTES])

    def post(self, sends: Arrays, receives: Arrays, tag: int = 0) -> tuple[list[tuple[int, slice, Any]], list[Any]]:
        """Start to send and receive contiguous arrays (peer, array) concurrently, in chunks.

        Two ranks list several arrays between them with the same tag in the same order. Return for each chunk to
        receive, in order, the index in `receives`, slice and request; and the send requests.
        """
        recv_chunks = [(index, chunk, self.transport.irecv(peer, array[chunk], tag))
                       for index, (peer, array) in enumerate(receives) for chunk in self._chunk_slices(peer, array)]
        send_requests = [self.isend(peer, array[chunk], tag)
                         for peer, array in sends for chunk in self._chunk_slices(peer, array)]
        return recv_chunks, send_requests

    def iter_chunks(self, sends: Arrays, receives: Arrays) -> Iterator[tuple[int, slice]]:
        """Send and receive arrays as `post`; yield the index in `receives` and the slice of each received chunk.

        The caller's work on a chunk overlaps with the transfer of the next ones.
        """
        recv_chunks, send_requests = self.post(sends, receives)
        self.wait_first_chunk([request for _, _, request in recv_chunks[:1]])
        for index, chunk, request in recv_chunks:
            self.transport.waitall([request])
            yield index, chunk
        self.transport.waitall(send_requests)

    def exchange_chunked(self, sends: Arrays, receives: Arrays) -> None:
        """As `iter_chunks`, and wait for completion."""
        for _ in self.iter_chunks(sends, receives):
            pass

    def run_to_completion(self, coroutine: CommCoroutine) -> None:
        for requests, first in coroutine:
            if first:
                self.wait_first_chunk(requests)
            else:
                self.transport.waitall(requests)

    @contextmanager
    def timing_wait(self) -> Iterator[None]:
        """Count the time inside as waiting for a peer."""
        self.set_peer_wait(True)
        try:
            yield
        finally:
            self.set_peer_wait(False)

    def set_peer_wait(self, waits: bool) -> None:
        """Count the time from now on as waiting for a peer, or no longer."""
        now = self.transport.now()
        if not waits and self._wait_start < math.inf:
            self._peer_wait += now - self._wait_start
        self._wait_start = min(self._wait_start, now) if waits else math.inf

    def wait_first_chunk(self, requests: Sequence[Any]) -> None:
        """Wait for the first part of expected messages, and count the time as waiting for a peer."""
        if requests:
            with self.timing_wait():
                self.transport.waitall(requests)

    def _chunk_slices(self, peer: int, array: npt.NDArray[Any]) -> list[slice]:
        length = self._chunk_bytes[self._levels[peer]] // array.itemsize
        return [slice(start, min(start + length, array.size)) for start in range(0, array.size, length)]

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Start to send an array, as Transport.isend, and count its bytes."""
        self.count_bytes(peer, array.nbytes)
        return self.transport.isend(peer, array, tag)

    def count_bytes(self, peer: int, num_bytes: int) -> None:
        """Count bytes that this rank sends to another."""
        with self._lock:
            self.bytes_sent[self._levels[peer]] += num_bytes


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
