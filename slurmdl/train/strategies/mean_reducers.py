"""Mean of a vector over all workers, exact by rings or compressed by shard owners."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.plan import group_ranks
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.mixing.collectives import AllreduceOp
from slurmdl.train.p2p import split_offsets
from slurmdl.train.stateful import Stateful
from slurmdl.train.strategies.strategy import StrategyContext

FloatArray = npt.NDArray[np.float32]


class MeanReducer(Protocol):
    """Mean of a vector over all workers, bitwise equal on all of them.

    Attributes
    ----------
    message_bytes : that a rank sends for one mean.
    contribution : this rank's vector as it enters the mean.
    mean : of the contributions; its own compression error is added to the next one.
    """

    message_bytes: float
    contribution: FloatArray
    mean: FloatArray

    def reduce(self, vector: FloatArray, step: int, weights: Sequence[float]) -> None:
        """Compute the mean, weighted by weights with mean 1; an op on all workers."""


def make_mean_reducer(ctx: StrategyContext) -> MeanReducer:
    """Make a RingMean, or a CompressedMean if the configuration has compression."""
    return RingMean(ctx) if ctx.config.compression == "none" else CompressedMean(ctx)


class RingMean(Stateful, MeanReducer):
    """Mean in fp32 by one ring, or in and between the zones (`hierarchical`); see collectives.AllreduceOp."""

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
    """Compressed mean by shard owners.

    Each worker owns a shard: it receives the others' compressed vectors for it, and sends their mean, compressed with
    error feedback, around a ring.
    """

    state_fields = ("_residual",)

    def __init__(self, ctx: StrategyContext) -> None:
        self._p2p = ctx.p2p
        self._workers, self._worker_rank, self._seed = ctx.workers, ctx.worker_rank, ctx.seed
        self._compressor = COMPRESSORS[ctx.config.compression]
        self.contribution, self.mean = np.empty_like(ctx.parameters), np.empty_like(ctx.parameters)
        count, own = len(ctx.workers), self._worker_rank
        self._shards = [slice(*bounds) for bounds in pairwise(split_offsets(ctx.parameters.size, count))]
        self._residual = np.zeros(self._shards[own].stop - self._shards[own].start, np.float32)
        sizes = [self._compressor.packed_bytes(shard.stop - shard.start) for shard in self._shards]
        self._received_parts = [np.empty(sizes[own], np.uint8) for _ in self._workers]
        self._compressed_means = [np.empty(size, np.uint8) for size in sizes]
        # the shards of the others, and around the ring all but the next rank's
        self.message_bytes = float(2 * sum(sizes) - sizes[own] - sizes[(own + 1) % count])

    def reduce(self, vector: FloatArray, step: int, weights: Sequence[float]) -> None:
        random = np.random.default_rng((self._seed, self._worker_rank, step))
        compressor, own, workers = self._compressor, self._worker_rank, self._workers
        count, own_shard = len(workers), self._shards[own]
        packed = [compressor.compress(vector[shard], random) for shard in self._shards]
        for part, shard in zip(packed, self._shards, strict=True):
            compressor.decompress(part, self.contribution[shard])
        others = [other for other in range(count) if other != own]
        self._p2p.exchange_chunked([(workers[other], packed[other]) for other in others],
                                   [(workers[other], self._received_parts[other]) for other in others])
        mean = np.float32(weights[own]) * self.contribution[own_shard]
        decompressed = np.empty_like(self._residual)
        for other in others:
            compressor.decompress(self._received_parts[other], decompressed)
            decompressed *= np.float32(weights[other])
            mean += decompressed
        mean /= np.float32(count)
        mean += np.float32(compressor.feedback_decay) * self._residual
        means = self._compressed_means
        means[own] = compressor.compress(mean, random)
        right, left = workers[(own + 1) % count], workers[own - 1]
        for turn in range(1, count):
            self._p2p.exchange_chunked([(right, means[(own - turn + 1) % count])],
                                       [(left, means[(own - turn) % count])])
        for part, shard in zip(means, self._shards, strict=True):
            compressor.decompress(part, self.mean[shard])
        np.subtract(mean, self.mean[own_shard], out=self._residual)
