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
ASKING = 1e-5
#: times that a rank asks in vain, one after the other, before it is looked whether there is anything to come
PATIENCE = 10_000


class Network(Protocol):
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

    what: str
    into: Any = None
    done: float = math.inf


class _Ended(BaseException):
    """Ends the threads of the other ranks when the run has failed."""


class Virtual:
    """One of the ranks of `run`; see `transport.Transport`.

    Attributes
    ----------
    clock : seconds since the start, as this rank sees it.
    """

    threaded, recovery = False, ""

    def __init__(self, rank: int, stage: _Stage) -> None:
        self.rank, self.size = rank, stage.size
        self.living = tuple(range(stage.size))
        self.clock = 0.0
        self._stage = stage
        self._mail: defaultdict[tuple[int, int], deque[tuple[float, Any]]] = defaultdict(deque)
        self._open: defaultdict[tuple[int, int], deque[Request]] = defaultdict(deque)
        self._gatherings = 0
        self.waits: Sequence[Request] = ()
        self._of: Callable[[Iterable[float]], float] = max
        self._looks_for: tuple[int, Request] | None = None
        #: an entry lets this rank go on; a queue in C wakes a thread sooner than a threading.Semaphore
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.ended = False
        self._asked, self._last_mail = 0, 0.0
        self._attended: tuple[int, Callable[[], None]] | None = None

    def now(self) -> float:
        return self.clock

    def compute(self, seconds: float) -> None:
        """Let time go by on the clock."""
        self._asked = 0
        self.clock += seconds
        self._stage.hand_on(self)

    def send(self, peer: int, array: Any, tag: int = 0) -> Request:
        self._asked = 0
        left, there = self._stage.arrival(self.rank, peer, array.nbytes, self.clock)
        self._stage.ranks[peer].deliver(self.rank, tag, array, there)
        return Request(f"its message to rank {peer}", done=left)

    def deliver(self, source: int, tag: int, array: Any, there: float) -> None:
        """Put a message of another rank where this one expects or will look for it."""
        self._last_mail = max(self._last_mail, there)
        waiting = self._open[source, tag]
        if waiting:
            request = waiting.popleft()
            _fill(request, array, there)
        else:
            self._mail[source, tag].append((there, array.copy()))
            if self._looks_for and self._looks_for[0] == tag:
                self._looks_for[1].done = min(self._looks_for[1].done, there)

    def receive(self, peer: int, array: Any, tag: int = 0) -> Request:
        request = Request(f"a message of rank {peer} with tag {tag}", into=array)
        mail = self._mail[peer, tag]
        if mail:
            there, message = mail.popleft()
            _fill(request, message, there)
        else:
            self._open[peer, tag].append(request)
        return request

    def probe(self, tag: int) -> int | None:
        found = [(mail[0][0], source) for (source, its), mail in self._mail.items() if its == tag and mail]
        if found and min(found)[0] <= self.clock:
            return min(found)[1]
        self._ask()
        return None

    def test(self, requests: Sequence[Request]) -> bool:
        if all(request.done <= self.clock for request in requests):
            return True
        self._ask()
        return False

    def _ask(self) -> None:
        """Let the others go on, if that can lead to anything."""
        self._asked += 1
        if self._asked % PATIENCE == 0 and all(its.idle() for its in self._stage.ranks):
            raise TrainError("no rank goes on: " + "; ".join(map(str, self._stage.ranks)))
        self.clock += ASKING
        self._stage.hand_on(self)

    def idle(self) -> bool:
        """Whether this rank does nothing but ask or wait for what is not on its way."""
        asks = self._asked >= PATIENCE and self.clock > self._last_mail
        return self.ended or asks or self.ready() == math.inf

    def wait(self, requests: Sequence[Request]) -> None:
        self._wait(requests, max)

    def first(self, requests: Sequence[Request], tag: int) -> None:
        there = [mail[0][0] for (_, its), mail in self._mail.items() if its == tag and mail]
        self._looks_for = tag, Request(f"any message with tag {tag}", done=min(there, default=math.inf))
        self._wait([*requests, self._looks_for[1]], min)
        self._looks_for = None

    def either(self, groups: Sequence[Sequence[Request]], stop: Callable[[], bool]) -> int | None:
        def done(group: Sequence[Request]) -> float:
            return max((request.done for request in group), default=self.clock)

        if not stop():
            self._wait([request for group in groups for request in group], lambda _: min(map(done, groups)))
        return next((number for number, group in enumerate(groups) if done(group) <= self.clock), None)

    def _wait(self, requests: Sequence[Request], of: Callable[[Iterable[float]], float]) -> None:
        self._asked = 0
        while True:
            self.waits, self._of = requests, of
            self._stage.hand_on(self)
            self.clock, self.waits = self.ready(), ()
            if not self._attended or not requests or self._done(requests) <= self.clock:
                return
            self._attended[1]()

    def _done(self, requests: Sequence[Request]) -> float:
        return self._of([request.done for request in requests])

    def attend(self, tag: int, come: Callable[[], None]) -> None:
        self._attended = tag, come

    def ready(self) -> float:
        """When this rank can go on; infinite as long as that is not known."""
        if not self.waits:
            return self.clock
        return max(self.clock, min(self._done(self.waits), self._called()))

    def _called(self) -> float:
        """When a message comes that is attended to while this rank waits; infinite where there is none."""
        if not self._attended:
            return math.inf
        return min((mail[0][0] for (_, tag), mail in self._mail.items() if tag == self._attended[0] and mail),
                   default=math.inf)

    def __str__(self) -> str:
        if self.ended:
            return f"rank {self.rank} has ended"
        if not self.waits:
            return f"rank {self.rank} asks in vain"
        return f"rank {self.rank} waits for " + next(its.what for its in self.waits if its.done == math.inf)

    def meet(self, watch: Callable[[], None] | None = None) -> None:
        self.allgather(None)

    def share(self, ranks: Sequence[int], size: int) -> Together:
        memory = self._stage.memories.setdefault(tuple(ranks), _Memory())
        memory.parts[self.rank] = np.zeros(size, np.uint8)
        if len(memory.parts) == len(ranks):
            del self._stage.memories[tuple(ranks)]
        its = Together(self, memory)
        its.until(lambda: len(memory.parts) == len(ranks), "the ranks that share memory")
        return its

    def total(self, array: Any) -> None:
        array[:] = np.sum(self.allgather(array), axis=0)

    def agree(self, done: bool) -> bool:
        return done

    def allgather(self, thing: Any) -> list[Any]:
        gathering = self._stage.gatherings[self._gatherings]
        self._gatherings += 1
        gathering.things[self.rank] = pickle.dumps(thing)
        gathering.latest = max(gathering.latest, self.clock)
        if len(gathering.things) == self.size:
            gathering.all.done = gathering.latest
        self.wait([gathering.all])
        return [pickle.loads(gathering.things[rank]) for rank in range(self.size)]

    def gather(self, thing: Any) -> list[Any] | None:
        found = self.allgather(thing)
        return found if self.rank == 0 else None

    def broadcast(self, thing: Any) -> Any:
        return self.allgather(thing if self.rank == 0 else None)[0]


