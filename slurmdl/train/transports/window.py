"""Models in memory that the ranks of a node share.

Synchronous ranks keep their models in it, and announce by flags when others may access them. Asynchronous ranks
publish versions alternately in two slots, each with a sequence lock: its stamp is 2 v + 1 while version v is being
written, and 2 v + 2 when it is complete. A reader whose stamp changed during the read has read a torn version, and
retries.

Reference: T. Hoefler et al.: MPI + MPI: a new hybrid approach to parallel programming with MPI plus shared memory.
Computing 95 (2013). doi:10.1007/s00607-013-0324-2 C. Lameter: Effective synchronization on Linux/NUMA systems. Gelato
2005 (sequence locks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

#: bytes of a cache line and of a page: control words lie in lines of their own, slots start at pages
_CACHE_LINE_BYTES, PAGE_BYTES = 64, 4096
#: elements that are mixed at a time, so that intermediate results stay in the cache (256 KiB)
_MIX_BLOCK = 1 << 16
#: reads of a model before the exchange is skipped
MAX_SEQLOCK_RETRIES = 3
#: flags that a rank sets with a step -> their control words, after the stamps of the slots
_FLAG_INDEX = {"ready": 2, "mixed": 3, "averaged": 4, "exchanges": 5}


class SharedMemory(Protocol):
    """Memory that some ranks share; see transport.Transport.allocate_shared. A rank's stores are seen in order."""

    def segment(self, rank: int) -> npt.NDArray[np.uint8]:
        """The bytes that a rank contributed."""

    def fence(self) -> None:
        """Make this rank's stores visible to the others, and theirs to this one."""

    def request(self, condition: Callable[[], bool], description: str) -> Any:
        """Return a request, as of Transport.irecv, that is complete when other ranks' stores make a condition true.

        `description` is for errors.
        """

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        """Wait for such a request; long waits sleep."""

    def close(self) -> None:
        """Free the memory. Collective over the ranks that share it."""


