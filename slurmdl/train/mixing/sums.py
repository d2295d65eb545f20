"""Sums over ranks by rings of messages: one ring of all ranks, or rings in and between their zones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from slurmdl.train.messages import Messages, bounds

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
        self.count = len(ranks)
        self._place = ranks.index(rank)
        self.right, self.left = ranks[(self._place + 1) % self.count], ranks[self._place - 1]
        self._vector = vector
        self._edge = bounds(vector.size, self.count)

    def part(self, ahead: int) -> FloatArray:
        """The part (a view) of the rank so many places to the right, 0 for the own one."""
        at = (self._place + ahead) % self.count
        return self._vector[self._edge[at]:self._edge[at + 1]]

    def spare(self) -> FloatArray:
        """Room for the longest part."""
        return np.empty(-(-self._vector.size // self.count), np.float32)


def reduce_scatter(messages: Messages, rings: Sequence[Ring]) -> None:
    """Replace the own part of each ring's vector by the sum over its ranks; the other parts are left half summed.

    The rings have the same number of ranks and turn together; all ranks name those they share in the same order.
    """
    spare = [ring.spare() for ring in rings]
    for turn in range(1, _count(rings)):
        sums = [ring.part(-1 - turn) for ring in rings]
        arrived = [room[:mine.size] for room, mine in zip(spare, sums, strict=True)]
        for index, chunk in messages.stream([(ring.right, ring.part(-turn)) for ring in rings],
                                            [(ring.left, into) for ring, into in zip(rings, arrived, strict=True)]):
            sums[index][chunk] += arrived[index][chunk]


def allgather(messages: Messages, rings: Sequence[Ring]) -> None:
    """Hand the own part of each ring's vector to its other ranks; rings as in `reduce_scatter`."""
    for turn in range(1, _count(rings)):
        for _ in messages.stream([(ring.right, ring.part(1 - turn)) for ring in rings],
                                 [(ring.left, ring.part(-turn)) for ring in rings]):
            pass


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

    References
    ----------
    P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations.
    J. Parallel Distrib. Comput. 69 (2009). doi:10.1016/j.jpdc.2008.09.002
    M. Cho et al.: BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy.
    MLSys 2019.
    """

    def __init__(self, messages: Messages, groups: Sequence[Sequence[int]], vector: FloatArray) -> None:
        self._messages = messages
        rank = messages.rank
        self._inside = [Ring(rank, group, vector) for group in groups if rank in group]
        self._between = []
        edges = [bounds(vector.size, len(group)) for group in groups]
        for begin, end in pairwise(sorted({border for edge in edges for border in edge})):
            holders = [group[bisect_right(edge, begin) - 1] for group, edge in zip(groups, edges, strict=True)]
            if rank in holders:
                self._between.append(Ring(rank, holders, vector[begin:end]))

    def run(self) -> None:
        """Sum what the vectors hold now."""
        reduce_scatter(self._messages, self._inside)
        reduce_scatter(self._messages, self._between)
        allgather(self._messages, self._between)
        allgather(self._messages, self._inside)


def by_zone(ranks: Sequence[int], zones: Sequence[str]) -> list[list[int]]:
    """The ranks in groups of one zone, in the order of their first ranks; entry i of `zones` is that of rank i."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(zones[rank], []).append(rank)
    return list(groups.values())
