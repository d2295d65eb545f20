"""Virtual ranks: all ranks of a run in one process, deterministic, on virtual clocks.

Each rank is a thread, and one runs at a time: the rank whose clock is earliest, or the lowest of several. It yields
when it waits, computes, or polls without success. So asynchronous strategies are reproducible.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.transports.transport import MPI_INTER_ZONE_CHUNK_BYTES, Watchdog, decode_object, encode_object

Result = TypeVar("Result")

#: virtual seconds of a poll without success
POLL_COST_SECONDS = 1e-5
#: consecutive polls without success after which the scheduler checks for a livelock
MAX_IDLE_POLLS = 10_000


class NetworkModel(Protocol):
    """Times of messages."""

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        """Return when a message of `size` bytes, sent at `clock`, has left its sender, and when it arrives."""


@dataclass
class Request:
    """An event that a rank can wait for.

    Attributes:
        description: for error messages.
        buffer: the array to fill, None for a send.
        done_at: virtual time of completion; infinite while unknown.
    """

    description: str
    buffer: Any = None
    done_at: float = math.inf


class _RunAborted(BaseException):
    """Ends the threads of the other ranks when the run has failed."""


class VirtualTransport:
    """A virtual rank; see `transport.Transport`.

    Attributes:
        clock: the rank's virtual seconds since the start.
    """

    supports_comm_thread, prefers_shared_memory, recovery_name = False, True, ""
    start_coroutine = None
    inter_zone_chunk_bytes = MPI_INTER_ZONE_CHUNK_BYTES
    watchdog: Watchdog | None = None
    device_backends: Mapping[str, str] = MappingProxyType({})

    def __init__(self, rank: int, scheduler: _Scheduler) -> None:
        self.rank, self.size = rank, scheduler.size
        self.alive_ranks = tuple(range(scheduler.size))
        self.clock = 0.0
        self._scheduler = scheduler
        self._inbox: defaultdict[tuple[int, int], deque[tuple[float, Any]]] = defaultdict(deque)
        self._posted_receives: defaultdict[tuple[int, int], deque[Request]] = defaultdict(deque)
        self._allgather_count = 0
        self.pending_requests: Sequence[Request] = ()
        self._combine_times: Callable[[Iterable[float]], float] = max
        #: an entry resumes this rank; SimpleQueue wakes a thread faster than threading.Semaphore
        self.wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.has_ended = False
        self._idle_polls, self._last_arrival = 0, 0.0
        self._poll_hook: tuple[int, Callable[[], None]] | None = None

    def close(self) -> None:
        """Nothing remains of virtual messages."""

    def now(self) -> float:
        return self.clock

    def emulate_compute(self, seconds: float) -> None:
        self._idle_polls = 0
        self.clock += seconds
        self._scheduler.yield_turn(self)

    def isend(self, peer: int, array: Any, tag: int = 0) -> Request:
        self._idle_polls = 0
        sent_at, arrives_at = self._scheduler.arrival(self.rank, peer, array.nbytes, self.clock)
        self._scheduler.ranks[peer].deliver(self.rank, tag, array, arrives_at)
        return Request(f"its message to rank {peer}", done_at=sent_at)

    def deliver(self, source: int, tag: int, array: Any, arrives_at: float) -> None:
        """Complete a posted receive, or put the message into the inbox."""
        self._last_arrival = max(self._last_arrival, arrives_at)
        receives = self._posted_receives[source, tag]
        if receives:
            _complete_receive(receives.popleft(), array, arrives_at)
        else:
            self._inbox[source, tag].append((arrives_at, array.copy()))

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Request:
        request = Request(f"a message of rank {peer} with tag {tag}", buffer=array)
        messages = self._inbox[peer, tag]
        if messages:
            arrives_at, message = messages.popleft()
            _complete_receive(request, message, arrives_at)
        else:
            self._posted_receives[peer, tag].append(request)
        return request

    def _first_arrival(self, tag: int) -> tuple[float, int]:
        """Time and source of the first message with a tag; the time is infinite if there is none."""
        return min(((messages[0][0], source) for (source, message_tag), messages in self._inbox.items()
                    if message_tag == tag and messages), default=(math.inf, -1))

    def iprobe(self, tag: int) -> int | None:
        arrives_at, source = self._first_arrival(tag)
        if arrives_at <= self.clock:
            return source
        self._count_idle_poll()
        return None

    def testall(self, requests: Sequence[Request]) -> bool:
        if all(request.done_at <= self.clock for request in requests):
            return True
        self._count_idle_poll()
        return False

    def _count_idle_poll(self) -> None:
        """Yield to the other ranks; raise if none can make progress."""
        self._idle_polls += 1
        if self._idle_polls % MAX_IDLE_POLLS == 0 and all(rank.is_idle() for rank in self._scheduler.ranks):
            raise TrainError("livelock: " + "; ".join(map(str, self._scheduler.ranks)))
        self.clock += POLL_COST_SECONDS
        self._scheduler.yield_turn(self)

    def is_idle(self) -> bool:
        """Whether this rank only polls or waits for events that are not in flight."""
        polls = self._idle_polls >= MAX_IDLE_POLLS and self.clock > self._last_arrival
        return polls or self.next_event_time() == math.inf

    def waitall(self, requests: Sequence[Request]) -> None:
        self._block_until_done(requests, max)

    def wait_any_or_message(self, requests: Sequence[Request], tag: int) -> None:
        self._block_until_done([*requests, Request(f"any message with tag {tag}")],
                               lambda times: min(*times, self._first_arrival(tag)[0]))

    def wait_any_group(self, groups: Sequence[Sequence[Request]], should_stop: Callable[[], bool]) -> int | None:
        def done_time(group: Sequence[Request]) -> float:
            return max((request.done_at for request in group), default=self.clock)

        if not should_stop():
            self._block_until_done([request for group in groups for request in group],
                                   lambda _: min(map(done_time, groups)))
        return next((index for index, group in enumerate(groups) if done_time(group) <= self.clock), None)

    def _block_until_done(self, requests: Sequence[Request],
                          combine_times: Callable[[Iterable[float]], float]) -> None:
        self._idle_polls = 0
        while True:
            self.pending_requests, self._combine_times = requests, combine_times
            self._scheduler.yield_turn(self)
            self.clock, self.pending_requests = self.next_event_time(), ()
            if not self._poll_hook or not requests or self._done_time(requests) <= self.clock:
                return
            self._poll_hook[1]()

    def _done_time(self, requests: Sequence[Request]) -> float:
        return self._combine_times([request.done_at for request in requests])

    def set_poll_hook(self, tag: int, hook: Callable[[], None]) -> None:
        self._poll_hook = tag, hook

    def next_event_time(self) -> float:
        """Time at which this rank can continue; infinite while unknown, and after its end."""
        if not self.pending_requests:
            return math.inf if self.has_ended else self.clock
        hook_time = self._first_arrival(self._poll_hook[0])[0] if self._poll_hook else math.inf
        return max(self.clock, min(self._done_time(self.pending_requests), hook_time))

    def __str__(self) -> str:
        if self.has_ended:
            return f"rank {self.rank} has ended"
        if not self.pending_requests:
            return f"rank {self.rank} polls without success"
        return f"rank {self.rank} waits for " + \
            next(request.description for request in self.pending_requests if request.done_at == math.inf)

    def barrier(self, on_poll: Callable[[], None] | None = None) -> None:
        self.allgather(None)

    def allocate_shared(self, ranks: Sequence[int], num_bytes: int) -> VirtualSharedMemory:
        segments = self._scheduler.shared_segments.setdefault(tuple(ranks), _Segments())
        segments.by_rank[self.rank] = np.zeros(num_bytes, np.uint8)
        if len(segments.by_rank) == len(ranks):
            del self._scheduler.shared_segments[tuple(ranks)]
        memory = VirtualSharedMemory(self, segments)
        memory.wait_until(lambda: len(segments.by_rank) == len(ranks), "the ranks that share memory")
        return memory

    def agree(self, done: bool) -> bool:
        return done

    def allgather(self, obj: Any) -> list[Any]:
        pending = self._scheduler.pending_allgathers[self._allgather_count]
        self._allgather_count += 1
        pending.arrivals[self.rank] = self.clock, encode_object(obj)
        if len(pending.arrivals) == self.size:
            pending.all_arrived.done_at = max(clock for clock, _ in pending.arrivals.values())
        self.waitall([pending.all_arrived])
        return [decode_object(pending.arrivals[rank][1]) for rank in range(self.size)]

    def gather(self, obj: Any) -> list[Any] | None:
        objects = self.allgather(obj)
        return objects if self.rank == 0 else None

    def broadcast(self, obj: Any) -> Any:
        return self.allgather(obj if self.rank == 0 else None)[0]


def _complete_receive(request: Request, message: Any, arrives_at: float) -> None:
    if message.nbytes != request.buffer.nbytes:
        raise TrainError(f"{request.description}: {message.nbytes} bytes; expected {request.buffer.nbytes}")
    request.buffer.reshape(-1).view(np.uint8)[:] = message.reshape(-1).view(np.uint8)
    request.done_at = arrives_at


class VirtualSharedMemory:
    """A virtual rank's view of shared memory; see `window.SharedMemory`."""

    def __init__(self, transport: VirtualTransport, segments: _Segments) -> None:
        self._transport, self._segments = transport, segments
        self.fence()

    def segment(self, rank: int) -> npt.NDArray[np.uint8]:
        return self._segments.by_rank[rank]

    def fence(self) -> None:
        for waiter in [waiter for waiter in self._segments.waiters if waiter[1]()]:
            waiter[0].done_at = self._transport.clock
            self._segments.waiters.remove(waiter)

    def request(self, condition: Callable[[], bool], description: str) -> Request:
        request = Request(description)
        if condition():
            request.done_at = self._transport.clock
        else:
            self._segments.waiters.append((request, condition))
        return request

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        self._transport.waitall([self.request(condition, description)])

    def close(self) -> None:
        """Do nothing: the segments are garbage-collected."""


