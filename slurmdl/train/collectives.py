"""Collectives by point-to-point messages: allreduce by rings or directly, pipelining, and allgather of scalars."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.comm_layout import shard_pieces, split_offsets
from slurmdl.train.p2p import Arrays, MeteredP2P
from slurmdl.train.transports.transport import CommCoroutine, Tag
from slurmdl.train.transports.window import PAGE_BYTES, SharedMemory

FloatArray = npt.NDArray[np.float32]


class Ring:
    """This rank's view of a ring of `count` ranks, each with a vector of equal length.

    The vector is split into one nearly equal chunk per rank.
    """

    def __init__(self, rank: int, ranks: Sequence[int], vector: FloatArray) -> None:
        self.count, self._ranks = len(ranks), ranks
        self._position = ranks.index(rank)
        self._vector = vector
        self._offsets = split_offsets(vector.size, self.count)

    def peer(self, distance: int) -> int:
        """The rank at a distance to the right."""
        return self._ranks[(self._position + distance) % self.count]

    def chunk(self, distance: int) -> FloatArray:
        """View of the chunk of the rank at a distance to the right, 0 for this rank's."""
        index = (self._position + distance) % self.count
        return self._vector[self._offsets[index]:self._offsets[index + 1]]

    def scratch(self, wire_dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A buffer for the longest chunk."""
        return np.empty(-(-self._vector.size // self.count), wire_dtype)


def ring_reduce_scatter(p2p: MeteredP2P, rings: Sequence[Ring], wire_dtype: npt.DTypeLike, tag: int) -> CommCoroutine:
    """Replace this rank's chunk of each ring's vector by its sum over the ranks; other chunks become partial sums.

    The rings have equal size and turn together; all ranks list common rings in the same order. Values travel as
    `wire_dtype`, and are added in fp32.
    """
    buffers = [ring.scratch(wire_dtype) for ring in rings]
    for turn in range(1, _ring_size(rings)):
        sums = [ring.chunk(-1 - turn) for ring in rings]
        yield from _exchange_and_add(
            p2p, [(ring.peer(1), _to_wire(wire_dtype, ring.chunk(-turn))) for ring in rings],
            [(ring.peer(-1), buffer[:chunk_sum.size])
             for ring, buffer, chunk_sum in zip(rings, buffers, sums, strict=True)], sums, tag)


def ring_allgather(p2p: MeteredP2P, rings: Sequence[Ring], wire_dtype: npt.DTypeLike, tag: int) -> CommCoroutine:
    """Send this rank's chunk of each ring's vector to the other ranks; see `ring_reduce_scatter`.

    All ranks store the values as sent, so that these are equal everywhere.
    """
    outgoing = [_to_wire(wire_dtype, ring.chunk(0)) for ring in rings]
    _store_chunks(rings, 0, outgoing)
    for turn in range(1, _ring_size(rings)):
        received = [_receive_buffer(wire_dtype, ring.chunk(-turn)) for ring in rings]
        yield from exchange_arrays(p2p, [(ring.peer(1), chunk) for ring, chunk in zip(rings, outgoing, strict=True)],
                             [(ring.peer(-1), buffer) for ring, buffer in zip(rings, received, strict=True)], tag)
        _store_chunks(rings, -turn, received)
        outgoing = received


def direct_reduce_scatter(p2p: MeteredP2P, rings: Sequence[Ring],
                          wire_dtype: npt.DTypeLike, tag: int) -> CommCoroutine:
    """Like `ring_reduce_scatter` with one ring, in one turn: each rank sends each other rank its chunk."""
    [ring] = rings
    own, distances = ring.chunk(0), range(1, ring.count)
    yield from _exchange_and_add(
        p2p, [(ring.peer(distance), _to_wire(wire_dtype, ring.chunk(distance))) for distance in distances],
        [(ring.peer(-distance), np.empty(own.size, wire_dtype)) for distance in distances],
        [own] * len(distances), tag)


def direct_allgather(p2p: MeteredP2P, rings: Sequence[Ring], wire_dtype: npt.DTypeLike, tag: int) -> CommCoroutine:
    """Like `ring_allgather` with one ring, in one turn: each rank sends its own chunk to all others."""
    [ring] = rings
    own, distances = _to_wire(wire_dtype, ring.chunk(0)), range(1, ring.count)
    received = [_receive_buffer(wire_dtype, ring.chunk(-distance)) for distance in distances]
    yield from exchange_arrays(
        p2p, [(ring.peer(distance), own) for distance in distances],
        [(ring.peer(-distance), buffer) for distance, buffer in zip(distances, received, strict=True)], tag)
    for distance, chunk in enumerate([own, *received]):
        _store_chunks(rings, -distance, [chunk])


def exchange_arrays(p2p: MeteredP2P, sends: Arrays, receives: Arrays, tag: int) -> CommCoroutine:
    """Send and receive arrays concurrently, in chunks."""
    recv_chunks, send_requests = p2p.post(sends, receives, tag)
    requests = [request for _, _, request in recv_chunks]
    yield requests[:1], True
    yield requests[1:] + send_requests, False


def _exchange_and_add(p2p: MeteredP2P, sends: Arrays, receives: Arrays, sums: Sequence[FloatArray],
                      tag: int) -> CommCoroutine:
    """Add each received chunk to the entry of `sums` with the index of its array, while the next ones arrive."""
    recv_chunks, send_requests = p2p.post(sends, receives, tag)
    for number, (index, chunk, request) in enumerate(recv_chunks):
        yield [request], not number
        sums[index][chunk] += receives[index][1][chunk]
    yield send_requests, False


def _to_wire(wire_dtype: npt.DTypeLike, chunk: FloatArray) -> npt.NDArray[Any]:
    if chunk.dtype == wire_dtype:
        return chunk
    with np.errstate(over="ignore"):
        return chunk.astype(wire_dtype)  # overflow becomes infinite, which all ranks detect


def _receive_buffer(wire_dtype: npt.DTypeLike, chunk: FloatArray) -> npt.NDArray[Any]:
    return chunk if chunk.dtype == wire_dtype else np.empty(chunk.size, wire_dtype)


def _store_chunks(rings: Sequence[Ring], distance: int, chunks: Sequence[npt.NDArray[Any]]) -> None:
    """Copy chunks as sent into the vectors, unless they are there or were not sent."""
    for ring, chunk in zip(rings, chunks, strict=True):
        if chunk.dtype != np.float32 and ring.count > 1:
            ring.chunk(distance)[:] = chunk


def _ring_size(rings: Sequence[Ring]) -> int:
    return rings[0].count if rings else 0


class AllreduceOp:
    """Replaces a vector by its sum over the ranks of all groups, bitwise equal on all of them.

    A reduce-scatter in each group gives every rank a shard of the group's sum, an allreduce between the groups sums
    each shard, and an allgather in each group completes the vector. Each of Z groups sends 2 (Z - 1) / Z of the
    vector to the next group. Within a single group of n ranks, each sends 2 (n - 1) / n of it, which is optimal. If
    groups differ in size, so do their shards: then the shards are split into pieces with one holder per group.

    Args:
        groups: disjoint groups of ranks; the same on every rank.
        vector: contiguous, of equal length on every rank; `run` changes it in place.
        wire_dtype: float32 or float16 for transport; sums are in fp32. As float16, a partial sum is rounded whenever
            it is sent, and the sum once more: the error over n ranks is, to first order, at most n (2^-11 S + 2^-25),
            S the sum of the magnitudes. Sums beyond 65,504 overflow.
        direct: use the direct algorithm in this rank's group: one turn, the same bytes. Equal for all ranks of a
            group.

    Reference: P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. J.
    Parallel Distrib. Comput. 69 (2009). doi:10.1016/j.jpdc.2008.09.002 M. Cho et al.: BlueConnect: decomposing
    all-reduce for deep learning on heterogeneous network hierarchy. MLSys 2019.
    """

    def __init__(self, p2p: MeteredP2P, groups: Sequence[Sequence[int]], vector: FloatArray,
                 wire_dtype: npt.DTypeLike = np.float32, direct: bool = False) -> None:
        self._p2p, self._wire_dtype = p2p, wire_dtype
        rank = p2p.rank
        self._intra_group = [Ring(rank, group, vector) for group in groups if rank in group]
        self._reduce_scatter_phase, self._allgather_phase = (
            (direct_reduce_scatter, direct_allgather) if direct else (ring_reduce_scatter, ring_allgather))
        self._inter_group = [Ring(rank, holders, vector[part])
                             for part, holders in shard_pieces(vector.size, groups) if rank in holders]

    def run(self, divisor: int = 1) -> None:
        self._p2p.run_to_completion(self.coroutine(divisor))

    def coroutine(self, divisor: int = 1, tag: int = Tag.STEP) -> CommCoroutine:
        """Sum the vectors and divide by `divisor`, as a coroutine; concurrent allreduces need different tags."""
        p2p, wire_dtype = self._p2p, self._wire_dtype
        yield from self._reduce_scatter_phase(p2p, self._intra_group, wire_dtype, tag)
        yield from ring_reduce_scatter(p2p, self._inter_group, wire_dtype, tag)
        if divisor != 1:  # each rank divides its own shard
            for ring in self._inter_group:
                shard = ring.chunk(0)
                shard /= np.float32(divisor)
        yield from ring_allgather(p2p, self._inter_group, wire_dtype, tag)
        yield from self._allgather_phase(p2p, self._intra_group, wire_dtype, tag)


class CollectivePipeline:
    """Several coroutines in flight: one communicates between zones while another one does inside.

    Each has a tag of its own, so ranks may advance them in any order. Each runs in a thread if the transport has
    `start_coroutine`.
    """

    def __init__(self, p2p: MeteredP2P) -> None:
        self._p2p, self._lock = p2p, threading.Lock()
        #: threads of coroutines, and those that wait for the first part of a message
        self._num_threads = self._num_waiting = 0
        #: each with what it waits for, as yielded
        self._in_flight: list[tuple[CommCoroutine, tuple[Sequence[Any], bool]]] = []

    def add(self, coroutine: CommCoroutine) -> None:
        start = self._p2p.transport.start_coroutine
        if start:
            coroutine = iter([([start(self._counted(coroutine))], False)])
        self._advance(coroutine, len(self._in_flight))

    def _counted(self, coroutine: CommCoroutine) -> CommCoroutine:
        """The coroutine of a thread: while all threads wait for the first part of a message, this rank waits."""
        self._count(threads=1)
        for requests, is_first in coroutine:
            self._count(waiting=int(is_first))
            yield requests, is_first
            self._count(waiting=-int(is_first))
        self._count(threads=-1)

    def _count(self, threads: int = 0, waiting: int = 0) -> None:
        with self._lock:
            self._num_threads += threads
            self._num_waiting += waiting
            self._p2p.set_peer_wait(0 < self._num_threads == self._num_waiting)

    def progress(self, max_in_flight: int = 0, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Advance the coroutines, oldest first, until at most `max_in_flight` remain, or until `should_stop`."""
        while len(self._in_flight) > max_in_flight:
            none_arrived = all(first for _, (_, first) in self._in_flight)
            with self._p2p.timing_wait() if none_arrived else nullcontext():
                index = self._p2p.transport.wait_any_group(
                    [requests for _, (requests, _) in self._in_flight], should_stop)
            if index is None:
                return
            coroutine, _ = self._in_flight.pop(index)
            self._advance(coroutine, index)

    @property
    def is_busy(self) -> bool:
        """Whether coroutines are in flight."""
        return bool(self._in_flight)

    def _advance(self, coroutine: CommCoroutine, position: int) -> None:
        wait = next(coroutine, None)
        if wait is not None:
            self._in_flight.insert(position, (coroutine, wait))


def bruck_allgather(p2p: MeteredP2P, ranks: Sequence[int], value: float) -> npt.NDArray[np.float32]:
    """Gather one value of each rank, in the order of `ranks`. Collective over them.

    Each rank sends 4 (n - 1) bytes in log2 n messages.

    Reference: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby: Efficient algorithms for all-to-all
    communications in multiport message-passing systems. IEEE Trans. Parallel Distrib. Syst. 8 (1997).
    doi:10.1109/71.642949
    """
    count, position = len(ranks), ranks.index(p2p.rank)
    values = np.empty(count, np.float32)
    values[0] = value
    known = 1
    while known < count:
        more = min(known, count - known)
        p2p.exchange([(ranks[position - known], values[:more])],
                     [(ranks[(position + known) % count], values[known:known + more])])
        known += more
    return np.roll(values, position)


#: elements that are summed at a time, so that partial sums stay in the cache (256 KiB)
_SUM_BLOCK = 1 << 16
#: what a rank announces for a bucket: its vector is complete, or its chunk of the sum is in all vectors
_READY, _SUMMED = 0, 1


class NodeVectors:
    """A vector of each rank of a node, in shared memory, and the sum that replaces all of them.

    The sum is computed in buckets. In each bucket, every rank sums one chunk of all vectors, and then stores the
    result in all of them. Counters say how often a rank has completed its part. A rank may change its vector again
    when all have announced the sum.

    Args:
        allocate_shared: see Transport.allocate_shared.
        ranks: of the node, with this one. Collective over them.
        buckets: slices of the vector.

    Attributes:
        buckets: as given.
        vector: shape (size,), this rank's.
        neighbors: the next and the previous rank in the order of `ranks`, in a ring.
    """

    def __init__(self, allocate_shared: Callable[[Sequence[int], int], SharedMemory], rank: int, ranks: Sequence[int],
                 buckets: Sequence[slice]) -> None:
        self._rank, self._peers = rank, [peer for peer in ranks if peer != rank]
        size, own = buckets[-1].stop, ranks.index(rank)
        self.neighbors = ranks[(own + 1) % len(ranks)], ranks[own - 1]
        control_bytes, vector_bytes = (-(-count // PAGE_BYTES) * PAGE_BYTES
                                       for count in (16 * len(buckets), 4 * size))
        self._memory = allocate_shared(ranks, control_bytes + vector_bytes)
        #: rank -> counters, shape (2, buckets)
        self._counters: dict[int, npt.NDArray[np.int64]] = {
            peer: self._memory.segment(peer)[:16 * len(buckets)].view(np.int64).reshape(2, -1) for peer in ranks}
        self._vectors = [self._memory.segment(peer)[control_bytes:control_bytes + 4 * size].view(np.float32)
                         for peer in ranks]
        self.vector = self._vectors[own]
        self._block_sum = np.empty(_SUM_BLOCK, np.float32)
        self.buckets = list(buckets)
        self._chunks = []
        for bucket in buckets:
            offsets = split_offsets(bucket.stop - bucket.start, len(ranks))
            self._chunks.append(slice(bucket.start + offsets[own], bucket.start + offsets[own + 1]))

    def announce(self, phase: int, bucket: int) -> Any:
        """Announce that this rank has completed a phase of a bucket; the request waits for the others."""
        self._memory.fence()
        self._counters[self._rank][phase, bucket] += 1
        self._memory.fence()
        count = int(self._counters[self._rank][phase, bucket])
        others = [self._counters[peer][phase] for peer in self._peers]
        return self._memory.request(lambda: all(counters[bucket] >= count for counters in others),
                                    "the ranks of its node")

    def sum_chunk(self, bucket: int) -> None:
        """Replace this rank's chunk of its vector by the sum, in rank order."""
        self._sum_into([self.vector], bucket, 1)

    def store_mean_chunk(self, bucket: int, divisor: int) -> None:
        """`sum_chunk`, division and `store_chunk` in one pass through memory."""
        self._sum_into(self._vectors, bucket, divisor)

    def _sum_into(self, targets: Sequence[FloatArray], bucket: int, divisor: int) -> None:
        chunk = self._chunks[bucket]
        for begin in range(chunk.start, chunk.stop, _SUM_BLOCK):
            block = slice(begin, min(begin + _SUM_BLOCK, chunk.stop))
            total = self._vectors[0][block]
            for vector in self._vectors[1:]:
                total = np.add(total, vector[block], out=self._block_sum[:block.stop - begin])
            np.divide(total, np.float32(divisor), out=targets[0][block])
            for vector in targets[1:]:
                vector[block] = targets[0][block]

    def store_chunk(self, bucket: int) -> None:
        """Copy this rank's chunk into the vectors of the others."""
        chunk = self._chunks[bucket]
        for vector in self._vectors:
            if vector is not self.vector:
                vector[chunk] = self.vector[chunk]

    def close(self) -> None:
        """Free the memory. Collective over the ranks of the node."""
        self._counters, self._vectors = {}, []
        self.vector = np.empty(0, np.float32)
        self._memory.close()


class NodeAllreduceOp:
    """As collectives.AllreduceOp, with shared memory inside nodes; for one bucket of `vectors`.

    Each rank holds a shard of its node's sum, and sums it with the holders of the same elements on the other nodes.

    Args:
        nodes: the ranks of each node; the same on every rank.
        groups: as for AllreduceOp; a node's ranks are in one group.
        make_inter_node: makes the allreduce of groups of holders, one per node, for a part of the vector.
    """

    def __init__(self, p2p: MeteredP2P, vectors: NodeVectors, bucket: int, nodes: Sequence[Sequence[int]],
                 groups: Sequence[Sequence[int]],
                 make_inter_node: Callable[[Sequence[Sequence[int]], FloatArray], AllreduceOp]) -> None:
        self._p2p, self._vectors, self._bucket = p2p, vectors, bucket
        vector = vectors.vector[vectors.buckets[bucket]]
        self._is_one_node = len(nodes) == 1
        self._inter_node = [] if self._is_one_node else [
            make_inter_node(_groups_of(holders, groups), vector[part])
            for part, holders in shard_pieces(vector.size, nodes) if p2p.rank in holders]

    def coroutine(self, divisor: int = 1, tag: int = Tag.STEP) -> CommCoroutine:
        """As AllreduceOp.coroutine.

        With Tag.STEP, the ranks of a node also send each other empty messages, by which a rank that has ended detects
        that others continue.
        """
        vectors, bucket = self._vectors, self._bucket
        ready = vectors.announce(_READY, bucket)
        messages = self._notify_next_rank() if tag == Tag.STEP else []
        yield [ready, *messages], True
        if self._is_one_node:
            vectors.store_mean_chunk(bucket, divisor)
        else:
            vectors.sum_chunk(bucket)
            for op in self._inter_node:
                yield from op.coroutine(divisor, tag)
            vectors.store_chunk(bucket)
        yield [vectors.announce(_SUMMED, bucket)], False

    def _notify_next_rank(self) -> list[Any]:
        """Requests of empty messages around the ranks of the node."""
        following, previous = self._vectors.neighbors
        if following == self._p2p.rank:
            return []
        empty = np.empty(0, np.uint8)
        return [self._p2p.transport.irecv(previous, empty, Tag.STEP), self._p2p.isend(following, empty, Tag.STEP)]


def _groups_of(ranks: Sequence[int], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The groups without other ranks, and without empty groups."""
    parts = ([rank for rank in group if rank in ranks] for group in groups)
    return [part for part in parts if part]
