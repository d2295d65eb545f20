"""Virtual ranks: a whole run in one process, always the same, on a clock of its own.

Each rank is a thread, of which one runs at a time: the rank whose clock is behind all others goes on, the lowest rank
where clocks are equal. It hands on where it waits, computes, or asks in vain. So strategies in which nobody waits for
anybody can be repeated exactly, too.
"""

from __future__ import annotations

import math
import pickle
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError

Result = TypeVar("Result")

#: seconds on the clock that it costs to ask for a message that is not there
POLL_COST_SECONDS = 1e-5
#: times that a rank asks in vain, one after the other, before it is looked whether there is anything to come
MAX_IDLE_POLLS = 10_000


class NetworkModel(Protocol):
    """How long messages take."""

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        """When a message of `size` bytes, sent at `clock`, has left its sender, and when it is there."""


@dataclass
class Request:
    """Something that a rank may wait for.

    Attributes
    ----------
    what : in words.
    into : the array to be filled, None for a send.
    done : time on the clock at which it is done; infinite as long as that is not known.
    """

    description: str
    buffer: Any = None
    done_at: float = math.inf


class _RunAborted(BaseException):
    """Ends the threads of the other ranks when the run has failed."""


class VirtualTransport:
    """One of the ranks of `run`; see `transport.Transport`.

    Attributes
    ----------
    clock : seconds since the start, as this rank sees it.
    """

    supports_comm_thread, recovery_name = False, ""

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
        self._message_wait: tuple[int, Request] | None = None
        #: an entry lets this rank go on; a queue in C wakes a thread sooner than a threading.Semaphore
        self.wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.has_ended = False
        self._idle_polls, self._last_arrival = 0, 0.0
        self._poll_hook: tuple[int, Callable[[], None]] | None = None

    def now(self) -> float:
        return self.clock

    def emulate_compute(self, seconds: float) -> None:
        """Let time go by on the clock."""
        self._idle_polls = 0
        self.clock += seconds
        self._scheduler.yield_turn(self)

    def isend(self, peer: int, array: Any, tag: int = 0) -> Request:
        self._idle_polls = 0
        left, there = self._scheduler.arrival(self.rank, peer, array.nbytes, self.clock)
        self._scheduler.ranks[peer].deliver(self.rank, tag, array, there)
        return Request(f"its message to rank {peer}", done_at=left)

    def deliver(self, source: int, tag: int, array: Any, arrives_at: float) -> None:
        """Put a message of another rank where this one expects or will look for it."""
        self._last_arrival = max(self._last_arrival, arrives_at)
        waiting = self._posted_receives[source, tag]
        if waiting:
            request = waiting.popleft()
            _complete_receive(request, array, arrives_at)
        else:
            self._inbox[source, tag].append((arrives_at, array.copy()))
            if self._message_wait and self._message_wait[0] == tag:
                self._message_wait[1].done_at = min(self._message_wait[1].done_at, arrives_at)

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Request:
        request = Request(f"a message of rank {peer} with tag {tag}", buffer=array)
        mail = self._inbox[peer, tag]
        if mail:
            there, message = mail.popleft()
            _complete_receive(request, message, there)
        else:
            self._posted_receives[peer, tag].append(request)
        return request

    def iprobe(self, tag: int) -> int | None:
        found = [(mail[0][0], source) for (source, its), mail in self._inbox.items() if its == tag and mail]
        if found and min(found)[0] <= self.clock:
            return min(found)[1]
        self._count_idle_poll()
        return None

    def testall(self, requests: Sequence[Request]) -> bool:
        if all(request.done_at <= self.clock for request in requests):
            return True
        self._count_idle_poll()
        return False

    def _count_idle_poll(self) -> None:
        """Let the others go on, if that can lead to anything."""
        self._idle_polls += 1
        if self._idle_polls % MAX_IDLE_POLLS == 0 and all(its.is_idle() for its in self._scheduler.ranks):
            raise TrainError("no rank goes on: " + "; ".join(map(str, self._scheduler.ranks)))
        self.clock += POLL_COST_SECONDS
        self._scheduler.yield_turn(self)

    def is_idle(self) -> bool:
        """Whether this rank does nothing but ask or wait for what is not on its way."""
        asks = self._idle_polls >= MAX_IDLE_POLLS and self.clock > self._last_arrival
        return self.has_ended or asks or self.next_event_time() == math.inf

    def waitall(self, requests: Sequence[Request]) -> None:
        self._block_until_done(requests, max)

    def wait_any_or_message(self, requests: Sequence[Request], tag: int) -> None:
        there = [mail[0][0] for (_, its), mail in self._inbox.items() if its == tag and mail]
        self._message_wait = tag, Request(f"any message with tag {tag}", done_at=min(there, default=math.inf))
        self._block_until_done([*requests, self._message_wait[1]], min)
        self._message_wait = None

    def wait_any_group(self, groups: Sequence[Sequence[Request]], should_stop: Callable[[], bool]) -> int | None:
        def done(group: Sequence[Request]) -> float:
            return max((request.done_at for request in group), default=self.clock)

        if not should_stop():
            self._block_until_done([request for group in groups for request in group],
                                   lambda _: min(map(done, groups)))
        return next((number for number, group in enumerate(groups) if done(group) <= self.clock), None)

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
        """When this rank can go on; infinite as long as that is not known."""
        if not self.pending_requests:
            return self.clock
        return max(self.clock, min(self._done_time(self.pending_requests), self._hook_message_time()))

    def _hook_message_time(self) -> float:
        """When a message comes that is attended to while this rank waits; infinite where there is none."""
        if not self._poll_hook:
            return math.inf
        return min((mail[0][0] for (_, tag), mail in self._inbox.items() if tag == self._poll_hook[0] and mail),
                   default=math.inf)

    def __str__(self) -> str:
        if self.has_ended:
            return f"rank {self.rank} has ended"
        if not self.pending_requests:
            return f"rank {self.rank} asks in vain"
        return f"rank {self.rank} waits for " + \
            next(its.description for its in self.pending_requests if its.done_at == math.inf)

    def barrier(self, on_poll: Callable[[], None] | None = None) -> None:
        self.allgather(None)

    def allocate_shared(self, ranks: Sequence[int], num_bytes: int) -> VirtualSharedMemory:
        memory = self._scheduler.shared_segments.setdefault(tuple(ranks), _Segments())
        memory.by_rank[self.rank] = np.zeros(num_bytes, np.uint8)
        if len(memory.by_rank) == len(ranks):
            del self._scheduler.shared_segments[tuple(ranks)]
        its = VirtualSharedMemory(self, memory)
        its.wait_until(lambda: len(memory.by_rank) == len(ranks), "the ranks that share memory")
        return its

    def allreduce(self, array: Any) -> None:
        array[:] = np.sum(self.allgather(array), axis=0)

    def agree(self, done: bool) -> bool:
        return done

    def allgather(self, obj: Any) -> list[Any]:
        gathering = self._scheduler.pending_allgathers[self._allgather_count]
        self._allgather_count += 1
        gathering.pickled[self.rank] = pickle.dumps(obj)
        gathering.latest_clock = max(gathering.latest_clock, self.clock)
        if len(gathering.pickled) == self.size:
            gathering.all_arrived.done_at = gathering.latest_clock
        self.waitall([gathering.all_arrived])
        return [pickle.loads(gathering.pickled[rank]) for rank in range(self.size)]

    def gather(self, obj: Any) -> list[Any] | None:
        found = self.allgather(obj)
        return found if self.rank == 0 else None

    def broadcast(self, obj: Any) -> Any:
        return self.allgather(obj if self.rank == 0 else None)[0]


