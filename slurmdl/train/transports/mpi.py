"""Messages by MPI, point to point."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.transports.window import Memory, Shared

#: seconds of polling before a wait begins to sleep, and the longest sleep. Polling for longer than the shortest sleep
#: takes gains little where cores are free, and takes them from those that are waited for where they are not
_SPIN, _LONGEST = 2e-5, 2e-4


class Mpi:
    """The ranks of an mpi4py communicator; see `transport.Transport`."""

    recovery = ""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._comm, self._mpi = comm, MPI
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._attended: Callable[[], None] | None = None
        self.living = tuple(range(self.size))
        #: of the living ranks in the communicator
        self._places = {rank: rank for rank in self.living}
        self.threaded: bool = MPI.Query_thread() >= MPI.THREAD_SERIALIZED

    def send(self, peer: int, array: Any, tag: int = 0) -> Any:
        return self._comm.Isend(_known(array), self._places[peer], tag)

    def receive(self, peer: int, array: Any, tag: int = 0) -> Any:
        return self._comm.Irecv(_known(array), self._places[peer], tag)

    def probe(self, tag: int) -> int | None:
        status = self._mpi.Status()
        return self.living[status.Get_source()] if self._comm.Iprobe(self._mpi.ANY_SOURCE, tag, status) else None

    def test(self, requests: Sequence[Any]) -> bool:
        return bool(self._mpi.Request.Testall(list(requests)))

    def wait(self, requests: Sequence[Any]) -> None:
        requests = list(requests)
        self._until(lambda: bool(self._mpi.Request.Testall(requests)))

    def first(self, requests: Sequence[Any], tag: int) -> None:
        requests = list(requests)
        self._until(lambda: any(request.Test() for request in requests)
                    or bool(self._comm.Iprobe(self._mpi.ANY_SOURCE, tag)))

    def either(self, groups: Sequence[Sequence[Any]], stop: Callable[[], bool]) -> int | None:
        waiting, found = [list(group) for group in groups], None

        def one_is() -> bool:
            nonlocal found
            found = next((number for number, group in enumerate(waiting) if self._mpi.Request.Testall(group)), None)
            return found is not None or stop()

        self._until(one_is)
        return found

    def _until(self, true: Callable[[], bool], watch: Callable[[], None] | None = None) -> None:
        spin = time.perf_counter() + _SPIN
        pause = 2e-5
        while not true():
            if time.perf_counter() < spin:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
                for its in (watch, self._attended):
                    if its:
                        its()

    def attend(self, tag: int, come: Callable[[], None]) -> None:
        self._attended = come

    def meet(self, watch: Callable[[], None] | None = None) -> None:
        request = self._comm.Ibarrier()
        self._until(lambda: bool(request.Test()), watch)

    def share(self, ranks: Sequence[int], size: int) -> Memory:
        try:
            places = [self._places[rank] for rank in ranks]
            return Shared(self._comm.Create_group(self._comm.Get_group().Incl(places)), ranks, size, self._until)
        except self._mpi.Exception as error:
            raise TrainError(f"--shared-memory: ranks {', '.join(map(str, ranks))} cannot share {size:,} bytes each "
                             f"(MPI: {error}); they must be on one node with room in /dev/shm") from error

    def now(self) -> float:
        return time.perf_counter()

    def compute(self, seconds: float) -> None:
        time.sleep(seconds)

    def total(self, array: Any) -> None:
        self.wait([self._comm.Iallreduce(self._mpi.IN_PLACE, array)])

    def agree(self, done: bool) -> bool:
        return done

    def allgather(self, thing: Any) -> list[Any]:
        return self._of_all(self._comm.allgather(thing))

    def gather(self, thing: Any) -> list[Any] | None:
        found = self._comm.gather(thing)
        return None if found is None else self._of_all(found)

    def _of_all(self, found: Sequence[Any]) -> list[Any]:
        """What the living give, in its place among all ranks."""
        given = dict(zip(self.living, found, strict=True))
        return [given.get(rank) for rank in range(self.size)]

    def broadcast(self, thing: Any) -> Any:
        return self._comm.bcast(thing)


def _known(array: Any) -> Any:
    """The same memory as numbers that MPI knows: it has none of 16 bits with a fraction."""
    return array.view(np.uint16) if array.dtype == np.float16 else array
