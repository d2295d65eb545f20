"""Messages by an MPI with ULFM (user level failure mitigation): where a rank is lost, the others may go on.

A call that needs a lost rank raises an error, on the ranks that need it. One of them revokes the communicator, so
that all others learn of it at their next call, whatever they wait for. Then the living agree on who they are, and go
on in a communicator of their own: no message of the old one can be taken for one of the new. A rank that only stands
still is not lost: that a process has ended is told by Open MPI's daemon beside it.

References
----------
W. Bland, A. Bouteiller, T. Herault, G. Bosilca, J. Dongarra: Post-failure recovery of MPI communication capability.
Int. J. High Perform. Comput. Appl. 27 (2013). doi:10.1177/1094342013488238
Open MPI 5.0: User-Level Fault Mitigation. https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.transports.transport import RankFailedError
from slurmdl.train.transports.window import SharedMemory

#: a tag that no message has
_UNUSED_TAG = 1000


def ulfm_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `mpirun --with-ft ulfm` has started this process."""
    return environ.get("OMPI_MCA_mpi_ft_enable") == "1"


def has_failed_ranks(comm: Any) -> bool:
    """Whether a rank of a communicator is lost, or the others have given it up for that."""
    return bool(comm.Is_revoked() or comm.Get_failed().Get_size())


class UlfmTransport(MpiTransport):
    """The ranks of an mpi4py communicator whose errors are exceptions, as by default; see `transport.Transport`."""

    recovery_name = "ULFM"

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        with self._translating_errors():
            return super().isend(peer, array, tag)

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any:
        with self._translating_errors():
            return super().irecv(peer, array, tag)

    def iprobe(self, tag: int) -> int | None:
        with self._translating_errors():
            found = super().iprobe(tag)
        if found is None:
            self._check_alive()
        return found

    def testall(self, requests: Sequence[Any]) -> bool:
        with self._translating_errors():
            return super().testall(requests)

    def _poll_until(self, condition: Callable[[], bool], on_poll: Callable[[], None] | None = None) -> None:
        def look() -> None:
            # what is waited for need not come from the rank that is lost, and may be no message at all: MPI must be
            # called to hear of it
            self._comm.Iprobe(self._mpi.ANY_SOURCE, _UNUSED_TAG)
            self._check_alive()
            if on_poll:
                on_poll()
        with self._translating_errors():
            super()._poll_until(condition, look)

    def allocate_shared(self, ranks: Sequence[int], num_bytes: int) -> SharedMemory:
        with self._translating_errors():
            return super().allocate_shared(ranks, num_bytes)

    def allgather(self, obj: Any) -> list[Any]:
        with self._translating_errors():
            return super().allgather(obj)

    def gather(self, obj: Any) -> list[Any] | None:
        with self._translating_errors():
            return super().gather(obj)

    def agree(self, done: bool) -> bool:
        comm = self._comm
        if not done and not comm.Is_revoked():
            comm.Revoke()
        all_done = np.array([done], np.int32)
        try:
            request = comm.Iagree(all_done)
            super()._poll_until(lambda: bool(request.Test()))
        except self._mpi.Exception:
            # a rank is lost of which not all knew: all get this error
            all_done[0] = 0
        if all_done[0]:
            return True
        self._comm = comm.Shrink()
        places = self._mpi.Group.Translate_ranks(self._comm.Get_group(), None, comm.Get_group())
        self.alive_ranks = tuple(self.alive_ranks[place] for place in places)
        self._comm_rank_of = {rank: place for place, rank in enumerate(self.alive_ranks)}
        return False

    def _check_alive(self) -> None:
        """Raise LostRank where one is lost: a probe for any rank's message does not."""
        if has_failed_ranks(self._comm):
            raise self._rank_failed_error()

    def _rank_failed_error(self) -> RankFailedError:
        places = self._mpi.Group.Translate_ranks(self._comm.Get_failed(), None, self._comm.Get_group())
        return RankFailedError([self.alive_ranks[place] for place in places])

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Around calls of MPI: an error that comes of the loss of a rank becomes a LostRank."""
        try:
            yield
        except (self._mpi.Exception, TrainError) as error:
            if isinstance(error, RankFailedError) or not has_failed_ranks(self._comm):
                raise
            raise self._rank_failed_error() from error
