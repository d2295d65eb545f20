"""Allreduce: every worker updates with the mean of all gradients, so all replicas stay the same."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from slurmdl.train.messages import Messages
from slurmdl.train.mixing.pipeline import Pipeline
from slurmdl.train.mixing.sums import Sum, by_zone
from slurmdl.train.strategies.strategy import FloatArray, Setting, Strategy

#: most elements summed at a time (4 MB), while the backward pass goes on to the ones before them, and of the first
#: bucket (256 KB), whose gradients come at the end of the backward pass: its sum is hidden behind nothing
BUCKET, LEAST = 1 << 20, 1 << 16

#: buckets whose sums are under way at the same time: one inside the zones on its way out, one between them, one
#: inside on its way back
DEPTH = 3
#: tags of the buckets' messages, which no others have, and no two of DEPTH buckets the same. Those of the bucket that
#: goes first in a step have 0, as all strategies' do: by it a worker that has ended learns that others go on
FIRST_TAG, TAGS = 10, 100


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

    in_step = alike = True
    overlaps = True
    from_mean = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        method, messages = setting.method, setting.messages
        # in rank-map order a ring enters each zone once
        groups = by_zone(setting.workers, setting.zones) if method.traffic == "hierarchical" else [setting.workers]
        self._starts = starts(setting.gradients.size)
        buckets = np.split(setting.gradients, self._starts[1:])
        wire = np.float16 if method.compress == "fp16" else np.float32
        count = len(setting.workers)
        if method.library:
            self._means = [partial(_by_library, messages, bucket, count) for bucket in buckets]
        else:
            tags = [FIRST_TAG + number % TAGS for number in range(len(buckets) - 1)]
            self._means = [partial(self._begin, Sum(messages, groups, bucket, wire), count, tag)
                           for bucket, tag in zip(buckets, [*tags, 0], strict=True)]
        self._pipeline = Pipeline(messages)
        self._given: list[Future[Any]] = []

    def ready(self, start: int) -> None:
        while len(self._given) < len(self._means):
            bucket = len(self._means) - 1 - len(self._given)
            if self._starts[bucket] < start:
                return
            self._given.append(self._its.courier.give(self._means[bucket]))

    def _begin(self, bucket: Sum, count: int, tag: int) -> None:
        """Begin to make the mean of a bucket, and carry on the others until the next one comes."""
        self._pipeline.carry_on(DEPTH - 1)
        self._pipeline.add(bucket.flow(count, tag))
        self._pipeline.carry_on(stop=lambda: self._its.courier.pending)

    def before_update(self, number: int) -> None:
        self.ready(0)
        self._given.append(self._its.courier.give(self._pipeline.carry_on))
        for future in self._given:
            self._its.courier.wait(future)
        self._given.clear()
        self.fired += 1


def starts(size: int) -> list[int]:
    """Where the buckets of so many elements begin: the first is the smallest, and they grow."""
    found, length = [0], min(LEAST, BUCKET)
    while found[-1] + length + length // 2 < size:
        found.append(found[-1] + length)
        length = min(found[-1], BUCKET)
    return found


def _by_library(messages: Messages, bucket: FloatArray, count: int) -> None:
    messages.total(bucket)
    bucket /= np.float32(count)
