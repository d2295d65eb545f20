"""Point-to-point messages by MPI, also by one with ULFM (User-Level Failure Mitigation); properties of Open MPI."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.transports.transport import (
    MPI_INTER_ZONE_CHUNK_BYTES,
    RankFailedError,
    RealTimeRank,
    Tag,
    decode_object,
    encode_object,
)
from slurmdl.train.transports.window import ConditionRequest, MpiSharedMemory, SharedMemory

#: seconds of polling before a wait starts to sleep, about the cost of the shortest sleep, and the longest sleep.
#: Longer polling gains little if cores are free, and takes them from the awaited ranks if not
_SPIN_SECONDS, _MAX_SLEEP_SECONDS = 2e-5, 2e-4
#: where MPI libraries put shared memory, and space there that they need besides
_SHARED_MEMORY_FOLDER, _SHARED_MARGIN_BYTES = "/dev/shm", 1 << 20
#: seconds from the end of MPI_Init to the first message. The first ranks of Open MPI return while others still wait
#: in MPI_Init, and a rank that gets a message there crashes: https://github.com/open-mpi/ompi/issues/12495 (seen
#: with 4.1.4 and 5.0.7 under srun)
POST_INIT_SECONDS = 0.2
#: environment variable, read by MPI_Init: maximum bytes of an eager message of Open MPI over TCP (default 65,536).
#: Longer messages in both directions between two ranks delay each other's rendezvous reply
EAGER_LIMIT_VARIABLE = "OMPI_MCA_btl_tcp_eager_limit"
#: maximum overhead of a message in bytes
MESSAGE_OVERHEAD_BYTES = 4096


def open_mpi_major(mpi: Any) -> int:
    """Major version of Open MPI, 0 for another library; `mpi` is the module mpi4py.MPI."""
    name, _, version = mpi.Get_library_version().partition(",")[0].partition(" v")
    number = version.partition(".")[0]
    return int(number) if name == "Open MPI" and number.isdigit() else 0


def wait_until_ready(mpi: Any) -> None:
    """Wait, after MPI_Init and before the first message, until all ranks are ready."""
    if mpi.COMM_WORLD.Get_size() > 1 and open_mpi_major(mpi):
        time.sleep(POST_INIT_SECONDS)


class MpiTransport(RealTimeRank):
    """Ranks of an mpi4py communicator; see `transport.Transport`."""

    recovery_name, prefers_shared_memory = "", True
    inter_zone_chunk_bytes = MPI_INTER_ZONE_CHUNK_BYTES

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._comm, self._mpi = comm, MPI
        self._comm_of_script: Any = None
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._poll_hook: Callable[[], None] | None = None
        self.alive_ranks = tuple(range(self.size))
        #: alive rank -> its rank in the communicator
        self._comm_rank_of = {rank: rank for rank in self.alive_ranks}
        self.supports_comm_thread: bool = MPI.Query_thread() >= MPI.THREAD_SERIALIZED

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        return self._comm.Isend(_as_mpi_buffer(array), self._comm_rank_of[peer], tag)

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any:
        return self._comm.Irecv(_as_mpi_buffer(array), self._comm_rank_of[peer], tag)

    def iprobe(self, tag: int) -> int | None:
        status = self._mpi.Status()
        return self.alive_ranks[status.Get_source()] if self._comm.Iprobe(self._mpi.ANY_SOURCE, tag, status) else None

    def testall(self, requests: Sequence[Any]) -> bool:
        return self._completion_test(requests)()

    def _completion_test(self, requests: Sequence[Any]) -> Callable[[], bool]:
        """Return a function that tests whether all requests are complete, those on shared memory included."""
        messages = [request for request in requests if not isinstance(request, ConditionRequest)]
        conditions = [request for request in requests if isinstance(request, ConditionRequest)]
        testall = self._mpi.Request.Testall
        return lambda: bool(testall(messages)) and all(request.Test() for request in conditions)

    def waitall(self, requests: Sequence[Any]) -> None:
        self._poll_until(self._completion_test(requests))

    def wait_any_or_message(self, requests: Sequence[Any], tag: int) -> None:
        requests = list(requests)
        self._poll_until(lambda: any(request.Test() for request in requests)
                         or bool(self._comm.Iprobe(self._mpi.ANY_SOURCE, tag)))

    def wait_any_group(self, groups: Sequence[Sequence[Any]], should_stop: Callable[[], bool]) -> int | None:
        tests, completed = [self._completion_test(group) for group in groups], None

        def is_done() -> bool:
            nonlocal completed
            completed = next((index for index, is_complete in enumerate(tests) if is_complete()), None)
            return completed is not None or should_stop()

        self._poll_until(is_done)
        return completed

    def _poll_until(self, condition: Callable[[], bool], on_poll: Callable[[], None] | None = None,
                    is_watched: bool = True) -> None:
        start = time.perf_counter()
        spin_end, pause = start + _SPIN_SECONDS, 2e-5
        while not condition():
            if time.perf_counter() < spin_end:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(2 * pause, _MAX_SLEEP_SECONDS)
                for callback in (on_poll, self._poll_hook):
                    if callback:
                        callback()
                if self.watchdog and is_watched:
                    self.watchdog.check(time.perf_counter() - start)

    def set_poll_hook(self, tag: int, hook: Callable[[], None]) -> None:
        self._poll_hook = hook

    def barrier(self, on_poll: Callable[[], None] | None = None) -> None:
        request = self._comm.Ibarrier()
        self._poll_until(lambda: bool(request.Test()), on_poll)

    def use_own_communicator(self) -> None:
        """Exchange messages in a duplicate of the communicator, apart from those of the script and of other runs."""
        duplicate, request = self._comm.Idup()
        self._complete(request)
        self._comm, self._comm_of_script = duplicate, self._comm

    def close(self) -> None:
        """Free the duplicate; collective calls use the script's communicator, unless it has lost ranks."""
        if self._comm_of_script and len(self.alive_ranks) == self.size:
            self._comm.Free()
            self._comm, self._comm_of_script = self._comm_of_script, None

    def allocate_shared(self, ranks: Sequence[int], num_bytes: int) -> SharedMemory:
        names, problem = ", ".join(map(str, ranks)), ""
        try:
            group = self._comm.Get_group().Incl([self._comm_rank_of[rank] for rank in ranks])
            comm = self._comm.Create_group(group)
            # Open MPI hangs if the space is too small: only the rank that creates the file fails
            if comm.allreduce(num_bytes) + _SHARED_MARGIN_BYTES > comm.allreduce(_free_shared_bytes(), self._mpi.MIN):
                problem = "not enough free memory"
            else:
                return MpiSharedMemory(comm, ranks, num_bytes, self._poll_until)
        except self._mpi.Exception as error:
            problem = f"MPI: {error}"
        raise TrainError(f"ranks {names} cannot share {num_bytes:,} bytes each ({problem}); expected one node with "
                         f"enough space in {_SHARED_MEMORY_FOLDER}")

    # the collective calls of mpi4py for objects would spin while they wait, and call no hook

    def allgather(self, obj: Any) -> list[Any]:
        data, sizes = _encoded(obj), np.empty(len(self.alive_ranks), np.int64)
        self._complete(self._comm.Iallgather(np.array([data.size]), sizes))
        everything = np.empty(sizes.sum(), np.uint8)
        self._complete(self._comm.Iallgatherv(data, [everything, sizes.tolist(), self._mpi.BYTE]))
        return self._by_rank(_decoded(everything, sizes))

    def gather(self, obj: Any) -> list[Any] | None:
        is_root = self._comm.Get_rank() == 0
        data, sizes = _encoded(obj), np.empty(len(self.alive_ranks) if is_root else 0, np.int64)
        self._complete(self._comm.Igather(np.array([data.size]), sizes if is_root else None))
        everything = np.empty(sizes.sum(), np.uint8)
        self._complete(self._comm.Igatherv(data, [everything, sizes.tolist(), self._mpi.BYTE] if is_root else None))
        return self._by_rank(_decoded(everything, sizes)) if is_root else None

    def _complete(self, request: Any) -> None:
        self._poll_until(lambda: bool(request.Test()))

    def _by_rank(self, values: Sequence[Any]) -> list[Any]:
        """Values of the alive ranks in a list of all ranks, None for failed ranks."""
        value_of = dict(zip(self.alive_ranks, values, strict=True))
        return [value_of.get(rank) for rank in range(self.size)]

    def broadcast(self, obj: Any) -> Any:
        is_root = self._comm.Get_rank() == 0
        data = _encoded(obj) if is_root else np.empty(0, np.uint8)
        size = np.array([data.size])
        self._complete(self._comm.Ibcast(size))
        data = data if is_root else np.empty(size[0], np.uint8)
        self._complete(self._comm.Ibcast(data))
        return decode_object(data)


