"""Allreduce that sums vectors inside each node in shared memory, and by messages between nodes only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.comm_layout import shard_pieces, split_offsets
from slurmdl.train.mixing.collectives import AllreduceOp, FloatArray
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.transports.transport import CommCoroutine, Tag
from slurmdl.train.transports.window import PAGE_BYTES, SharedMemory

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
