"""Models in memory that the ranks of a node share: each is read where it lies.

Ranks that wait for each other keep their models in it, and tell each other when they may be touched. For those that
do not, each rank has two slots, for versions of its model by turns, and a stamp for each of them: 2 v + 1 while
version v is being written, 2 v + 2 when it is whole (a sequence lock). A reader that finds another stamp after it has
read than before has read halves of two versions, and reads again.

References
----------
T. Hoefler et al.: MPI + MPI: a new hybrid approach to parallel programming with MPI plus shared memory. Computing 95
(2013). doi:10.1007/s00607-013-0324-2
C. Lameter: Effective synchronization on Linux/NUMA systems. Gelato 2005 (sequence locks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

#: bytes of a cache line, so that ranks that look at different words do not disturb each other
_CACHE_LINE_BYTES = 64
#: elements that are mixed at a time, so that what is between stays in the cache (256 KiB)
_MIX_BLOCK = 1 << 16
#: times that a model is read anew before it is left for the next step
MAX_SEQLOCK_RETRIES = 3


class SharedMemory(Protocol):
    """Memory that some ranks share; see transport.Transport.share. Stores of one rank are seen in their order."""

    def segment(self, rank: int) -> npt.NDArray[np.uint8]:
        """The bytes that a rank has brought in."""

    def fence(self) -> None:
        """What this rank has stored is there for the others from now on, and what they have stored for this one."""

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        """Return when something is true that another rank's stores make true, asleep where it takes long.

        `what` says in words what is waited for.
        """

    def close(self) -> None:
        """Give the memory back; a call of all ranks that share it, after which nobody may use it."""


class ModelWindow:
    """The models of the ranks of a node.

    Parameters
    ----------
    share : Transport.share.
    ranks : those of the node, this one among them; a call of all of them.
    size : elements of a model.

    Attributes
    ----------
    common : shape (size,), a vector in which all of them read and write; the first of them has brought it in.
    """

    def __init__(self, allocate_shared: Callable[[Sequence[int], int], SharedMemory], rank: int, ranks: Sequence[int],
                 size: int) -> None:
        self._rank, self._ranks = rank, tuple(ranks)
        # slots begin at pages
        self._slot_bytes = -(-4 * size // 4096) * 4096
        self._memory = allocate_shared(ranks, 4096 + (3 if rank == ranks[0] else 2) * self._slot_bytes)
        self._control_words = {
    peer: self._memory.segment(peer)[
        :8 *
        _CACHE_LINE_BYTES].view(
            np.int64)[
                ::_CACHE_LINE_BYTES //
                 8] for peer in ranks}
        self._slots = {peer: [self._slot_view(peer, slot, size) for slot in range(2)] for peer in ranks}
        self.node_mean = self._slot_view(ranks[0], 2, size)

    def _slot_view(self, rank: int, slot: int, size: int) -> FloatArray:
        begin = 4096 + slot * self._slot_bytes
        return self._memory.segment(rank)[begin:begin + 4 * size].view(np.float32)

    def live_model(self, rank: int) -> FloatArray:
        """A rank's first slot: where its model itself may be, for ranks that tell each other when to touch it."""
        return self._slots[rank][0]

    def publish(self, version: int, model: FloatArray) -> None:
        """Write a version of the own model, later than all before, into one of the slots."""
        its, slot = self._control_words[self._rank], version % 2
        its[slot] = 2 * version + 1
        self._memory.fence()
        self._slots[self._rank][slot][:] = model
        self._memory.fence()
        its[slot] = 2 * version + 2
        self._memory.fence()

    def set_flag(self, flag: str, version: int) -> None:
        """Say that this rank has done something, one of WORDS, with a version."""
        self._memory.fence()
        self._control_words[self._rank][_FLAG_INDEX[flag]] = version + 1
        self._memory.fence()

    def get_flag(self, peer: int, flag: str) -> int:
        """The version of which a peer has told that last, -1 for none."""
        self._memory.fence()
        return int(self._control_words[peer][_FLAG_INDEX[flag]]) - 1

    def wait_flag(self, peer: int, flag: str, version: int) -> None:
        """Wait until a peer has told that of this version."""
        words, at = self._control_words[peer], _FLAG_INDEX[flag]
        self._memory.wait_until(lambda: bool(words[at] > version), f"rank {peer} to be {flag} in step {version}")

    def mix_newest(self, version: int, model: FloatArray, peer: int, weight: float) -> bool:
        """Publish (1 - weight) model + weight (newest whole model of a peer), and make it the own model.

        It waits for nobody. False where the peer has no model yet, or writes faster than this rank reads: then the
        model is published as it is.
        """
        words, slot = self._control_words[peer], version % 2
        own, stamps = self._slots[self._rank][slot], self._control_words[self._rank]
        for _ in range(MAX_SEQLOCK_RETRIES):
            self._memory.fence()
            before = words[:2].tolist()
            whole = [stamp if stamp % 2 == 0 else 0 for stamp in before]
            newest = int(whole[1] > whole[0])
            if not whole[newest]:
                break
            stamps[slot] = 2 * version + 1
            self._memory.fence()
            mix_into(model, self._slots[peer][newest], weight, own)
            self._memory.fence()
            if words[newest] == whole[newest]:
                stamps[slot] = 2 * version + 2
                self._memory.fence()
                model[:] = own
                return True
        self.publish(version, model)
        return False

    def close(self) -> None:
        """Give the memory back; a call of all ranks of the node."""
        self._control_words, self._slots, self.node_mean = {}, {}, np.empty(0, np.float32)
        self._memory.close()


