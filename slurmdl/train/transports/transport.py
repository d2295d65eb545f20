"""What every transport offers to the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slurmdl.errors import TrainError
from slurmdl.train.transports.window import SharedMemory


class RankFailedError(TrainError):
    """Ranks have ended before their time, and those that live have learnt of it.

    Attributes
    ----------
    ranks : those known to be lost; the rank that says so may have learnt it from another, and know of none.
    kept : whether a checkpoint is made of the run now and then, so that the job may be started again.
    """

    def __init__(self, ranks: Sequence[int], message: str = "", resumable: bool = False) -> None:
        super().__init__(message or f"rank {', '.join(map(str, ranks)) or 'unknown'} is lost")
        self.ranks, self.resumable = tuple(ranks), resumable


class Transport(Protocol):
    """Messages between `size` ranks, seen from one of them. Arrays are contiguous numpy arrays of any type.

    Messages of one tag between the same two ranks arrive in the order in which they were sent. Where a rank may be
    lost without the others, all that waits, asks, sends or receives may raise LostRank, until the others `agree`.

    Attributes
    ----------
    living : ranks that are not lost, in their order. A rank keeps its number.
    recovery : what the others can do where a rank is lost, in words; "" where that is nothing but to end.
    threaded : whether a thread of its own may make all calls (MPI_THREAD_SERIALIZED or better). Never two at once.
    """

    rank: int
    size: int
    alive_ranks: tuple[int, ...]
    recovery_name: str
    supports_comm_thread: bool

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Begin to send an array, which must stay as it is until the returned request is done."""

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Begin to receive into an array, exactly filled by the message; returns a request."""

    def iprobe(self, tag: int) -> int | None:
        """A rank of which a message with this tag is waiting to be received, None where there is none."""

    def testall(self, requests: Sequence[Any]) -> bool:
        """Whether all these requests are done; helps them on."""

    def waitall(self, requests: Sequence[Any]) -> None:
        """Return when all these requests are done, asleep where it takes long."""

    def wait_any_or_message(self, requests: Sequence[Any], tag: int) -> None:
        """Return when one of these requests is done, or a message with this tag is waiting; asleep as in `wait`."""

    def wait_any_group(self, groups: Sequence[Sequence[Any]], should_stop: Callable[[], bool]) -> int | None:
        """Index of the first group of requests that are all done, once there is one; asleep as in `wait`.

        None where `stop`, which is asked again and again while this waits.
        """

    def set_poll_hook(self, tag: int, hook: Callable[[], None]) -> None:
        """Call this from now on while this rank waits for something: again and again, or where a message with this
        tag is there. For what others may ask at any time; it reads these messages, and waits for no others.
        """

    def barrier(self, on_poll: Callable[[], None] | None = None) -> None:
        """Wait for all ranks, asleep: where ranks outnumber cores, a barrier that spins starves the late ones.

        While it waits it may call `watch` again and again, which raises where nobody will come.
        """

    def allocate_shared(self, ranks: Sequence[int], num_bytes: int) -> SharedMemory:
        """Memory into which each of these ranks, all on one node, brings `size` bytes, all 0; a call of all of them.

        Raises
        ------
        TrainError : there is not as much, or they are on different nodes.
        """

    def now(self) -> float:
        """Seconds on this rank's clock."""

    def emulate_compute(self, seconds: float) -> None:
        """Spend time as a computation would, but asleep."""

    def allreduce(self, array: Any) -> None:
        """Replace an array of float32 by its sum over all ranks, as the library sees fit."""

    def agree(self, done: bool) -> bool:
        """Whether all living ranks say that they are done and none is lost: the same answer on all; a call of all.

        Where not, `living` are those that are left, and no message from before arrives any more.
        """

    def allgather(self, obj: Any) -> list[Any]:
        """What every rank gives, in rank order, None for those that are lost.

        For a few bytes at start and end, never for training data.
        """

    def gather(self, obj: Any) -> list[Any] | None:
        """As `allgather`, for the first living rank alone; None on the others."""

    def broadcast(self, obj: Any) -> Any:
        """What rank 0 gives."""
