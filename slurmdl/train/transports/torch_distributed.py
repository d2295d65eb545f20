"""Point-to-point messages by torch.distributed with gloo, for programs without MPI, e.g. under torchrun.

Gloo reports the completion of a message only to a thread that waits for it, and cannot probe for messages. So a
request that is polled gets a thread that waits for it, and messages for which a receiver may probe are announced by
a small one, which a listening thread receives from any rank. The process group comes from the script, or from the
variables of the launcher.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np

from slurmdl.errors import InvalidRunError, TrainError, UnavailableError
from slurmdl.text import pluralize
from slurmdl.train.transports.transport import (
    CHECK_INTERVAL_S,
    CHUNK_BYTES,
    CommCoroutine,
    RealTimeRank,
    StalledError,
    Tag,
    Watchdog,
    decode_object,
    encode_object,
)
from slurmdl.train.transports.window import SharedMemory

T = TypeVar("T")

#: tags for which receivers probe
_PROBED_TAGS = (Tag.STEP, Tag.PUSH, Tag.CHECKPOINT, Tag.ASYNC_PS, Tag.WORK_REQUEST, Tag.STEP_TIME, Tag.ROLL_CALL,
                Tag.ROLL_ANSWER)
#: a tag of an announced message -> that of the announcement
_ANNOUNCEMENT_OFFSET = 100_000
#: longest pause between two checks of a condition that may depend on more than messages
_POLL_INTERVAL_S = 1e-3
_MAX_THREADS, _CLOSE_TIMEOUT_S = 100_000, 5.0
#: how long a message may take: a listener, or a rank whose peer evaluates, waits without an end, and gloo closes the
#: connection of a wait that exceeds its limit. The watchdog limits waits, and the end of a rank ends those for it
NO_LIMIT = timedelta(days=30)
#: tensors of the last collectives: a thread of gloo that drops the last reference to one while the interpreter shuts
#: down aborts the process (pytorch#190489)
_recent_tensors: deque[Any] = deque(maxlen=8)


class LostRankError(TrainError):
    """Another rank has ended; if by a fault, it says so itself."""


class TorchTransport(RealTimeRank):
    """Ranks of a process group of torch.distributed on gloo; see `transport.Transport`.

    Args:
        group: of all ranks; None for the default one. It must not be used otherwise.
    """

    recovery_name = ""
    supports_comm_thread, prefers_shared_memory = True, False
    inter_zone_chunk_bytes = CHUNK_BYTES  # a request may need a thread

    def __init__(self, group: Any = None) -> None:
        import torch
        from torch import distributed

        self._torch, self._distributed, self._group = torch, distributed, group
        self.rank: int = distributed.get_rank()
        self.size: int = distributed.get_world_size()
        self.alive_ranks = tuple(range(self.size))
        # groups that not all ranks make (DeviceMean) need PyTorch 2.1
        if distributed.is_nccl_available() and hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
            self.device_backends = {"cuda": "nccl"}
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="slurmdl-gloo")
        #: notified when a request is complete or a message is announced
        self._changed = threading.Condition()
        #: tag -> rank -> messages announced, less the receives that were started
        self._pending: dict[int, Counter[int]] = {tag: Counter() for tag in _PROBED_TAGS}
        self._poll_hook: tuple[int, Callable[[], None]] | None = None
        self._is_closing = False
        #: whether no thread of this object communicates any more
        self.has_ended = self.size == 1
        #: thread that waits now -> start of its wait; and whether a wait has ended since the last check
        self._wait_starts: dict[int, float] = {}
        self._has_waited = False
        self._listeners = [threading.Thread(target=self._listen, args=(tag,), daemon=True)
                           for tag in (_PROBED_TAGS if self.size > 1 else ())]
        for thread in self._listeners:
            thread.start()
        #: threads that wait for the end of each other rank, and the error of the first one that has ended
        self._end_watchers: list[threading.Thread] = []
        self._lost_rank: TrainError | None = None

    def close(self) -> None:
        """End the listening threads, which would disturb the end of the program, with those of the other ranks."""
        if not self._listeners or self._is_closing:
            return
        try:
            watches = all_gather_objects(bool(self._end_watchers), self._group)  # afterwards no rank sends any more
            self._is_closing = True
            # the word ends a listener, as it may arrive before this rank has left the barrier
            neighbor, word = (self.rank + 1) % self.size, self._torch.ones(1, dtype=self._torch.uint8)
            for tag in _PROBED_TAGS:
                self._distributed.send(word, neighbor, self._group, tag + _ANNOUNCEMENT_OFFSET)
            for peer in range(self.size):
                if peer != self.rank and watches[peer]:
                    self._distributed.send(word, peer, self._group, Tag.END_OF_RANK)
            for thread in (*self._listeners, *self._end_watchers):
                thread.join(_CLOSE_TIMEOUT_S)
            self.has_ended = not any(thread.is_alive() for thread in (*self._listeners, *self._end_watchers))
        except (RuntimeError, ValueError):
            return  # another rank has failed, and has said why; or the script has destroyed the process group

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        requests = []
        if tag in self._pending and not self._is_closing:
            requests.append(self._start(self._distributed.isend, np.zeros(1, np.uint8), peer,
                                        tag + _ANNOUNCEMENT_OFFSET))
        return self._request([*requests, self._start(self._distributed.isend, array, peer, tag)], peer)

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any:
        if tag in self._pending:
            with self._changed:
                self._pending[tag][peer] -= 1
        return self._request([self._start(self._distributed.irecv, array, peer, tag)], peer)

    def _request(self, works: Sequence[tuple[Any, Any]], peer: int) -> _Request:
        return _Request(self.start_thread, partial(_wait_for_works, works, peer))

    def _start(self, operation: Callable[..., Any], array: Any, peer: int, tag: int) -> tuple[Any, Any]:
        """The work of torch.distributed, and its tensor, which must live as long; empty arrays are sent as a byte."""
        if not array.size:
            array = np.zeros(1, np.uint8)
        tensor = self._torch.from_numpy(array.reshape(-1).view(np.uint8))
        try:
            return operation(tensor, peer, self._group, tag), tensor
        except (RuntimeError, ValueError) as error:
            raise _lost_rank_error(peer, error) from error

    def _listen(self, tag: int) -> None:
        """Receive announcements of messages until the program or another rank ends."""
        word = self._torch.zeros(1, dtype=self._torch.uint8)
        while True:
            try:
                work = self._distributed.irecv(word, None, self._group, tag + _ANNOUNCEMENT_OFFSET)
                work.wait(NO_LIMIT)
            except (RuntimeError, ValueError):
                return
            if word.item():
                return
            with self._changed:
                self._pending[tag][work._source_rank()] += 1
                self._changed.notify_all()

    def start_thread(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function that waits, in a thread; its end wakes the waits of this class."""
        future = self._pool.submit(function)
        future.add_done_callback(self._notify)
        return future

    def start_coroutine(self, coroutine: CommCoroutine) -> _Request:
        def run() -> None:
            for requests, _ in coroutine:
                for request in requests:
                    request.wait()

        request = _Request(self.start_thread, run)
        request.poll()
        return request

    def _notify(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def iprobe(self, tag: int) -> int | None:
        with self._changed:
            return next((rank for rank, count in self._pending[tag].items() if count > 0), None)

    def testall(self, requests: Sequence[Any]) -> bool:
        return all(request.poll() for request in requests)

    def watch(self, watchdog: Watchdog, on_stall: Callable[[StalledError], None]) -> None:
        super().watch(watchdog, on_stall)
        threading.Thread(target=self._check_waits, args=(watchdog, on_stall), daemon=True).start()

    def _check_waits(self, watchdog: Watchdog, on_stall: Callable[[StalledError], None]) -> None:
        """Check the longest wait, which may be inside torch.distributed, until the program ends."""
        while not self._is_closing:
            time.sleep(CHECK_INTERVAL_S)
            now = time.monotonic()
            starts = list(self._wait_starts.values())
            if not starts and not self._has_waited:
                continue
            self._has_waited = False
            try:
                watchdog.check(now - min(starts, default=now))
            except StalledError as error:
                on_stall(error)
                return
            except TrainError:
                return  # another rank has ended, which the waiting thread reports

    @contextmanager
    def _timing_wait(self) -> Iterator[None]:
        thread = threading.get_ident()
        is_outermost = thread not in self._wait_starts
        self._wait_starts.setdefault(thread, time.monotonic())
        try:
            yield
        finally:
            if is_outermost:
                del self._wait_starts[thread]
            self._has_waited = True

    def waitall(self, requests: Sequence[Any]) -> None:
        if self._poll_hook:
            self._wait_until(lambda: self.testall(requests))
        with self._timing_wait():
            for request in requests:
                request.wait()

    def wait_any_or_message(self, requests: Sequence[Any], tag: int) -> None:
        if not self._end_watchers:
            self._watch_ends()
        self._wait_until(lambda: any(request.poll() for request in requests) or self.iprobe(tag) is not None
                         or self._lost_rank is not None)
        if self._lost_rank:
            raise self._lost_rank

    def _watch_ends(self) -> None:
        """Notice the end of any other rank: gloo does not end the wait for a message of any rank."""
        def watch(peer: int) -> None:
            try:
                _wait_for_works([self._start(self._distributed.irecv, np.zeros(1, np.uint8), peer, Tag.END_OF_RANK)],
                                peer)
            except TrainError as error:
                with self._changed:
                    self._lost_rank = self._lost_rank or error
                    self._changed.notify_all()

        self._end_watchers = [threading.Thread(target=watch, args=(peer,), daemon=True)
                              for peer in range(self.size) if peer != self.rank]
        for thread in self._end_watchers:
            thread.start()

    def wait_any_group(self, groups: Sequence[Sequence[Any]], should_stop: Callable[[], bool]) -> int | None:
        completed: list[int] = []

        def is_done() -> bool:
            completed[:] = [index for index, group in enumerate(groups) if self.testall(group)]
            return bool(completed) or should_stop()

        self._wait_until(is_done)
        return completed[0] if completed else None

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait, and call the poll hook meanwhile. `condition` may depend on more than requests and messages."""
        with self._timing_wait():
            while True:
                with self._changed:  # or a notification after the check would be missed
                    if condition():
                        return
                    self._changed.wait(_POLL_INTERVAL_S)
                if self._poll_hook and self.iprobe(self._poll_hook[0]) is not None:
                    self._poll_hook[1]()

    def set_poll_hook(self, tag: int, hook: Callable[[], None]) -> None:
        self._poll_hook = tag, hook

    def barrier(self, on_poll: Callable[[], None] | None = None) -> None:
        barrier = self.start_thread(lambda: self._collective(lambda: self._distributed.barrier(self._group)))

        def is_done() -> bool:
            if on_poll and not barrier.done():
                on_poll()
            return barrier.done()

        self._wait_until(is_done)
        barrier.result()

    def allocate_shared(self, ranks: Sequence[int], num_bytes: int) -> SharedMemory:
        raise TrainError("the backend torch has no shared memory; expected --backend mpi")

    def allgather(self, obj: Any) -> list[Any]:
        return self._collective(lambda: all_gather_objects(obj, self._group))

    def gather(self, obj: Any) -> list[Any] | None:
        objects = self.allgather(obj)
        return objects if self.rank == 0 else None

    def broadcast(self, obj: Any) -> Any:
        data = _to_tensor(encode_object(obj) if self.rank == 0 else b"")
        size = self._torch.tensor([data.numel()])
        self._collective(lambda: self._distributed.broadcast(size, 0, self._group))
        if self.rank:
            data = self._torch.zeros(int(size), dtype=self._torch.uint8)
        _recent_tensors.extend((size, data))
        self._collective(lambda: self._distributed.broadcast(data, 0, self._group))
        return obj if self.rank == 0 else decode_object(data.numpy())

    def _collective(self, operation: Callable[[], T]) -> T:
        with naming_lost_rank(), self._timing_wait():
            return operation()


def all_gather_objects(obj: Any, group: Any) -> list[Any]:
    """Like torch.distributed.all_gather_object, which would run code that is in a message."""
    import torch
    from torch import distributed

    data = _to_tensor(encode_object(obj))
    size, sizes = torch.tensor([data.numel()]), [
        torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, size, group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[:data.numel()] = data
    received = [torch.empty_like(padded) for _ in sizes]
    _recent_tensors.extend((size, sizes, padded, received))
    distributed.all_gather(received, padded, group)
    return [decode_object(part[:int(size)].numpy()) for part, size in zip(received, sizes, strict=True)]


def _to_tensor(data: bytes) -> Any:
    import torch

    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


class _Request:
    """Something to wait for: messages in flight, or a coroutine."""

    def __init__(self, start_thread: Callable[[Callable[[], None]], Future[None]],
                 blocking_wait: Callable[[], None]) -> None:
        self._start_thread, self._blocking_wait = start_thread, blocking_wait
        self._future: Future[None] | None = None
        self._is_complete = False

    def poll(self) -> bool:
        """Whether it is complete; from the first call on a thread waits for it."""
        if self._is_complete:
            return True
        if self._future is None:
            self._future = self._start_thread(self._blocking_wait)
        if not self._future.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        if self._is_complete:
            return
        if self._future is None:
            self._blocking_wait()
        else:
            self._future.result()
        self._is_complete = True


def _wait_for_works(works: Sequence[tuple[Any, Any]], peer: int) -> None:
    try:
        for work, _ in works:
            work.wait(NO_LIMIT)
    except RuntimeError as error:
        raise _lost_rank_error(peer, error) from error


@contextmanager
def naming_lost_rank() -> Iterator[None]:
    """Raise LostRankError for a collective that torch.distributed ends with an error."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise _lost_rank_error(None, error) from error


def _lost_rank_error(peer: int | None, error: RuntimeError | ValueError) -> TrainError:
    from torch import distributed

    if not distributed.is_initialized():
        return InvalidRunError("torch.distributed.destroy_process_group() was called before the end of the run; "
                               "expected run.finish() first")
    culprit = "another rank" if peer is None else f"rank {peer}"
    reason = str(error).splitlines()[0][:150]
    return LostRankError(f"{culprit} has ended, or does not answer (torch.distributed: {reason})")


#: seconds in which all ranks must have started, and a collective must end, beyond the limit of the watchdog
_EXTRA_TIMEOUT_S = 300.0
#: ports of rank 0 under plain srun, below those of outgoing connections (ip_local_port_range in ip(7))
_FIRST_PORT, _PORT_COUNT = 12_000, 20_000
_PR_SET_PDEATHSIG = 1

_open_transports: list[TorchTransport] = []


def init_torch(environ: Mapping[str, str] = os.environ, wait_limit_s: float = 0.0) -> TorchTransport:
    """Connect to the other ranks by torch.distributed with gloo.

    Rank and world size are RANK and WORLD_SIZE, as torchrun sets them, or SLURM_PROCID and the number of tasks of the
    step. `wait_limit_s` is that of the watchdog, 0 for none. Raises UnavailableError without PyTorch, InvalidRunError
    if the ranks do not find each other.
    """
    try:
        from torch import distributed
    except ImportError as error:
        raise UnavailableError(f"no PyTorch: {error} (needed: pip install 'slurmdl[train]')") from error
    if is_torchrun(environ):
        _end_with_parent()
    timeout, group = collective_timeout(wait_limit_s), None
    if distributed.is_initialized():  # by the script, perhaps for NCCL, and for messages of its own
        group = distributed.new_group(timeout=timeout, backend="gloo")
    else:
        # this module keeps the default group that exists at its import, e.g. by the first optimizer, as a default
        # argument: then the threads of the group do not end with it, and may abort the process (pytorch#190489)
        import torch.distributed.nn.functional  # noqa: F401

        rank, size = rank_and_size(environ)
        address, port = rank_zero_address(environ)
        try:
            if size == 1:
                distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
            elif "RANK" in environ and "MASTER_PORT" in environ:
                distributed.init_process_group("gloo", timeout=timeout)  # reads the variables of torchrun
            else:
                distributed.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank,
                                               world_size=size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            if "EADDRINUSE" in str(error):
                raise InvalidRunError(
                    f"rank {rank}: another program, perhaps of another user, listens on port {port} of {address}; "
                    "expected a free MASTER_PORT, or `slurmdl srun`") from error
            raise InvalidRunError(f"rank {rank} does not find the other {pluralize(size - 1, 'rank')} by "
                                  f"{address}:{port} ({str(error).splitlines()[0][:150]})") from error
    transport = TorchTransport(group)
    _open_transports.append(transport)
    atexit.register(finalize_process_group if group else _end_process_group)
    return transport


def is_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this process, perhaps through another launcher."""
    return "TORCHELASTIC_RUN_ID" in environ


def _end_with_parent() -> None:
    """Get SIGTERM when the parent ends, as torchrun does at a signal it does not handle, e.g. SIGUSR1.

    This rank would train on, without a launcher that ends it if another rank fails.

    Reference: prctl(2), PR_SET_PDEATHSIG.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def finalize_process_group() -> None:
    """End the messages of this rank; waits until the others have ended theirs, too."""
    while _open_transports:
        _open_transports.pop().close()


def _end_process_group() -> None:
    """End the messages of this rank, then the process group that this module has made, with its threads."""
    import torch
    from torch import distributed

    transports = tuple(_open_transports)
    finalize_process_group()
    # groups of GPUs are left to the end of the process
    if all(transport.has_ended for transport in transports) and distributed.is_initialized() and \
            not torch.cuda.is_initialized():
        distributed.destroy_process_group()


def collective_timeout(wait_limit_s: float) -> timedelta:
    """Time limit of a collective for a limit of the watchdog, which reports first; 0 for none."""
    return timedelta(seconds=wait_limit_s + _EXTRA_TIMEOUT_S) if wait_limit_s else NO_LIMIT


def rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of ranks by the variables of torchrun, else of Slurm; (0, 1) without either."""
    # not SLURM_NTASKS, which a batch script has, too
    for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        rank, size = (environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal():
            return int(rank), int(size)
    return 0, 1


def rank_zero_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Node and port of rank 0: MASTER_ADDR and MASTER_PORT, else the first node of the step, and a port by its ID."""
    from slurmdl.slurm import hostlist  # imported only when needed

    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    port = environ.get("MASTER_PORT", "")
    nodes = hostlist.expand_hostlist(environ.get("SLURM_STEP_NODELIST", "")) or ["localhost"]
    return (environ.get("MASTER_ADDR") or nodes[0],
            int(port) if port.isdecimal() else _FIRST_PORT + zlib.crc32(step.encode()) % _PORT_COUNT)
