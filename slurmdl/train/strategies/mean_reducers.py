"""The mean of what all workers have, made shorter on the way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.plan import group_ranks
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.mixing.collectives import AllreduceOp
from slurmdl.train.p2p import MeteredP2P, split_offsets
from slurmdl.train.stateful import Stateful
from slurmdl.train.strategies.strategy import StrategyContext

FloatArray = npt.NDArray[np.float32]


class MeanReducer(Protocol):
    """The mean of a vector over all workers, bit for bit alike on all of them.

    Attributes
    ----------
    size : bytes that a rank sends for it.
    counted : what of this rank's vector went into the mean.
    mean : of what all ranks counted; what the compressor leaves out of it goes into the next one.
    """

    message_bytes: float
    contribution: FloatArray
    mean: FloatArray

    def reduce(self, vector: FloatArray, step: int, weights: Sequence[float]) -> None:
        """Make the mean, weighted, 1 in the mean for the workers; an errand of the courier, on all of them."""


def make_mean_reducer(ctx: StrategyContext) -> MeanReducer:
    """By rings where nothing is compressed, else by owners of shards."""
    return RingMean(ctx) if ctx.config.compression == "none" else CompressedMean(ctx)


class RingMean(Stateful, MeanReducer):
    """All of it in fp32: round the ring of ranks, or in and between the zones (`hierarchical`); see sums.Sum."""

    def __init__(self, ctx: StrategyContext) -> None:
        self.contribution = self.mean = np.empty_like(ctx.parameters)
        self._worker_count, self._worker_rank = np.float32(len(ctx.workers)), ctx.worker_rank
        groups = [ctx.workers]
        if ctx.config.comm_pattern == "hierarchical":
            groups = [tuple(group) for group in group_ranks(ctx.workers, ctx.zones)]
        self._allreduce_op = AllreduceOp(ctx.p2p, groups, self.mean)
        self.message_bytes = 8.0 * ctx.parameters.size * (1 - 1 / len(ctx.workers))

    def reduce(self, vector: FloatArray, step: int, weights: Sequence[float]) -> None:
        self.contribution = vector
        np.multiply(vector, np.float32(weights[self._worker_rank]), out=self.mean)
        self._allreduce_op.run()
        self.mean /= self._worker_count


class CompressedMean(Stateful, MeanReducer):
    """Each worker owns a shard: it receives all others' parts of it, compressed, and hands round their mean,
    compressed again, with what was left out of the mean before.
    """

    state_fields = ("_left_out",)

    def __init__(self, ctx: StrategyContext) -> None:
        self._p2p: MeteredP2P = ctx.p2p
        self._workers, self._worker_rank, self._seed = ctx.workers, ctx.worker_rank, ctx.seed
        self._compressor = COMPRESSORS[ctx.config.compression]
        self.contribution, self.mean = np.empty_like(ctx.parameters), np.empty_like(ctx.parameters)
        edge = split_offsets(ctx.parameters.size, len(ctx.workers))
        self._shards = [slice(begin, end) for begin, end in pairwise(edge)]
        own = self._shards[self._worker_rank]
        self._residual = np.zeros(own.stop - own.start, np.float32)
        sizes = [self._compressor.packed_bytes(shard.stop - shard.start) for shard in self._shards]
        self._received_parts = [np.empty(sizes[self._worker_rank], np.uint8) for _ in self._workers]
        self._compressed_means = [np.empty(size, np.uint8) for size in sizes]
        # all others' shards, and round the ring all but the one of the next rank
        self.message_bytes = float(2 *
    sum(sizes) -
    sizes[self._worker_rank] -
    sizes[(self._worker_rank +
    1) %
     len(sizes)])

    def reduce(self, vector: FloatArray, step: int, weights: Sequence[float]) -> None:
        random = np.random.default_rng((self._seed, self._worker_rank, step))
        compressor, place, count = self._compressor, self._worker_rank, len(self._workers)
        packed = [compressor.compress(vector[shard], random) for shard in self._shards]
        for part, shard in zip(packed, self._shards, strict=True):
            compressor.decompress(part, self.contribution[shard])
        others = [other for other in range(count) if other != place]
        self._p2p.exchange_chunked([(self._workers[other], packed[other]) for other in others],
                            [(self._workers[other], self._received_parts[other]) for other in others])
        total, part_of = np.float32(weights[place]) * \
                                    self.contribution[self._shards[place]], np.empty_like(self._residual)
        for other in others:
            compressor.decompress(self._received_parts[other], part_of)
            part_of *= np.float32(weights[other])
            total += part_of
        total /= np.float32(count)
        total += np.float32(compressor.feedback_decay) * self._residual
        self._compressed_means[place] = compressor.compress(total, random)
        right, left = self._workers[(place + 1) % count], self._workers[place - 1]
        for turn in range(1, count):
            self._p2p.exchange_chunked([(right, self._compressed_means[(place - turn + 1) % count])],
                                [(left, self._compressed_means[(place - turn) % count])])
        for its, shard in zip(self._compressed_means, self._shards, strict=True):
            compressor.decompress(its, self.mean[shard])
        np.subtract(total, self.mean[self._shards[place]], out=self._residual)
