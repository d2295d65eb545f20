"""Sums over ranks by messages: round one ring of all ranks, or in and between their zones, by rings or at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.p2p import CommCoroutine, MeteredP2P, split_offsets

FloatArray = npt.NDArray[np.float32]


class Ring:
    """This rank's place in a ring of ranks, each of which holds a vector of the same length.

    The vector is cut into as many nearly equal parts as there are ranks; the i-th part belongs to the i-th rank.

    Attributes
    ----------
    count : ranks of the ring.
    right, left : the next rank, to which messages go, and the one before, from which they come.
    """

    def __init__(self, rank: int, ranks: Sequence[int], vector: FloatArray) -> None:
        self.count, self._ranks = len(ranks), ranks
        self._position = ranks.index(rank)
        self.right, self.left = self.peer(1), self.peer(-1)
        self._vector = vector
        self._offsets = split_offsets(vector.size, self.count)

    def peer(self, distance: int) -> int:
        """The rank so many places to the right."""
        return self._ranks[(self._position + distance) % self.count]

    def chunk(self, distance: int) -> FloatArray:
        """The part (a view) of the rank so many places to the right, 0 for the own one."""
        at = (self._position + distance) % self.count
        return self._vector[self._offsets[at]:self._offsets[at + 1]]

    def scratch(self, wire_dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Room for the longest part, in this type."""
        return np.empty(-(-self._vector.size // self.count), wire_dtype)


def ring_reduce_scatter(p2p: MeteredP2P, rings: Sequence[Ring], wire_dtype: npt.DTypeLike, tag: int) -> CommCoroutine:
    """Replace the own part of each ring's vector by the sum over its ranks; the other parts are left half summed.

    The rings have the same number of ranks and turn together; all ranks name those they share in the same order.
    `wire` is the type in which values travel; they are added in fp32.
    """
    spare = [ring.scratch(wire_dtype) for ring in rings]
    for turn in range(1, _ring_size(rings)):
        sums = [ring.chunk(-1 - turn) for ring in rings]
        arrived = [room[:mine.size] for room, mine in zip(spare, sums, strict=True)]
        arriving, leaving = p2p.post([(ring.right, _to_wire(wire_dtype, ring.chunk(-turn))) for ring in rings],
                                          [(ring.left, into) for ring, into in zip(rings, arrived, strict=True)], tag)
        for number, (index, chunk, request) in enumerate(arriving):
            yield [request], not number
            sums[index][chunk] += arrived[index][chunk]
        yield leaving, False


def ring_allgather(p2p: MeteredP2P, rings: Sequence[Ring], wire_dtype: npt.DTypeLike, tag: int) -> CommCoroutine:
    """Hand the own part of each ring's vector to its other ranks; rings and `wire` as in `reduce_scatter`.

    All ranks keep what travelled, so that they have the same.
    """
    travelling = [_to_wire(wire_dtype, ring.chunk(0)) for ring in rings]
    if _ring_size(rings) > 1:
        _store_chunks(rings, 0, travelling)
    for turn in range(1, _ring_size(rings)):
        rooms = [_receive_buffer(wire_dtype, ring.chunk(-turn)) for ring in rings]
        arriving, leaving = p2p.post([(ring.right, part) for ring, part in zip(rings, travelling, strict=True)],
                                          [(ring.left, part) for ring, part in zip(rings, rooms, strict=True)], tag)
        requests = [request for _, _, request in arriving]
        yield requests[:1], True
        yield requests[1:] + leaving, False
        _store_chunks(rings, -turn, rooms)
        travelling = rooms


def direct_reduce_scatter(p2p: MeteredP2P, rings: Sequence[Ring],
                          wire_dtype: npt.DTypeLike, tag: int) -> CommCoroutine:
    """As `reduce_scatter`, in one turn: each rank sends each other one the part that belongs to it."""
    others = [(ring, ahead) for ring in rings for ahead in range(1, ring.count)]
    arrived = [np.empty(ring.chunk(0).size, wire_dtype) for ring, _ in others]
    arriving, leaving = p2p.post(
        [(ring.peer(ahead), _to_wire(wire_dtype, ring.chunk(ahead))) for ring, ahead in others],
        [(ring.peer(-ahead), room) for (ring, ahead), room in zip(others, arrived, strict=True)], tag)
    for number, (index, chunk, request) in enumerate(arriving):
        yield [request], not number
        others[index][0].chunk(0)[chunk] += arrived[index][chunk]
    yield leaving, False


def direct_allgather(p2p: MeteredP2P, rings: Sequence[Ring], wire_dtype: npt.DTypeLike, tag: int) -> CommCoroutine:
    """As `allgather`, in one turn: each rank sends its own part to all others."""
    others = [(ring, ahead) for ring in rings for ahead in range(1, ring.count)]
    rooms = [_receive_buffer(wire_dtype, ring.chunk(-ahead)) for ring, ahead in others]
    own = {ring: _to_wire(wire_dtype, ring.chunk(0)) for ring in rings}
    arriving, leaving = p2p.post(
        [(ring.peer(ahead), own[ring]) for ring, ahead in others],
        [(ring.peer(-ahead), room) for (ring, ahead), room in zip(others, rooms, strict=True)], tag)
    requests = [request for _, _, request in arriving]
    yield requests[:1], True
    yield requests[1:] + leaving, False
    for (ring, ahead), room in zip(others, rooms, strict=True):
        _store_chunks([ring], -ahead, [room])
    for ring, part in own.items():
        if ring.count > 1:
            _store_chunks([ring], 0, [part])


def _to_wire(wire_dtype: npt.DTypeLike, chunk: FloatArray) -> npt.NDArray[Any]:
    if chunk.dtype == wire_dtype:
        return chunk
    with np.errstate(over="ignore"):
        return chunk.astype(wire_dtype)  # what is beyond its range becomes infinite, and so is known to all


def _receive_buffer(wire_dtype: npt.DTypeLike, chunk: FloatArray) -> npt.NDArray[Any]:
    return chunk if chunk.dtype == wire_dtype else np.empty(chunk.size, wire_dtype)


def _store_chunks(rings: Sequence[Ring], distance: int, chunks: Sequence[npt.NDArray[Any]]) -> None:
    """Write parts that are elsewhere to their places in the vectors."""
    for ring, part in zip(rings, chunks, strict=True):
        if part.dtype != np.float32:
            ring.chunk(distance)[:] = part


def _ring_size(rings: Sequence[Ring]) -> int:
    return rings[0].count if rings else 0


class AllreduceOp:
    """Replaces a vector by its sum over the ranks of all groups, bit for bit alike on all of them.

    A reduce-scatter round each group leaves every rank with a sum over its group, its shard; the shards go round
    between the groups; an allgather round each group ends it. Each of Z groups sends 2 (Z - 1) / Z of the vector to
    the next group, and a group alone, of n ranks, 2 (n - 1) / n of it from rank to rank: no algorithm can do with
    less. Groups of other sizes have other shards: then a shard goes round in pieces, each between the ranks that
    hold it.

    Parameters
    ----------
    groups : ranks, each in one group; the same sequences on every rank.
    vector : contiguous, of the same length on every rank; `run` changes it in place.
    wire : the type in which values travel, float32 or float16; they are added in fp32. In float16 a partial sum is
        rounded whenever it leaves a rank, and the whole once more: the error among n ranks is, to first order, at
        most n (2^-11 S + 2^-25), S the sum of the magnitudes. Sums beyond 65,504 are cut off.
    at_once : inside this rank's group all send to all, in one turn, as many bytes as round the ring. All ranks of a
        group say the same.

    References
    ----------
    P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations.
    J. Parallel Distrib. Comput. 69 (2009). doi:10.1016/j.jpdc.2008.09.002
    M. Cho et al.: BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy.
    MLSys 2019.
    """

    def __init__(self, p2p: MeteredP2P, groups: Sequence[Sequence[int]], vector: FloatArray,
                 wire_dtype: npt.DTypeLike = np.float32, direct: bool = False) -> None:
        self._p2p, self._wire_dtype = p2p, wire_dtype
        rank = p2p.rank
        self._intra_group = [Ring(rank, group, vector) for group in groups if rank in group]
        self._reduce_scatter_phase, self._allgather_phase = (
            (direct_reduce_scatter, direct_allgather) if direct else (ring_reduce_scatter, ring_allgather))
        self._inter_group = []
        edges = [split_offsets(vector.size, len(group)) for group in groups]
        for begin, end in pairwise(sorted({border for edge in edges for border in edge})):
            holders = [group[bisect_right(edge, begin) - 1] for group, edge in zip(groups, edges, strict=True)]
            if rank in holders:
                self._inter_group.append(Ring(rank, holders, vector[begin:end]))

    def run(self, divisor: int = 1) -> None:
        """Sum what the vectors hold now, and divide by `count`."""
        self._p2p.run_to_completion(self.coroutine(divisor))

    def coroutine(self, divisor: int = 1, tag: int = 0) -> CommCoroutine:
        """As `run`, in steps; of sums that are under way at the same time each has a tag of its own."""
        messages, wire = self._p2p, self._wire_dtype
        yield from self._reduce_scatter_phase(messages, self._intra_group, wire, tag)
        yield from ring_reduce_scatter(messages, self._inter_group, wire, tag)
        if divisor != 1:  # on each rank its shard alone
            for ring in self._inter_group:
                shard = ring.chunk(0)
                shard /= np.float32(divisor)
        yield from ring_allgather(messages, self._inter_group, wire, tag)
        yield from self._allgather_phase(messages, self._intra_group, wire, tag)


# MERGED: Several flows of messages at once: while one of them is between zones, another one can be inside.

class CollectivePipeline:
    """Flows that are under way. Each has a tag of its own, so that ranks may come to them in any order."""

    def __init__(self, p2p: MeteredP2P) -> None:
        self._p2p = p2p
        self._in_flight: list[CommCoroutine] = []
        #: what each of them waits for
        self._pending_waits: list[tuple[Sequence[Any], bool]] = []

    def add(self, coroutine: CommCoroutine) -> None:
        """Begin a flow."""
        self._advance(coroutine, len(self._in_flight))

    def progress(self, max_in_flight: int = 0, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Carry on the flows until there are no more than `most`, or until `stop`; the oldest go first."""
        messages = self._p2p
        while len(self._in_flight) > max_in_flight:
            nothing_there = all(first for _, first in self._pending_waits)
            with messages.timing_wait() if nothing_there else nullcontext():
                which = messages.transport.wait_any_group(
                    [requests for requests, _ in self._pending_waits], should_stop)
            if which is None:
                return
            self._pending_waits.pop(which)
            self._advance(self._in_flight.pop(which), which)

    def _advance(self, coroutine: CommCoroutine, position: int) -> None:
        wait = next(coroutine, None)
        if wait is not None:
            self._in_flight.insert(position, coroutine)
            self._pending_waits.insert(position, wait)


# MERGED: What every rank gives, told to all by messages of a few bytes.

def bruck_allgather(p2p: MeteredP2P, ranks: Sequence[int], value: float) -> npt.NDArray[np.float32]:
    """The value of each of these ranks, in their order; a call of all of them.

    Each sends 4 (n - 1) bytes in log2 n messages.

    References
    ----------
    J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby: Efficient algorithms for all-to-all communications in
    multiport message-passing systems. IEEE Trans. Parallel Distrib. Syst. 8 (1997). doi:10.1109/71.642949
    """
    count, place = len(ranks), ranks.index(p2p.rank)
    values = np.empty(count, np.float32)
    values[0] = value
    known = 1
    while known < count:
        more = min(known, count - known)
        p2p.exchange([(ranks[place - known], values[:more])],
                          [(ranks[(place + known) % count], values[known:known + more])])
        known += more
    return np.roll(values, place)
