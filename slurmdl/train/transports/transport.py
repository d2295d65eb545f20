"""Interface of the transports, and what those of real processes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from slurmdl.errors import TrainError
from slurmdl.train.transports.watchdog import StalledError, Watchdog
from slurmdl.train.transports.window import SharedMemory

#: bytes in one chunk of a streamed message. Small enough that processing one chunk overlaps with the transfer of the
#: next, large enough to hide the cost per message; Open MPI's eager limit is raised to it (world.init_mpi)
CHUNK_BYTES = 1 << 20
#: the same between zones over MPI: below Open MPI's default eager limit of 64 KiB, faster on shared slow links
MPI_INTER_ZONE_CHUNK_BYTES = 60_000


#: a communication algorithm as a coroutine: yields the requests that must complete before it can continue, and
#: whether they are the first of an exchange, so that waiting for them counts as waiting for the peer
CommCoroutine = Iterator[tuple[Sequence[Any], bool]]


class RankFailedError(TrainError):
    """Ranks have failed, and the surviving ranks know.

    Attributes:
        ranks: known failed ranks; () if this rank learned of the failure from another one.
        resumable: whether the run writes checkpoints, so that the job can be restarted.
        node_of_rank: node of each rank, failed or not; () if unknown.
    """

    def __init__(self, ranks: Sequence[int], message: str = "", resumable: bool = False,
                 node_of_rank: Sequence[str] = ()) -> None:
        super().__init__(message or f"rank {', '.join(map(str, ranks)) or 'unknown'} has failed")
        self.ranks, self.resumable, self.node_of_rank = tuple(ranks), resumable, tuple(node_of_rank)


class Transport(Protocol):
    """Point-to-point messages between `size` ranks, as seen from one. Arrays are contiguous numpy arrays of any type.

    Messages with the same tag between two ranks arrive in order. If the transport supports recovery, any method may
    raise RankFailedError after a rank failed, until the survivors call `agree`.

    Attributes:
        alive_ranks: ranks that have not failed, in order. Ranks keep their numbers.
        recovery_name: name of the recovery mechanism after rank failures; "" for none.
        supports_comm_thread: whether a second thread may make all calls (MPI_THREAD_SERIALIZED or better), one at a
            time.
        prefers_shared_memory: whether memory shared by the ranks of a node is faster than messages between them.
        inter_zone_chunk_bytes: bytes in one chunk of a streamed message between zones, see CHUNK_BYTES.
        watchdog: limits the time of waits; None for no limit.
        device_backends: type of a torch.device -> backend of torch.distributed for collectives of its tensors.
    """

    rank: int
    size: int
    alive_ranks: tuple[int, ...]
    recovery_name: str
    supports_comm_thread: bool
    prefers_shared_memory: bool
    inter_zone_chunk_bytes: int
    watchdog: Watchdog | None
    device_backends: Mapping[str, str]

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Start to send an array, which must not change until the returned request is complete."""

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Start to receive a message of the array's size; return a request."""

    def iprobe(self, tag: int) -> int | None:
        """Return a rank of which a message with this tag can be received, or None."""

    def testall(self, requests: Sequence[Any]) -> bool:
        """Make progress, and return whether all requests are complete."""

    def waitall(self, requests: Sequence[Any]) -> None:
        """Wait until all requests are complete; long waits sleep."""

    def wait_any_or_message(self, requests: Sequence[Any], tag: int) -> None:
        """Wait until a request is complete or a message with this tag can be received; long waits sleep."""

    def wait_any_group(self, groups: Sequence[Sequence[Any]], should_stop: Callable[[], bool]) -> int | None:
        """Wait until all requests of a group are complete, and return its index; long waits sleep.

        Return None if `should_stop`, which is polled, returns True first.
        """

    @property
    def start_coroutine(self) -> Callable[[CommCoroutine], Any] | None:
        """Function that runs a coroutine in a thread of its own; None if polling is as fast.

        It returns a request that is complete at the end of the coroutine.
        """

    def set_poll_hook(self, tag: int, hook: Callable[[], None]) -> None:
        """Call `hook` during all waits, repeatedly or when a message with this tag has arrived.

        The hook receives these messages, and must not wait for others.
        """

    def barrier(self, on_poll: Callable[[], None] | None = None) -> None:
        """Wait for all ranks, sleeping: a spinning barrier starves late ranks if ranks outnumber cores.

        `on_poll` may be called repeatedly, and raises if the barrier cannot complete.
        """

    def allocate_shared(self, ranks: Sequence[int], num_bytes: int) -> SharedMemory:
        """Allocate zeroed memory shared by ranks of one node, `num_bytes` each. Collective over these ranks.

        Raises TrainError if there is not enough memory, or if the ranks are on different nodes.
        """

    def close(self) -> None:
        """Release what the run needed; later messages cannot be probed for. Collective."""

    def now(self) -> float:
        """Seconds on this rank's clock."""

    def emulate_compute(self, seconds: float) -> None:
        """Spend time as a computation, but sleeping."""

    def agree(self, done: bool) -> bool:
        """Return on all alive ranks whether all are done and none has failed. Collective.

        If not, update `alive_ranks` and drop all messages sent before the call.
        """

    def allgather(self, obj: Any) -> list[Any]:
        """Gather small objects of all ranks, in rank order, None for failed ranks. Not for training data."""

    def gather(self, obj: Any) -> list[Any] | None:
        """Like `allgather`, but on the first alive rank only; None on the others."""

    def broadcast(self, obj: Any) -> Any:
        """Return the object of the first alive rank."""


class RealTimeRank:
    """A rank that is a process; see `transport.Transport`."""

    watchdog: Watchdog | None = None
    device_backends: Mapping[str, str] = MappingProxyType({})
    start_coroutine: Callable[[CommCoroutine], Any] | None = None

    def watch(self, watchdog: Watchdog, on_stall: Callable[[StalledError], None]) -> None:
        """Check all waits from now on.

        A wait that is too long raises StalledError; one inside another library calls `on_stall`, from a thread.
        """
        self.watchdog = watchdog

    def now(self) -> float:
        return time.perf_counter()

    def emulate_compute(self, seconds: float) -> None:
        time.sleep(seconds)

    def agree(self, done: bool) -> bool:
        return done
