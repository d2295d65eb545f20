"""Sums over ranks by messages: round one ring of all ranks, or in and between their zones, by rings or at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.train.messages import Flow, Messages, bounds

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
        self._place = ranks.index(rank)
        self.right, self.left = self.peer(1), self.peer(-1)
        self._vector = vector
        self._edge = bounds(vector.size, self.count)

    def peer(self, ahead: int) -> int:
        """The rank so many places to the right."""
        return self._ranks[(self._place + ahead) % self.count]

    def part(self, ahead: int) -> FloatArray:
        """The part (a view) of the rank so many places to the right, 0 for the own one."""
        at = (self._place + ahead) % self.count
        return self._vector[self._edge[at]:self._edge[at + 1]]

    def spare(self, wire: npt.DTypeLike) -> npt.NDArray[Any]:
        """Room for the longest part, in this type."""
        return np.empty(-(-self._vector.size // self.count), wire)


def reduce_scatter(messages: Messages, rings: Sequence[Ring], wire: npt.DTypeLike, tag: int) -> Flow:
    """Replace the own part of each ring's vector by the sum over its ranks; the other parts are left half summed.

    The rings have the same number of ranks and turn together; all ranks name those they share in the same order.
    `wire` is the type in which values travel; they are added in fp32.
    """
    spare = [ring.spare(wire) for ring in rings]
    for turn in range(1, _count(rings)):
        sums = [ring.part(-1 - turn) for ring in rings]
        arrived = [room[:mine.size] for room, mine in zip(spare, sums, strict=True)]
        arriving, leaving = messages.post([(ring.right, _as(wire, ring.part(-turn))) for ring in rings],
                                          [(ring.left, into) for ring, into in zip(rings, arrived, strict=True)], tag)
        for number, (index, chunk, request) in enumerate(arriving):
            yield [request], not number
            sums[index][chunk] += arrived[index][chunk]
        yield leaving, False


def allgather(messages: Messages, rings: Sequence[Ring], wire: npt.DTypeLike, tag: int) -> Flow:
    """Hand the own part of each ring's vector to its other ranks; rings and `wire` as in `reduce_scatter`.

    All ranks keep what travelled, so that they have the same.
    """
    travelling = [_as(wire, ring.part(0)) for ring in rings]
    if _count(rings) > 1:
        _keep(rings, 0, travelling)
    for turn in range(1, _count(rings)):
        rooms = [_room(wire, ring.part(-turn)) for ring in rings]
        arriving, leaving = messages.post([(ring.right, part) for ring, part in zip(rings, travelling, strict=True)],
                                          [(ring.left, part) for ring, part in zip(rings, rooms, strict=True)], tag)
        requests = [request for _, _, request in arriving]
        yield requests[:1], True
        yield requests[1:] + leaving, False
        _keep(rings, -turn, rooms)
        travelling = rooms


def reduce_scatter_at_once(messages: Messages, rings: Sequence[Ring], wire: npt.DTypeLike, tag: int) -> Flow:
    """As `reduce_scatter`, in one turn: each rank sends each other one the part that belongs to it."""
    others = [(ring, ahead) for ring in rings for ahead in range(1, ring.count)]
    arrived = [np.empty(ring.part(0).size, wire) for ring, _ in others]
    arriving, leaving = messages.post(
        [(ring.peer(ahead), _as(wire, ring.part(ahead))) for ring, ahead in others],
        [(ring.peer(-ahead), room) for (ring, ahead), room in zip(others, arrived, strict=True)], tag)
    for number, (index, chunk, request) in enumerate(arriving):
        yield [request], not number
        others[index][0].part(0)[chunk] += arrived[index][chunk]
    yield leaving, False


def allgather_at_once(messages: Messages, rings: Sequence[Ring], wire: npt.DTypeLike, tag: int) -> Flow:
    """As `allgather`, in one turn: each rank sends its own part to all others."""
    others = [(ring, ahead) for ring in rings for ahead in range(1, ring.count)]
    rooms = [_room(wire, ring.part(-ahead)) for ring, ahead in others]
    own = {ring: _as(wire, ring.part(0)) for ring in rings}
    arriving, leaving = messages.post(
        [(ring.peer(ahead), own[ring]) for ring, ahead in others],
        [(ring.peer(-ahead), room) for (ring, ahead), room in zip(others, rooms, strict=True)], tag)
    requests = [request for _, _, request in arriving]
    yield requests[:1], True
    yield requests[1:] + leaving, False
    for (ring, ahead), room in zip(others, rooms, strict=True):
        _keep([ring], -ahead, [room])
    for ring, part in own.items():
        if ring.count > 1:
            _keep([ring], 0, [part])


def _as(wire: npt.DTypeLike, part: FloatArray) -> npt.NDArray[Any]:
    if part.dtype == wire:
        return part
    with np.errstate(over="ignore"):
        return part.astype(wire)  # what is beyond its range becomes infinite, and so is known to all


def _room(wire: npt.DTypeLike, part: FloatArray) -> npt.NDArray[Any]:
    return part if part.dtype == wire else np.empty(part.size, wire)


def _keep(rings: Sequence[Ring], ahead: int, parts: Sequence[npt.NDArray[Any]]) -> None:
    """Write parts that are elsewhere to their places in the vectors."""
    for ring, part in zip(rings, parts, strict=True):
        if part.dtype != np.float32:
            ring.part(ahead)[:] = part


def _count(rings: Sequence[Ring]) -> int:
    return rings[0].count if rings else 0


class Sum:
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

    def __init__(self, messages: Messages, groups: Sequence[Sequence[int]], vector: FloatArray,
                 wire: npt.DTypeLike = np.float32, at_once: bool = False) -> None:
        self._messages, self._wire = messages, wire
        rank = messages.rank
        self._inside = [Ring(rank, group, vector) for group in groups if rank in group]
        self._inward, self._outward = (
            (reduce_scatter_at_once, allgather_at_once) if at_once else (reduce_scatter, allgather))
        self._between = []
        edges = [bounds(vector.size, len(group)) for group in groups]
        for begin, end in pairwise(sorted({border for edge in edges for border in edge})):
            holders = [group[bisect_right(edge, begin) - 1] for group, edge in zip(groups, edges, strict=True)]
            if rank in holders:
                self._between.append(Ring(rank, holders, vector[begin:end]))

    def run(self, count: int = 1) -> None:
        """Sum what the vectors hold now, and divide by `count`."""
        self._messages.follow(self.flow(count))

    def flow(self, count: int = 1, tag: int = 0) -> Flow:
        """As `run`, in steps; of sums that are under way at the same time each has a tag of its own."""
        messages, wire = self._messages, self._wire
        yield from self._inward(messages, self._inside, wire, tag)
        yield from reduce_scatter(messages, self._between, wire, tag)
        if count != 1:  # on each rank its shard alone
            for ring in self._between:
                shard = ring.part(0)
                shard /= np.float32(count)
        yield from allgather(messages, self._between, wire, tag)
        yield from self._outward(messages, self._inside, wire, tag)
