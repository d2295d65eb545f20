"""What transports share: their interface, message tags, the limit of a wait, and objects as bytes.

Unlike a pickle, the bytes of an object cannot run code: whoever reaches a port of a rank may be another user.
"""

from __future__ import annotations

import json
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import IntEnum
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.errors import SlurmdlError, TrainError
from slurmdl.train.transports.window import SharedMemory
from slurmdl.units import format_coarse_duration


class Tag(IntEnum):
    """Tags of messages that may be in flight at the same time."""

    #: step messages of every strategy, and the last bucket of allreduce; a rank that has ended probes for it
    STEP = 0
    PUSH = 1
    SHARD_BACKUP = 2
    CHECKPOINT = 3
    ASYNC_PS = 4
    WORK_REQUEST = 5
    WORK_GRANT = 6
    STEP_TIME = 7
    #: of the watchdog
    ROLL_CALL = 8
    ROLL_ANSWER = 9
    #: of the backend torch, sent when a rank ends
    END_OF_RANK = 999
    #: first of the tags of allreduce buckets
    FIRST_BUCKET = 10
    #: never sent
    UNUSED = 1000
    #: first of the tags of exchanges that overlap with steps, one for each piece of the model
    FIRST_OVERLAPPED = 2000


#: bytes in one chunk of a streamed message. Small enough that processing one chunk overlaps with the transfer of the
#: next, large enough to hide the cost per message; Open MPI's eager limit is raised to it (world.init_mpi)
CHUNK_BYTES = 1 << 20
#: the same between zones over MPI: below Open MPI's default eager limit of 64 KiB, faster on shared slow links
MPI_INTER_ZONE_CHUNK_BYTES = 60_000


#: a communication algorithm as a coroutine: yields the requests that must complete before it can continue, and
#: whether they are the first of an exchange, so that waiting for them counts as waiting for the peer
CommCoroutine = Iterator[tuple[Sequence[Any], bool]]


class RankFailedError(TrainError):
    """Ranks have failed, and the surviving ranks know.

    Attributes:
        ranks: known failed ranks; () if this rank learned of the failure from another one.
        resumable: whether the run writes checkpoints, so that the job can be restarted.
        node_of_rank: node of each rank, failed or not; () if unknown.
    """

    def __init__(self, ranks: Sequence[int], message: str = "", resumable: bool = False,
                 node_of_rank: Sequence[str] = ()) -> None:
        super().__init__(message or f"rank {', '.join(map(str, ranks)) or 'unknown'} has failed")
        self.ranks, self.resumable, self.node_of_rank = tuple(ranks), resumable, tuple(node_of_rank)


