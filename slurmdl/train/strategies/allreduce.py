"""Allreduce: every worker updates with the mean of all gradients, so all replicas stay the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from slurmdl import comm_layout
from slurmdl.plan import group_ranks
from slurmdl.train.mixing.collectives import AllreduceOp, CollectivePipeline
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies.strategy import FloatArray, Strategy, StrategyContext

#: buckets whose sums are under way at the same time: one inside the zones on its way out, one between them, one
#: inside on its way back
MAX_BUCKETS_IN_FLIGHT = 3
#: tags of the buckets' messages, which no others have, and no two of DEPTH buckets the same. Those of the bucket that
#: goes first in a step have 0, as all strategies' do: by it a worker that has ended learns that others go on
FIRST_BUCKET_TAG, NUM_BUCKET_TAGS = 10, 100


class Allreduce(Strategy):
    """Equal to one process on the workers' batches together; traffic `ring` or `hierarchical`, or a library's call.

    The gradients are summed in buckets, from the last, whose gradients are there first, to the first: in the same
    order on all workers, whatever the order in which their gradients come in. Several are under way at the same time,
    so that the links between zones are not idle while a bucket is summed inside. Compressed, they travel as fp16 and
    are added in fp32; see sums.Sum for the error.

    References
    ----------
    S. Li et al.: PyTorch distributed: experiences on accelerating data parallel training. VLDB 13 (2020).
    doi:10.14778/3415478.3415530
    """

    averages_gradients = identical_at_end = True
    overlaps_backward = True

    def __init__(self, ctx: StrategyContext) -> None:
        super().__init__(ctx)
        method, messages = ctx.config, ctx.p2p
        # in rank-map order a ring enters each zone once
        groups = group_ranks(ctx.workers, ctx.zones) if method.comm_pattern == "hierarchical" else [ctx.workers]
        self._bucket_starts = comm_layout.bucket_starts(ctx.gradients.size)
        self._bucket_slices = [slice(*edge) for edge in pairwise([*self._bucket_starts, ctx.gradients.size])]
        parts = [ctx.gradients[part] for part in self._bucket_slices]
        wire = np.float16 if method.compression == "fp16" else np.float32
        count = len(ctx.workers)
        if method.uses_mpi_allreduce:
            self._bucket_reducers = [partial(_mpi_allreduce_mean, messages, part, count) for part in parts]
        else:
            tags = [FIRST_BUCKET_TAG + number % NUM_BUCKET_TAGS for number in range(len(parts) - 1)]
            own = next((group for group in groups if messages.rank in group), ())
            meet = comm_layout.uses_direct_exchange([ctx.nodes[rank] for rank in own], [ctx.zones[rank] for rank in own])
            self._bucket_reducers = [partial(self._start_allreduce, AllreduceOp(messages, groups, part, wire, meet and start < comm_layout.DIRECT_ELEMENTS),
                                   count, tag)
                           for part, start, tag in zip(parts, self._bucket_starts, [*tags, 0], strict=True)]
        self._pipeline = CollectivePipeline(messages)
        self._futures: list[Future[Any]] = []

    def on_gradients_ready(self, start: int) -> None:
        while len(self._futures) < len(self._bucket_reducers):
            bucket = len(self._bucket_reducers) - 1 - len(self._futures)
            if self._bucket_starts[bucket] < start:
                return
            there = self._ctx.device_copies.copy_gradients_to_host(self._bucket_slices[bucket])
            self._futures.append(
    self._ctx.comm_thread.submit(
        partial(
            _reduce_when_copied,
            there,
             self._bucket_reducers[bucket])))

    def _start_allreduce(self, bucket: AllreduceOp, divisor: int, tag: int) -> None:
        """Begin to make the mean of a bucket, and carry on the others until the next one comes."""
        self._pipeline.progress(MAX_BUCKETS_IN_FLIGHT - 1)
        self._pipeline.add(bucket.coroutine(divisor, tag))
        self._pipeline.progress(should_stop=lambda: self._ctx.comm_thread.has_queued)

    def before_optimizer_step(self, step: int, skip_update: bool = False) -> None:
        self.on_gradients_ready(0)
        self._futures.append(self._ctx.comm_thread.submit(self._pipeline.progress))
        for future in self._futures:
            self._ctx.comm_thread.wait(future)
        self._futures.clear()
        self._ctx.device_copies.copy_gradients_to_device()
        self.exchanges += 1


def _reduce_when_copied(wait_for_copy: Callable[[], None], reduce_bucket: Callable[[], None]) -> None:
    wait_for_copy()
    reduce_bucket()


def _mpi_allreduce_mean(p2p: MeteredP2P, bucket: FloatArray, divisor: int) -> None:
    p2p.allreduce(bucket)
    bucket /= np.float32(divisor)