def _complete_receive(request: Request, message: Any, arrives_at: float) -> None:
    if message.nbytes != request.buffer.nbytes:
        raise TrainError(
            f"{request.description} has {message.nbytes} bytes where {request.buffer.nbytes} were expected")
    request.buffer.reshape(-1).view(np.uint8)[:] = message.reshape(-1).view(np.uint8)
    request.done_at = arrives_at


class VirtualSharedMemory:
    """One rank's sight of memory that virtual ranks share; see `window.Memory`."""

    def __init__(self, transport: VirtualTransport, segments: _Segments) -> None:
        self._transport, self._segments = transport, segments
        self.fence()

    def segment(self, rank: int) -> npt.NDArray[np.uint8]:
        return self._segments.by_rank[rank]

    def fence(self) -> None:
        for request, true in [(request, true) for request, true in self._segments.waiters if true()]:
            request.done_at = self._transport.clock
            self._segments.waiters.remove((request, true))

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        if not condition():
            request = Request(description)
            self._segments.waiters.append((request, condition))
            self._transport.waitall([request])

    def close(self) -> None:
        """The parts go with those who hold them."""


@dataclass
class _Segments:
    """The parts of the ranks, and what ranks wait for that do not yet see it there."""

    by_rank: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    waiters: list[tuple[Request, Callable[[], bool]]] = field(default_factory=list)