def _fill(request: Request, message: Any, there: float) -> None:
    if message.nbytes != request.into.nbytes:
        raise TrainError(f"{request.what} has {message.nbytes} bytes where {request.into.nbytes} were expected")
    request.into.reshape(-1).view(np.uint8)[:] = message.reshape(-1).view(np.uint8)
    request.done = there


class Together:
    """One rank's sight of memory that virtual ranks share; see `window.Memory`."""

    def __init__(self, rank: Virtual, memory: _Memory) -> None:
        self._rank, self._memory = rank, memory
        self.fence()

    def part(self, rank: int) -> npt.NDArray[np.uint8]:
        return self._memory.parts[rank]

    def fence(self) -> None:
        for request, true in [(request, true) for request, true in self._memory.waiting if true()]:
            request.done = self._rank.clock
            self._memory.waiting.remove((request, true))

    def until(self, true: Callable[[], bool], what: str) -> None:
        if not true():
            request = Request(what)
            self._memory.waiting.append((request, true))
            self._rank.wait([request])

    def close(self) -> None:
        """The parts go with those who hold them."""


@dataclass
class _Memory:
    """The parts of the ranks, and what ranks wait for that do not yet see it there."""

    parts: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    waiting: list[tuple[Request, Callable[[], bool]]] = field(default_factory=list)


@dataclass
class _Gathering:
    """What ranks have given so far, and a request that is done when all have."""

    things: dict[int, bytes] = field(default_factory=dict)
    latest: float = 0.0
    all: Request = field(default_factory=lambda: Request("all ranks to meet"))


class _Stage:
    """All ranks, and whose turn it is."""

    def __init__(self, size: int, network: Network | None) -> None:
        self.size = size
        self.ranks = [Virtual(rank, self) for rank in range(size)]
        self.failure: BaseException | None = None
        self._network = network
        self.gatherings: defaultdict[int, _Gathering] = defaultdict(_Gathering)
        self.memories: dict[tuple[int, ...], _Memory] = {}

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        return self._network.arrival(source, target, size, clock) if self._network else (clock, clock)

    def hand_on(self, rank: Virtual) -> None:
        """Let that rank go on which can do so first, and return when it is `rank`'s turn again."""
        if not self.failure:
            following = self._following()
            if following is not rank:
                following.turn.put(None)
                rank.turn.get()
        if self.failure:
            raise _Ended

    def play(self, rank: Virtual, program: Callable[[], None]) -> None:
        """The life of a rank's thread."""
        rank.turn.get()
        try:
            if not self.failure:
                program()
            rank.ended = True
            if not (self.failure or all(its.ended for its in self.ranks)):
                self._following().turn.put(None)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End all ranks, for the reason that was given first."""
        if self.failure is None:
            self.failure = error
            for its in self.ranks:
                its.turn.put(None)

    def _following(self) -> Virtual:
        going, soonest = None, math.inf
        for rank in self.ranks:
            ready = math.inf if rank.ended else rank.ready()
            if ready < soonest:
                going, soonest = rank, ready
        if going is None:
            raise TrainError("deadlock: " + "; ".join(map(str, self.ranks)))
        return going


def run(count: int, program: Callable[[Virtual], Result], network: Network | None = None) -> list[Result]:
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
    stage = _Stage(count, network)
    results: dict[int, Result] = {}

    def begin(rank: Virtual) -> threading.Thread:
        def live() -> None:
            results[rank.rank] = program(rank)
        return threading.Thread(target=stage.play, args=(rank, live), name=f"rank {rank.rank}", daemon=True)

    threads = [begin(rank) for rank in stage.ranks]
    for thread in threads:
        thread.start()
    stage.ranks[0].turn.put(None)
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        stage.fail(error)
        raise
    if stage.failure:
        raise stage.failure
    return [results[rank] for rank in range(count)]
