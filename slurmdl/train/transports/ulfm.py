"""Messages by an MPI with ULFM (User-Level Failure Mitigation), which survives rank failures.

A call that involves a failed rank raises an error. The first rank that notices revokes the communicator, so that the
next call of every other rank also fails. Then the survivors agree on the failed ranks and continue in a new
communicator, which receives no message of the old one. Only the end of a process counts as failure, which Open MPI's
daemon on the node reports; a stopped process does not.

Reference: W. Bland, A. Bouteiller, T. Herault, G. Bosilca, J. Dongarra: Post-failure recovery of MPI communication
capability. Int. J. High Perform. Comput. Appl. 27 (2013). doi:10.1177/1094342013488238 Open MPI 5.0: User-Level Fault
Mitigation. https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.tags import Tag
from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.transports.transport import RankFailedError

Method = TypeVar("Method", bound=Callable[..., Any])


def ulfm_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `mpirun --with-ft ulfm` has started this process."""
    return environ.get("OMPI_MCA_mpi_ft_enable") == "1"


def has_failed_ranks(comm: Any) -> bool:
    """Whether a rank of a communicator has failed, or another rank has revoked it."""
    return bool(comm.Is_revoked() or comm.Get_failed().Get_size())


def _translate_errors(method: Method) -> Method:
    """Make a method of UlfmTransport raise RankFailedError instead of errors that rank failures cause."""
    @wraps(method)
    def translating(self: UlfmTransport, *args: Any) -> Any:
        try:
            return method(self, *args)
        except (self._mpi.Exception, TrainError) as error:
            if isinstance(error, RankFailedError) or not has_failed_ranks(self._comm):
                raise
            raise self._rank_failed_error() from error

    return cast(Method, translating)


class UlfmTransport(MpiTransport):
    """Ranks of an mpi4py communicator whose errors are exceptions (the default); see `transport.Transport`."""

    #: windows are not tested for failures in Open MPI 5, which says so
    recovery_name, prefers_shared_memory = "ULFM", False

    isend = _translate_errors(MpiTransport.isend)
    irecv = _translate_errors(MpiTransport.irecv)
    testall = _translate_errors(MpiTransport.testall)
    allocate_shared = _translate_errors(MpiTransport.allocate_shared)
    allgather = _translate_errors(MpiTransport.allgather)
    gather = _translate_errors(MpiTransport.gather)
    broadcast = _translate_errors(MpiTransport.broadcast)

    @_translate_errors
    def iprobe(self, tag: int) -> int | None:
        source = super().iprobe(tag)
        if source is None:
            self._check_alive()
        return source

    @_translate_errors
    def _poll_until(self, condition: Callable[[], bool], on_poll: Callable[[], None] | None = None,
                    is_watched: bool = True) -> None:
        def check_failures() -> None:
            # the condition need not involve the failed rank or MPI: MPI reports failures only when it is called
            self._comm.Iprobe(self._mpi.ANY_SOURCE, Tag.UNUSED)
            self._check_alive()
            if on_poll:
                on_poll()

        super()._poll_until(condition, check_failures, is_watched)

    def agree(self, done: bool) -> bool:
        comm = self._comm
        if not done and not comm.Is_revoked():
            comm.Revoke()
        all_done = np.array([done], np.int32)
        try:
            request = comm.Iagree(all_done)
            super()._poll_until(lambda: bool(request.Test()), is_watched=False)  # the communicator may be revoked
        except self._mpi.Exception:
            # raised on all ranks if a failure was not known to all
            all_done[0] = 0
        if all_done[0]:
            return True
        self._comm = comm.Shrink()
        old_ranks = self._mpi.Group.Translate_ranks(self._comm.Get_group(), None, comm.Get_group())
        self.alive_ranks = tuple(self.alive_ranks[old_rank] for old_rank in old_ranks)
        self._comm_rank_of = {rank: comm_rank for comm_rank, rank in enumerate(self.alive_ranks)}
        return False

    def _check_alive(self) -> None:
        """Raise RankFailedError if a rank has failed; probing for messages of any rank does not."""
        if has_failed_ranks(self._comm):
            raise self._rank_failed_error()

    def _rank_failed_error(self) -> RankFailedError:
        comm_ranks = self._mpi.Group.Translate_ranks(self._comm.Get_failed(), None, self._comm.Get_group())
        return RankFailedError([self.alive_ranks[comm_rank] for comm_rank in comm_ranks])