def _free_shared_bytes() -> int:
    try:
        status = os.statvfs(_SHARED_MEMORY_FOLDER)
    except OSError:
        return sys.maxsize  # MPI finds another place, or reports an error
    return status.f_bavail * status.f_frsize


def _as_mpi_buffer(array: Any) -> Any:
    """View float16, which has no MPI datatype, as uint16."""
    return array.view(np.uint16) if array.dtype == np.float16 else array


def _encoded(obj: Any) -> Any:
    return np.frombuffer(encode_object(obj), np.uint8)


def _decoded(data: Any, sizes: Any) -> list[Any]:
    return [decode_object(part) for part in np.split(data, np.cumsum(sizes)[:-1])] if len(sizes) else []


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
    """Ranks that survive rank failures; the errors of the mpi4py communicator are exceptions (the default).

    A call that involves a failed rank raises an error. The first rank that notices revokes the communicator, so that
    the next call of every other rank also fails. Then the survivors agree on the failed ranks and continue in a new
    communicator, which receives no message of the old one. Only the end of a process counts as failure, which Open
    MPI's daemon on the node reports; a stopped process does not.

    Reference: W. Bland, A. Bouteiller, T. Herault, G. Bosilca, J. Dongarra: Post-failure recovery of MPI
    communication capability. Int. J. High Perform. Comput. Appl. 27 (2013). doi:10.1177/1094342013488238 Open MPI
    5.0: User-Level Fault Mitigation. https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html
    """

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
