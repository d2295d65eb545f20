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

    def stream(self, to: int, out: FloatArray, source: int, into: FloatArray) -> Iterator[slice]:
        """Send `out` and receive `into` in chunks; yields the slice of each chunk received, when it is there.

        What the caller does with a chunk overlaps with the transfer of the next ones.
        """
        start = time.perf_counter()
        arriving = [(part, self._comm.Irecv(into[part], source)) for part in _chunks(into.size)]
        leaving = [self._send(to, out[part]) for part in _chunks(out.size)]
        for part, request in arriving:
            self._wait([request])
            self.seconds += time.perf_counter() - start
            yield part
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


def ring_sum(messages: Messages, ranks: Sequence[int], vector: FloatArray) -> None:
    """Replace `vector` by the sum over `ranks` (the same sequence on each of them), bit for bit alike on all.

    A reduce-scatter and an allgather round the ring of `ranks` in their order: each sends 2 (n - 1) / n of
    the vector, which no algorithm can do with less. In rank-map order each zone is entered once per turn.

    References
    ----------
    P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations.
    J. Parallel Distrib. Comput. 69 (2009). doi:10.1016/j.jpdc.2008.09.002
    """
    count = len(ranks)
    if count == 1:
        return
    place = ranks.index(messages.rank)
    right, left = ranks[(place + 1) % count], ranks[place - 1]
    edge = bounds(vector.size, count)

    def part(index: int) -> FloatArray:
        return vector[edge[index % count]:edge[index % count + 1]]

    arrived = np.empty(-(-vector.size // count), np.float32)
    for turn in range(count - 1):
        mine = part(place - turn - 1)
        into = arrived[:mine.size]
        for chunk in messages.stream(right, part(place - turn), left, into):
            mine[chunk] += into[chunk]
    for turn in range(count - 1):
        for _ in messages.stream(right, part(place - turn + 1), left, part(place - turn)):
            pass