@dataclass
class _Segments:
    """Segments of the ranks, and requests that wait for a condition on them."""

    by_rank: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    waiters: list[tuple[Request, Callable[[], bool]]] = field(default_factory=list)


@dataclass
class _PendingAllgather:
    """Time and encoded object of each rank so far, and a request that completes when all have arrived."""

    arrivals: dict[int, tuple[float, bytes]] = field(default_factory=dict)
    all_arrived: Request = field(default_factory=lambda: Request("an allgather of all ranks"))


class _Scheduler:
    """Runs one rank at a time."""

    def __init__(self, size: int, network: NetworkModel | None) -> None:
        self.size = size
        self.ranks = [VirtualTransport(rank, self) for rank in range(size)]
        self.results: dict[int, Any] = {}
        self.failure: BaseException | None = None
        self._network = network
        self.pending_allgathers: defaultdict[int, _PendingAllgather] = defaultdict(_PendingAllgather)
        self.shared_segments: dict[tuple[int, ...], _Segments] = {}

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        return self._network.arrival(source, target, size, clock) if self._network else (clock, clock)

    def yield_turn(self, rank: VirtualTransport) -> None:
        """Resume the next rank, and return when it is this rank's turn again."""
        if not self.failure:
            next_rank = self._next_rank()
            if next_rank is not rank:
                next_rank.wakeup.put(None)
                rank.wakeup.get()
        if self.failure:
            raise _RunAborted

    def run_rank_thread(self, rank: VirtualTransport, program: Callable[[VirtualTransport], Any]) -> None:
        """Target of a rank's thread; stores the result of `program`."""
        rank.wakeup.get()
        try:
            if not self.failure:
                self.results[rank.rank] = program(rank)
            rank.has_ended = True
            if not (self.failure or all(other.has_ended for other in self.ranks)):
                self._next_rank().wakeup.put(None)
        except BaseException as error:
            self.abort(error)

    def abort(self, error: BaseException) -> None:
        """End all ranks; the first error counts."""
        if self.failure is None:
            self.failure = error
            for rank in self.ranks:
                rank.wakeup.put(None)

    def _next_rank(self) -> VirtualTransport:
        earliest = min(self.ranks, key=VirtualTransport.next_event_time)
        if earliest.next_event_time() == math.inf:
            raise TrainError("deadlock: " + "; ".join(map(str, self.ranks)))
        return earliest