class Transport(Protocol):
    """Point-to-point messages between `size` ranks, as seen from one. Arrays are contiguous numpy arrays of any type.

    Messages with the same tag between two ranks arrive in order. If the transport supports recovery, any method may
    raise RankFailedError after a rank failed, until the survivors call `agree`.

    Attributes:
        alive_ranks: ranks that have not failed, in order. Ranks keep their numbers.
        recovery_name: name of the recovery mechanism after rank failures; "" for none.
        supports_comm_thread: whether a second thread may make all calls (MPI_THREAD_SERIALIZED or better), one at a
            time.
        prefers_shared_memory: whether memory shared by the ranks of a node is faster than messages between them.
        inter_zone_chunk_bytes: bytes in one chunk of a streamed message between zones, see CHUNK_BYTES.
        watchdog: limits the time of waits; None for no limit.
        device_backends: type of a torch.device -> backend of torch.distributed for collectives of its tensors.
    """

    rank: int
    size: int
    alive_ranks: tuple[int, ...]
    recovery_name: str
    supports_comm_thread: bool
    prefers_shared_memory: bool
    inter_zone_chunk_bytes: int
    watchdog: Watchdog | None
    device_backends: Mapping[str, str]

    def isend(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Start to send an array, which must not change until the returned request is complete."""

    def irecv(self, peer: int, array: Any, tag: int = 0) -> Any:
        """Start to receive a message of the array's size; return a request."""

    def iprobe(self, tag: int) -> int | None:
        """Return a rank of which a message with this tag can be received, or None."""

    def testall(self, requests: Sequence[Any]) -> bool:
        """Make progress, and return whether all requests are complete."""

    def waitall(self, requests: Sequence[Any]) -> None:
        """Wait until all requests are complete; long waits sleep."""

    def wait_any_or_message(self, requests: Sequence[Any], tag: int) -> None:
        """Wait until a request is complete or a message with this tag can be received; long waits sleep."""

    def wait_any_group(self, groups: Sequence[Sequence[Any]], should_stop: Callable[[], bool]) -> int | None:
        """Wait until all requests of a group are complete, and return its index; long waits sleep.

        Return None if `should_stop`, which is polled, returns True first.
        """

    @property
    def start_coroutine(self) -> Callable[[CommCoroutine], Any] | None:
        """Function that runs a coroutine in a thread of its own; None if polling is as fast.

        It returns a request that is complete at the end of the coroutine.
        """

    def set_poll_hook(self, tag: int, hook: Callable[[], None]) -> None:
        """Call `hook` during all waits, repeatedly or when a message with this tag has arrived.

        The hook receives these messages, and must not wait for others.
        """

    def barrier(self, on_poll: Callable[[], None] | None = None) -> None:
        """Wait for all ranks, sleeping: a spinning barrier starves late ranks if ranks outnumber cores.

        `on_poll` may be called repeatedly, and raises if the barrier cannot complete.
        """

    def allocate_shared(self, ranks: Sequence[int], num_bytes: int) -> SharedMemory:
        """Allocate zeroed memory shared by ranks of one node, `num_bytes` each. Collective over these ranks.

        Raises TrainError if there is not enough memory, or if the ranks are on different nodes.
        """

    def close(self) -> None:
        """Release what the run needed; later messages cannot be probed for. Collective."""

    def now(self) -> float:
        """Seconds on this rank's clock."""

    def emulate_compute(self, seconds: float) -> None:
        """Spend time as a computation, but sleeping."""

    def agree(self, done: bool) -> bool:
        """Return on all alive ranks whether all are done and none has failed. Collective.

        If not, update `alive_ranks` and drop all messages sent before the call.
        """

    def allgather(self, obj: Any) -> list[Any]:
        """Gather small objects of all ranks, in rank order, None for failed ranks. Not for training data."""

    def gather(self, obj: Any) -> list[Any] | None:
        """Like `allgather`, but on the first alive rank only; None on the others."""

    def broadcast(self, obj: Any) -> Any:
        """Return the object of the first alive rank."""


class RealTimeRank:
    """A rank that is a process; see `transport.Transport`."""

    watchdog: Watchdog | None = None
    device_backends: Mapping[str, str] = MappingProxyType({})
    start_coroutine: Callable[[CommCoroutine], Any] | None = None

    def watch(self, watchdog: Watchdog, on_stall: Callable[[StalledError], None]) -> None:
        """Check all waits from now on.

        A wait that is too long raises StalledError; one inside another library calls `on_stall`, from a thread.
        """
        self.watchdog = watchdog

    def now(self) -> float:
        return time.perf_counter()

    def emulate_compute(self, seconds: float) -> None:
        time.sleep(seconds)

    def agree(self, done: bool) -> bool:
        return done


#: seconds between two checks of a rank that waits
CHECK_INTERVAL_S = 1.0
#: seconds that other ranks have to answer, and for which a rank that has answered leaves the report to the caller
_ANSWER_S, _SILENT_S = 5.0, 30.0
_MAX_LISTED_RANKS = 8


class StalledError(TrainError):
    """This rank has waited longer than the limit."""


class Watchdog:
    """Ends a rank that waits for others longer than a limit, and finds out for which ones.

    Ranks that wait answer roll calls. One whose wait exceeds the limit calls the roll: a rank that does not answer
    does not wait itself, so the others wait for it, directly or not: it is stopped, computes, or hangs in code of the
    script. If all answer, the ranks wait for each other, as after different calls.

    Args:
        limit_s: longest wait, in s; above 0.

    Attributes:
        limit_s: see above.
        format_rank: text of a rank for messages.
    """

    def __init__(self, transport: Transport, limit_s: float) -> None:
        self._transport, self.limit_s = transport, limit_s
        self.format_rank: Callable[[int], str] = lambda rank: f"rank {rank}"
        self._next_check = self._silent_until = 0.0
        #: keeps the buffers of messages alive that no rank has received
        self._requests: list[Any] = []

    def check(self, waited_s: float) -> None:
        """Call often while this rank waits. Raises StalledError after the limit.

        Of several ranks that have waited too long, the lowest calls the roll, and the others only answer.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_INTERVAL_S
        self._answer()
        if waited_s >= self.limit_s and now >= self._silent_until:
            missing = self._call_roll()
            if missing is not None:
                raise StalledError(self._text(waited_s, missing))

    def _answer(self) -> None:
        for peer in self._receive(Tag.ROLL_CALL):
            self._send(peer, Tag.ROLL_ANSWER)
            if peer < self._transport.rank:
                self._silent_until = time.monotonic() + _SILENT_S

    def _call_roll(self) -> list[int] | None:
        """The ranks that do not answer; None if a lower rank calls the roll, too."""
        missing = {rank for rank in self._transport.alive_ranks if rank != self._transport.rank}
        for rank in missing:
            self._send(rank, Tag.ROLL_CALL)
        end = time.monotonic() + _ANSWER_S
        while missing and time.monotonic() < end:
            time.sleep(0.01)
            missing -= set(self._receive(Tag.ROLL_ANSWER))
            self._answer()
            if time.monotonic() < self._silent_until:
                return None
        return sorted(missing)

    def _send(self, peer: int, tag: Tag) -> None:
        self._requests.append(self._transport.isend(peer, np.zeros(1, np.uint8), tag))

    def _receive(self, tag: Tag) -> list[int]:
        """The ranks whose messages with this tag have arrived."""
        sources = []
        while (peer := self._transport.iprobe(tag)) is not None:
            request = self._transport.irecv(peer, np.zeros(1, np.uint8), tag)
            while not self._transport.testall([request]):
                time.sleep(1e-3)
            sources.append(peer)
        return sources

    def _text(self, waited_s: float, missing: Sequence[int]) -> str:
        waited = f"waited {format_coarse_duration(waited_s)}"
        limit = f"(--timeout {self.limit_s:g})"
        if not missing:
            return f"{waited}, and all ranks wait for each other; expected the same calls on all ranks {limit}"
        listed = ", ".join(map(self.format_rank, missing[:_MAX_LISTED_RANKS]))
        more = f" and {len(missing) - _MAX_LISTED_RANKS} more" * (len(missing) > _MAX_LISTED_RANKS)
        verb = "is stopped, or does not wait" if len(missing) == 1 else "are stopped, or do not wait"
        return f"{waited} for {listed}{more}, which {verb} for other ranks {limit}"


#: dataclasses that ranks exchange -> module
_DATACLASSES: Mapping[str, str] = {
    "Plan": "slurmdl.plan", "Manifest": "slurmdl.train.library.checkpoint",
    "RankReport": "slurmdl.train.meters", "StepTotals": "slurmdl.train.meters"}
#: type -> its name in the text, which is a list of the name and the items
_COLLECTIONS: Mapping[type[Collection[Any]], str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
#: kinds of dtypes whose items are no pointers
_ARRAY_KINDS = "biufcSUmM"


def encode_object(obj: Any) -> bytes:
    """Encode an object as text; a subclass of a plain type, e.g. OrderedDict, arrives as the plain type.

    Raises TrainError if it contains anything else than numbers, strings, bytes, None, NumPy arrays, tensors,
    dataclasses of _DATACLASSES, and lists, tuples, sets and dicts of them.
    """
    return json.dumps(_to_json(obj)).encode()


def decode_object(data: bytes | npt.NDArray[np.uint8]) -> Any:
    """Inverse of `encode_object`, with tensors in host memory; TrainError if the data is not valid."""
    try:
        return _from_json(json.loads(bytes(data)))
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, SlurmdlError) as error:
        raise TrainError("malformed message from another rank; expected the same version of slurmdl on all "
                              "ranks, and no other program on their ports") from error


def _to_json(obj: Any) -> Any:
    if isinstance(obj, np.generic):
        return ["scalar", *_array_to_json(np.asarray(obj))]
    if obj is None or isinstance(obj, (bool, int, float, str)):
        return obj
    if isinstance(obj, (bytes, bytearray)):
        return ["bytes", b64encode(obj).decode()]
    if isinstance(obj, complex):
        return ["complex", obj.real, obj.imag]
    if isinstance(obj, np.ndarray):
        return ["array", *_array_to_json(obj)]
    if isinstance(obj, Mapping):
        return ["dict", *(_to_json(part) for item in obj.items() for part in item)]
    for collection, name in _COLLECTIONS.items():
        if isinstance(obj, collection):
            return [name, *(_to_json(item) for item in obj)]
    name = type(obj).__name__
    if _DATACLASSES.get(name) == type(obj).__module__:
        return [name, *(_to_json(getattr(obj, field.name)) for field in fields(obj))]
    torch = sys.modules.get("torch")
    if torch and isinstance(obj, torch.Tensor):
        flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return ["tensor", str(obj.dtype).removeprefix("torch."), list(obj.shape), b64encode(flat.numpy()).decode()]
    raise TrainError(f"{type(obj).__module__}.{name}: not an object that ranks can exchange; expected numbers, "
                          "strings, bytes, arrays, tensors, or lists, tuples, sets and dicts of them")


def _array_to_json(array: Any) -> list[Any]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise TrainError(f"array of {array.dtype}: not an object that ranks can exchange; expected an array of "
                              "numbers or strings")
    return [array.dtype.str, list(array.shape), b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def _from_json(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, *items = value
    if name in _DATACLASSES:
        return getattr(import_module(_DATACLASSES[name]), name)(*map(_from_json, items))
    return _READERS[name](items)


def _array_from_json(items: list[Any]) -> Any:
    dtype, shape, data = items
    dtype = np.dtype(dtype)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(dtype)
    return np.frombuffer(b64decode(data), dtype).reshape(shape).copy()


def _tensor_from_json(items: list[Any]) -> Any:
    import torch

    name, shape, data = items
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    raw = b64decode(data)
    flat = torch.zeros(len(raw), dtype=torch.uint8)
    flat[:] = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    return flat.view(dtype).reshape(shape)


def _dict_from_json(items: list[Any]) -> dict[Any, Any]:
    parts = list(map(_from_json, items))
    return dict(zip(parts[::2], parts[1::2], strict=True))


_READERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "bytes": lambda items: b64decode(items[0]), "complex": lambda items: complex(*items),
    "array": _array_from_json, "scalar": lambda items: _array_from_json(items)[()], "tensor": _tensor_from_json,
    "dict": _dict_from_json, "list": lambda items: list(map(_from_json, items)),
    "tuple": lambda items: tuple(map(_from_json, items)), "set": lambda items: set(map(_from_json, items)),
    "frozenset": lambda items: frozenset(map(_from_json, items))}