class ModelWindow:
    """The models of the ranks of a node.

    Args:
        allocate_shared: see Transport.allocate_shared.
        ranks: of the node, with this one. Collective over them.
        size: elements of a model.

    Attributes:
        node_mean: shape (size,), writable by all ranks; part of the first rank's segment.
    """

    def __init__(self, allocate_shared: Callable[[Sequence[int], int], SharedMemory], rank: int, ranks: Sequence[int],
                 size: int) -> None:
        self._rank = rank
        self._slot_bytes = -(-4 * size // PAGE_BYTES) * PAGE_BYTES
        num_slots = 3 if rank == ranks[0] else 2
        self._memory = allocate_shared(ranks, PAGE_BYTES + num_slots * self._slot_bytes)
        self._control_words = {peer: self._memory.segment(peer)[:8 * _CACHE_LINE_BYTES].view(np.int64)
                               [::_CACHE_LINE_BYTES // 8] for peer in ranks}
        self._slots = {peer: [self._slot_view(peer, slot, size) for slot in range(2)] for peer in ranks}
        self.node_mean = self._slot_view(ranks[0], 2, size)

    def _slot_view(self, rank: int, slot: int, size: int) -> FloatArray:
        begin = PAGE_BYTES + slot * self._slot_bytes
        return self._memory.segment(rank)[begin:begin + 4 * size].view(np.float32)

    def live_model(self, rank: int) -> FloatArray:
        """A rank's first slot, which holds its model itself if the ranks synchronize by flags."""
        return self._slots[rank][0]

    def publish(self, version: int, model: FloatArray) -> None:
        """Write a version of this rank's model, newer than all before, into a slot."""
        stamps, slot = self._control_words[self._rank], version % 2
        stamps[slot] = 2 * version + 1
        self._memory.fence()
        self._slots[self._rank][slot][:] = model
        self._memory.fence()
        stamps[slot] = 2 * version + 2
        self._memory.fence()

    def set_flag(self, flag: str, version: int) -> None:
        self._memory.fence()
        self._control_words[self._rank][_FLAG_INDEX[flag]] = version + 1
        self._memory.fence()

    def get_flag(self, peer: int, flag: str) -> int:
        """The last version of a peer's flag, -1 for none."""
        self._memory.fence()
        return int(self._control_words[peer][_FLAG_INDEX[flag]]) - 1

    def wait_flag(self, peer: int, flag: str, version: int) -> None:
        words, index = self._control_words[peer], _FLAG_INDEX[flag]
        self._memory.wait_until(lambda: bool(words[index] > version), f"rank {peer} to be {flag} in step {version}")

    def mix_newest(self, version: int, model: FloatArray, peer: int, weight: float) -> bool:
        """Set `model` to (1 - weight) model + weight (newest version of a peer), and publish it. Never blocks.

        If the peer has no version, or writes faster than this rank reads, publish the model unchanged and return
        False.
        """
        peer_stamps, slot = self._control_words[peer], version % 2
        own, own_stamps = self._slots[self._rank][slot], self._control_words[self._rank]
        for _ in range(MAX_SEQLOCK_RETRIES):
            self._memory.fence()
            complete = [stamp if stamp % 2 == 0 else 0 for stamp in peer_stamps[:2].tolist()]
            newest = int(complete[1] > complete[0])
            if not complete[newest]:
                break
            own_stamps[slot] = 2 * version + 1
            self._memory.fence()
            mix_into(model, self._slots[peer][newest], weight, own)
            self._memory.fence()
            if peer_stamps[newest] == complete[newest]:
                own_stamps[slot] = 2 * version + 2
                self._memory.fence()
                model[:] = own
                return True
        self.publish(version, model)
        return False

    def close(self) -> None:
        """Free the memory. Collective over the ranks of the node."""
        self._control_words, self._slots, self.node_mean = {}, {}, np.empty(0, np.float32)
        self._memory.close()


def mix_into(own: FloatArray, other: FloatArray, weight: float, out: FloatArray) -> None:
    """out = own + weight (other - own), in one pass through memory; `out` may be `own`."""
    buffer = np.empty(min(_MIX_BLOCK, own.size), np.float32)
    factor = np.float32(weight)
    for begin in range(0, own.size, _MIX_BLOCK):
        block = slice(begin, begin + _MIX_BLOCK)
        own_block = own[block]
        difference = buffer[:own_block.size]
        np.subtract(other[block], own_block, out=difference)
        difference *= factor
        np.add(own_block, difference, out=out[block])


def mix_pair(left: FloatArray, right: FloatArray, weights: tuple[float, float]) -> None:
    """Move two models towards each other, each by its weight times their difference, in one pass through memory."""
    buffer = np.empty(min(_MIX_BLOCK, left.size), np.float32)
    factor, ratio = np.float32(weights[0]), np.float32(weights[1] / weights[0])
    for begin in range(0, left.size, _MIX_BLOCK):
        left_block, right_block = left[begin:begin + _MIX_BLOCK], right[begin:begin + _MIX_BLOCK]
        difference = buffer[:left_block.size]
        np.subtract(right_block, left_block, out=difference)
        difference *= factor
        left_block += difference
        if ratio != 1:
            difference *= ratio
        right_block -= difference


def weighted_mean(vectors: Sequence[FloatArray], out: FloatArray, weights: Sequence[float]) -> None:
    """out = weighted mean of vectors of equal length, in one pass through memory."""
    factors = [np.float32(weight / sum(weights)) for weight in weights]
    for begin in range(0, out.size, _MIX_BLOCK):
        block = slice(begin, begin + _MIX_BLOCK)
        mean = out[block]
        np.multiply(vectors[0][block], factors[0], out=mean)
        for vector, factor in zip(vectors[1:], factors[1:], strict=True):
            mean += vector[block] * factor


class ConditionRequest:
    """A request that is complete when a condition on shared memory is true; tested as an mpi4py request."""

    def __init__(self, condition: Callable[[], bool], fence: Callable[[], None]) -> None:
        self._condition, self._fence = condition, fence

    def Test(self) -> bool:
        self._fence()
        is_true = self._condition()
        if is_true:
            self._fence()  # later loads see what was stored before
        return is_true


class MpiSharedMemory:
    """Shared memory of ranks on one node by MPI; see `SharedMemory`.

    Args:
        comm: an mpi4py communicator of exactly these ranks, in order.
        poll_until: waits until a condition is true.
    """

    def __init__(self, comm: Any, ranks: Sequence[int], num_bytes: int,
                 poll_until: Callable[[Callable[[], bool]], None]) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._window = MPI.Win.Allocate_shared(num_bytes, 1, comm=self._comm)
        self._window.Lock_all()
        self._segments = {rank: np.frombuffer(self._window.Shared_query(comm_rank)[0], np.uint8)
                          for comm_rank, rank in enumerate(ranks)}
        self._segments[ranks[comm.Get_rank()]].fill(0)
        self._poll_until = poll_until
        self.fence()
        self._comm.Barrier()
        self.fence()

    def segment(self, rank: int) -> npt.NDArray[np.uint8]:
        return self._segments[rank]

    def fence(self) -> None:
        self._window.Sync()

    def request(self, condition: Callable[[], bool], description: str) -> ConditionRequest:
        return ConditionRequest(condition, self.fence)

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        self._poll_until(self.request(condition, description).Test)

    def close(self) -> None:
        self._segments = {}
        self._window.Unlock_all()
        self._window.Free()
        self._comm.Free()
