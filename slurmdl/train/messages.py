"""Messages between ranks, point to point, with a meter of bytes by level and of time.

Training data moves by these messages alone, never by a library's collective: only so is it known which
bytes crossed which link.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

#: how far a message goes: within the node, to another node of the zone, to another zone
LEVELS = ("node", "zone", "across")

#: elements in one chunk of a streamed message (1 MiB)
CHUNK = 1 << 18
#: seconds of polling before a wait begins to sleep, and the longest sleep
_SPIN, _LONGEST = 1e-3, 2e-4


class Messages:
    """The messages of one rank.

    Parameters
    ----------
    comm : an mpi4py communicator.
    levels : entry i is the level, one of LEVELS, of a message from this rank to rank i.

    Attributes
    ----------
    sent : level -> payload bytes sent by this rank.
    seconds : time spent in posting messages and in waiting for them.
    """

    def __init__(self, comm: Any, levels: Sequence[str]) -> None:
        self._comm = comm
        self._levels = tuple(levels)
        self.rank: int = comm.Get_rank()
        self.sent = dict.fromkeys(LEVELS, 0)
        self.seconds = 0.0

    def exchange(self, sends: Sequence[tuple[int, FloatArray]], receives: Sequence[tuple[int, FloatArray]]) -> None:
        """Send and receive contiguous arrays (peer, array), all at once, and wait until all are done."""
        start = time.perf_counter()
        requests = [self._comm.Irecv(array, peer) for peer, array in receives]
        requests += [self._send(peer, array) for peer, array in sends]
        self._wait(requests)
        self.seconds += time.perf_counter() - start

    def stream(self, sends: Sequence[tuple[int, FloatArray]],
               receives: Sequence[tuple[int, FloatArray]]) -> Iterator[tuple[int, slice]]:
        """Send and receive contiguous arrays (peer, array), all at once, in chunks.

        Yields the index in `receives` and the slice of each chunk received, when it is there: what the caller does
        with a chunk overlaps with the transfer of the next ones. Of several arrays between the same two ranks both
        name them in the same order.
        """
        start = time.perf_counter()
        arriving = [(index, part, self._comm.Irecv(array[part], peer))
                    for index, (peer, array) in enumerate(receives) for part in _chunks(array.size)]
        leaving = [self._send(peer, array[part]) for peer, array in sends for part in _chunks(array.size)]
        for index, part, request in arriving:
            self._wait([request])
            self.seconds += time.perf_counter() - start
            yield index, part
            start = time.perf_counter()
        self._wait(leaving)
        self.seconds += time.perf_counter() - start

    def meet(self) -> None:
        """Wait for all ranks, asleep: where ranks outnumber cores, a barrier that spins starves the late ones."""
        self._wait([self._comm.Ibarrier()])

    def _send(self, peer: int, array: FloatArray) -> Any:
        self.sent[self._levels[peer]] += array.nbytes
        return self._comm.Isend(array, peer)

    def _wait(self, requests: list[Any]) -> None:
        from mpi4py import MPI

        spin = time.perf_counter() + _SPIN
        pause = 2e-5
        while not MPI.Request.Testall(requests):
            if time.perf_counter() < spin:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)


def bounds(size: int, parts: int) -> list[int]:
    """Where `parts` nearly equal parts of `size` elements begin; the last entry is `size`."""
    return [size * part // parts for part in range(parts + 1)]


def _chunks(size: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]
