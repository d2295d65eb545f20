"""Local SGD: workers train on their own for a while, then the mean of their changes moves the outer parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from slurmdl.comm_layout import split_offsets
from slurmdl.train.checkpointed_fields import CheckpointedFields
from slurmdl.train.collectives import AllreduceOp, CollectivePipeline, exchange_arrays
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.strategies.strategy import FloatArray, StrategyContext, TriggeredStrategy
from slurmdl.train.transports.transport import CommCoroutine, Tag
from slurmdl.train.triggers import CommCost


class RingMean(CheckpointedFields):
    """Mean of a vector over all workers in fp32, bitwise equal on all of them; see collectives.AllreduceOp.

    Attributes:
        contribution: this rank's vector as it enters the mean.
        mean: of the contributions.
    """

    def __init__(self, ctx: StrategyContext) -> None:
        self._ctx = ctx
        self.contribution = self.mean = np.empty_like(ctx.parameters)
        self._allreduce_op = AllreduceOp(ctx.p2p, ctx.allreduce_groups, self.mean)

    def reduce(self, vector: FloatArray, step: int, weights: Sequence[float], tag: int) -> CommCoroutine:
        """Compute the mean, weighted by weights with mean 1, as a coroutine on all workers."""
        self.contribution = vector
        np.multiply(vector, np.float32(weights[self._ctx.worker_rank]), out=self.mean)
        yield from self._allreduce_op.coroutine(len(self._ctx.workers), tag)


class CompressedMean(RingMean):
    """Compressed mean by shard owners; its own compression error is added to the next one.

    Each worker owns a shard: it receives the others' compressed vectors for it, and sends their mean, compressed with
    error feedback, around a ring.
    """

    state_fields = ("_residual",)

    def __init__(self, ctx: StrategyContext) -> None:
        self._ctx = ctx
        self._compressor = COMPRESSORS[ctx.config.compression]
        self.contribution, self.mean = np.empty_like(ctx.parameters), np.empty_like(ctx.parameters)
        count, own = len(ctx.workers), ctx.worker_rank
        self._shards = [slice(*bounds) for bounds in pairwise(split_offsets(ctx.parameters.size, count))]
        self._residual = np.zeros(self._shards[own].stop - self._shards[own].start, np.float32)
        sizes = [self._compressor.packed_bytes(shard.stop - shard.start) for shard in self._shards]
        self._received_parts = [np.empty(sizes[own], np.uint8) for _ in ctx.workers]
        self._compressed_means = [np.empty(size, np.uint8) for size in sizes]

    def reduce(self, vector: FloatArray, step: int, weights: Sequence[float], tag: int) -> CommCoroutine:
        p2p, workers, own, compressor = self._ctx.p2p, self._ctx.workers, self._ctx.worker_rank, self._compressor
        random = np.random.default_rng((self._ctx.seed, own, step))
        count, own_shard = len(workers), self._shards[own]
        packed = [compressor.compress(vector[shard], random) for shard in self._shards]
        for part, shard in zip(packed, self._shards, strict=True):
            compressor.decompress(part, self.contribution[shard])
        others = [other for other in range(count) if other != own]
        yield from exchange_arrays(p2p, [(workers[other], packed[other]) for other in others],
                                   [(workers[other], self._received_parts[other]) for other in others], tag)
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
            yield from exchange_arrays(p2p, [(right, means[(own - turn + 1) % count])],
                                       [(left, means[(own - turn) % count])], tag)
        for part, shard in zip(means, self._shards, strict=True):
            compressor.decompress(part, self.mean[shard])
        np.subtract(mean, self.mean[own_shard], out=self._residual)


def make_reducer(ctx: StrategyContext) -> RingMean:
    """Make the mean of vectors of the size of `ctx.parameters`, compressed as configured."""
    return (RingMean if ctx.config.compression == "none" else CompressedMean)(ctx)


#: share of a worker's own parameters in its model after an exchange that overlapped with steps
LOCAL_SHARE = np.float32(0.5)


class LocalSGD(TriggeredStrategy):
    """Outer momentum on the outer parameters z: u = mu u + mean(q), z += alpha (mean(q) + mu u), x = z.

    The pseudo-gradient q is the compressed change x - z, with error feedback.

    With fragments, the parts of the model are exchanged in turn, each once in a period. With an overlap, an exchange
    starts some steps before its due step, in the background of the steps in between; then x = (1 - m) z + m x, m the
    LOCAL_SHARE, keeps a part of what the worker has learned meanwhile.

    Reference: A. Douillard et al.: DiLoCo: distributed low-communication training of language models. 2023.
    arXiv:2311.08105 A. Douillard et al.: Streaming DiLoCo with overlapping communication. 2025. arXiv:2501.18512
    S. P. Karimireddy et al.: Error feedback fixes SignSGD. ICML 2019. arXiv:1901.09847
    """

    survives_rank_failure = True
    state_fields: tuple[str, ...] = ("_reducers", "_outer_parameters", "_outer_momentum", "_residual",
                                     "_pending_update")

    def __init__(self, ctx: StrategyContext) -> None:
        config, size = ctx.config, ctx.parameters.size
        self._fragments = [slice(*bounds) for bounds in pairwise(split_offsets(size, config.fragments))]
        self._reducers = {index: make_reducer(replace(ctx, parameters=ctx.parameters[fragment]))
                          for index, fragment in enumerate(self._fragments)}
        super().__init__(ctx, CommCost(0.0))  # only adaptive-gossip has a budget
        self._outer_parameters = ctx.parameters.copy()
        self._outer_momentum = np.zeros_like(self._outer_parameters)
        self._residual = np.zeros_like(self._outer_parameters)
        self._feedback_decay = np.float32(COMPRESSORS[config.compression].feedback_decay)
        self._pseudo_gradient = np.empty_like(self._outer_parameters)
        #: the exchange in flight, whether there is one, and the mean of one that is complete, but not applied
        self._pipeline, self._in_flight = CollectivePipeline(ctx.p2p), False
        self._pending_update: FloatArray | None = None

    def resume_from_average(self, states: Sequence[Mapping[str, Any]], step: int) -> None:
        super().resume_from_average(states, step)
        self._outer_parameters[:] = states[0]["_outer_parameters"].numpy()
        self._outer_momentum[:] = states[0]["_outer_momentum"].numpy()

    def start_exchange(self) -> None:
        ctx, part, reducer = self._ctx, self._fragment, self._reducer
        change, index, weights = self._pseudo_gradient[part], self.exchange_index, ctx.relative_weights
        np.subtract(ctx.parameters[part], self._outer_parameters[part], out=change)
        change += self._feedback_decay * self._residual[part]
        tag = self.overlap_tag if ctx.config.overlap else int(Tag.STEP)
        ctx.comm_thread.call(lambda: self._pipeline.add(reducer.reduce(change, index, weights, tag)))
        self._in_flight = True
        if ctx.config.overlap:
            ctx.comm_thread.add_poller(self._advance)

    def _advance(self) -> bool:
        """Advance the exchange in flight, as a poller, as far as its messages have arrived."""
        self._pipeline.progress(should_stop=lambda: True)
        return self._pipeline.is_busy

    def exchange(self) -> bool:
        if not self._in_flight and self._pending_update is None:
            self.start_exchange()
        self._complete_reduction()
        part, update, config = self._fragment, self._pending_update, self._ctx.config
        assert update is not None
        rate, momentum = map(np.float32, config.outer_step)
        velocity, outer = self._outer_momentum[part], self._outer_parameters[part]
        velocity *= momentum
        velocity += update
        outer += rate * (update + momentum * velocity)
        parameters = self._ctx.parameters[part]
        if config.overlap:
            parameters -= outer
            parameters *= LOCAL_SHARE
            parameters += outer
        else:
            parameters[:] = outer
        self._pending_update = None
        return True

    @property
    def _fragment(self) -> slice:
        """The part of the model of the current exchange."""
        return self._fragments[self.exchange_index % len(self._fragments)]

    @property
    def _reducer(self) -> RingMean:
        return self._reducers[self.exchange_index % len(self._fragments)]

    def _complete_reduction(self) -> None:
        """Wait for the exchange in flight, if there is one."""
        if self._in_flight:
            comm_thread, part, reducer = self._ctx.comm_thread, self._fragment, self._reducer
            comm_thread.remove_poller(self._advance)
            comm_thread.call(self._pipeline.progress)
            self._in_flight = False
            np.subtract(self._pseudo_gradient[part], reducer.contribution, out=self._residual[part])
            self._pending_update = reducer.mean

    def drain(self, checkpoint_number: int) -> None:
        super().drain(checkpoint_number)
        self._complete_reduction()

    def finish(self) -> None:
        super().finish()
        self._complete_reduction()  # without effect on the model: it is averaged in any case