@dataclass
class _PendingAllgather:
    """What ranks have given so far, and a request that is done when all have."""

    pickled: dict[int, bytes] = field(default_factory=dict)
    latest_clock: float = 0.0
    all_arrived: Request = field(default_factory=lambda: Request("all ranks to meet"))


class _Scheduler:
    """All ranks, and whose turn it is."""

    def __init__(self, size: int, network: NetworkModel | None) -> None:
        self.size = size
        self.ranks = [VirtualTransport(rank, self) for rank in range(size)]
        self.failure: BaseException | None = None
        self._network = network
        self.pending_allgathers: defaultdict[int, _PendingAllgather] = defaultdict(_PendingAllgather)
        self.shared_segments: dict[tuple[int, ...], _Segments] = {}

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        return self._network.arrival(source, target, size, clock) if self._network else (clock, clock)

    def yield_turn(self, rank: VirtualTransport) -> None:
        """Let that rank go on which can do so first, and return when it is `rank`'s turn again."""
        if not self.failure:
            following = self._next_rank()
            if following is not rank:
                following.wakeup.put(None)
                rank.wakeup.get()
        if self.failure:
            raise _RunAborted

    def run_rank_thread(self, rank: VirtualTransport, program: Callable[[], None]) -> None:
        """The life of a rank's thread."""
        rank.wakeup.get()
        try:
            if not self.failure:
                program()
            rank.has_ended = True
            if not (self.failure or all(its.has_ended for its in self.ranks)):
                self._next_rank().wakeup.put(None)
        except BaseException as error:
            self.abort(error)

    def abort(self, error: BaseException) -> None:
        """End all ranks, for the reason that was given first."""
        if self.failure is None:
            self.failure = error
            for its in self.ranks:
                its.wakeup.put(None)

    def _next_rank(self) -> VirtualTransport:
        going, soonest = None, math.inf
        for rank in self.ranks:
            ready = math.inf if rank.has_ended else rank.next_event_time()
            if ready < soonest:
                going, soonest = rank, ready
        if going is None:
            raise TrainError("deadlock: " + "; ".join(map(str, self.ranks)))
        return going


def run_virtual_ranks(count: int, program: Callable[[VirtualTransport], Result],
                      network: NetworkModel | None = None) -> list[Result]:
    """What a program returns in each of `count` virtual ranks, in rank order.

    Parameters
    ----------
    program : called once per rank, with its transport. What computes calls `Virtual.compute`; a rank that neither
        computes nor waits keeps the others from going on.
    network : how long messages take; None where they take no time.

    Raises
    ------
    TrainError : no rank can go on; the message names what each of them waits for.
    BaseException : what the first rank that failed has raised.
    """
    stage = _Scheduler(count, network)
    results: dict[int, Result] = {}

    def begin(rank: VirtualTransport) -> threading.Thread:
        def live() -> None:
            results[rank.rank] = program(rank)
        return threading.Thread(target=stage.run_rank_thread, args=(
            rank, live), name=f"rank {rank.rank}", daemon=True)

    threads = [begin(rank) for rank in stage.ranks]
    for thread in threads:
        thread.start()
    stage.ranks[0].wakeup.put(None)
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        stage.abort(error)
        raise
    if stage.failure:
        raise stage.failure
    return [results[rank] for rank in range(count)]