#: what ranks tell each other of a version, and where it stands behind the stamps of the slots
FLAGS = ("ready", "mixed", "arrived", "made")
_FLAG_INDEX = {word: 2 + index for index, word in enumerate(FLAGS)}


def mix_into(own: FloatArray, other: FloatArray, weight: float, out: FloatArray) -> None:
    """out = mine + weight (theirs - mine), in one pass through memory; `out` may be `mine`."""
    change = np.empty(min(_MIX_BLOCK, own.size), np.float32)
    share = np.float32(weight)
    for begin in range(0, own.size, _MIX_BLOCK):
        part = slice(begin, begin + _MIX_BLOCK)
        here = own[part]
        its = change[:here.size]
        np.subtract(other[part], here, out=its)
        its *= share
        np.add(here, its, out=out[part])


def mix_pair(left: FloatArray, right: FloatArray, weights: tuple[float, float]) -> None:
    """Move both towards each other, each by its weight times their difference, in one pass through memory."""
    room = np.empty(min(_MIX_BLOCK, left.size), np.float32)
    share, ratio = np.float32(weights[0]), np.float32(weights[1] / weights[0])
    for begin in range(0, left.size, _MIX_BLOCK):
        here, there = left[begin:begin + _MIX_BLOCK], right[begin:begin + _MIX_BLOCK]
        change = room[:here.size]
        np.subtract(there, here, out=change)
        change *= share
        here += change
        if ratio != 1:
            change *= ratio
        there -= change


def weighted_mean(vectors: Sequence[FloatArray], out: FloatArray, weights: Sequence[float]) -> None:
    """out = the weighted mean of vectors of its length, in one pass through memory."""
    shares = [np.float32(weight / sum(weights)) for weight in weights]
    for begin in range(0, out.size, _MIX_BLOCK):
        part = slice(begin, begin + _MIX_BLOCK)
        np.multiply(vectors[0][part], shares[0], out=out[part])
        its = out[part]
        for vector, share in zip(vectors[1:], shares[1:], strict=True):
            its += vector[part] * share


class MpiSharedMemory:
    """Memory of ranks on one node; see `Memory`.

    Parameters
    ----------
    comm : an mpi4py communicator of these ranks alone, in their order.
    wait : called with a condition; returns when it is true.
    """

    def __init__(self, comm: Any, ranks: Sequence[int], num_bytes: int,
                 poll_until: Callable[[Callable[[], bool]], None]) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._window = MPI.Win.Allocate_shared(num_bytes, 1, comm=self._comm)
        self._window.Lock_all()
        self._segments = {rank: np.frombuffer(self._window.Shared_query(place)[0], np.uint8)
                       for place, rank in enumerate(ranks)}
        self._segments[ranks[comm.Get_rank()]].fill(0)
        self._poll_until = poll_until
        self.fence()
        self._comm.Barrier()
        self.fence()

    def segment(self, rank: int) -> npt.NDArray[np.uint8]:
        return self._segments[rank]

    def fence(self) -> None:
        self._window.Sync()

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        def seen() -> bool:
            self.fence()
            return condition()
        self._poll_until(seen)
        self.fence()

    def close(self) -> None:
        self._segments = {}
        self._window.Unlock_all()
        self._window.Free()
        self._comm.Free()