def run_virtual_ranks(count: int, program: Callable[[VirtualTransport], Result],
                      network: NetworkModel | None = None) -> list[Result]:
    """Run `program(transport)` in each of `count` virtual ranks; return the results in rank order.

    Raises TrainError for a deadlock, with the event that each rank waits for, or the error of the first rank that
    failed.

    Args:
        program: calls Transport.emulate_compute for its computation; a rank that neither computes nor waits blocks
            the others.
        network: None if messages take no time.
    """
    scheduler = _Scheduler(count, network)
    threads = [threading.Thread(target=scheduler.run_rank_thread, args=(rank, program), name=f"rank {rank.rank}",
                                daemon=True) for rank in scheduler.ranks]
    for thread in threads:
        thread.start()
    scheduler.ranks[0].wakeup.put(None)
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        scheduler.abort(error)
        raise
    if scheduler.failure:
        raise scheduler.failure
    return [scheduler.results[rank] for rank in range(count)]


@dataclass(frozen=True)
class Link:
    """Bandwidth in bytes/s, and latency in s."""

    bandwidth: float
    latency: float = 0.0


class QueueingNetwork:
    """Network of a virtual run; see virtual.NetworkModel.

    A message to another zone passes the uplinks of both zones; a message to another node of the zone, the links of
    both nodes. Each direction of a link carries messages one at a time, in the order of sending. Messages within a
    node do not queue.

    Args:
        nodes, zones: entry i belongs to rank i.
        links: locality level, one of p2p.LOCALITY_LEVELS -> link; messages of other levels take no time.
    """

    def __init__(self, nodes: Sequence[str], zones: Sequence[str], links: Mapping[str, Link]) -> None:
        self._locations_by_level = {"inter_zone": tuple(zones), "intra_zone": tuple(nodes)}
        self._links = links
        self._free_at: defaultdict[tuple[str, str, str], float] = defaultdict(float)

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        level = next((level for level, locations in self._locations_by_level.items()
                      if locations[source] != locations[target]), "intra_node")
        link = self._links.get(level)
        if link is None:
            return clock, clock
        duration = size / link.bandwidth
        if level == "intra_node":
            return clock + duration, clock + duration + link.latency
        outgoing = level, self._locations_by_level[level][source], "out"
        incoming = level, self._locations_by_level[level][target], "in"
        sent_at = max(clock, self._free_at[outgoing]) + duration
        self._free_at[outgoing] = sent_at
        # queue behind messages that are still arriving at the target
        arrives_at = max(sent_at - duration + link.latency, self._free_at[incoming]) + duration
        self._free_at[incoming] = arrives_at
        return sent_at, arrives_at
