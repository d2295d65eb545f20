"""Allreduce: every worker updates with the mean of all gradients, so all replicas stay the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from slurmdl import buckets
from slurmdl.plan import by_zone
from slurmdl.train.messages import Messages
from slurmdl.train.mixing.pipeline import Pipeline
from slurmdl.train.mixing.sums import Sum
from slurmdl.train.strategies.strategy import FloatArray, Setting, Strategy

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

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        method, messages = setting.method, setting.messages
        # in rank-map order a ring enters each zone once
        groups = by_zone(setting.workers, setting.zones) if method.traffic == "hierarchical" else [setting.workers]
        self._starts = buckets.starts(setting.gradients.size)
        self._slices = [slice(*edge) for edge in pairwise([*self._starts, setting.gradients.size])]
        parts = [setting.gradients[part] for part in self._slices]
        wire = np.float16 if method.compress == "fp16" else np.float32
        count = len(setting.workers)
        if method.library:
            self._means = [partial(_by_library, messages, part, count) for part in parts]
        else:
            tags = [FIRST_TAG + number % TAGS for number in range(len(parts) - 1)]
            own = next((group for group in groups if messages.rank in group), ())
            meet = buckets.meet([setting.nodes[rank] for rank in own], [setting.zones[rank] for rank in own])
            self._means = [partial(self._begin, Sum(messages, groups, part, wire, meet and start < buckets.AT_ONCE),
                                   count, tag)
                           for part, start, tag in zip(parts, self._starts, [*tags, 0], strict=True)]
        self._pipeline = Pipeline(messages)
        self._given: list[Future[Any]] = []

    def ready(self, start: int) -> None:
        while len(self._given) < len(self._means):
            bucket = len(self._means) - 1 - len(self._given)
            if self._starts[bucket] < start:
                return
            there = self._its.copies.fetch_gradients(self._slices[bucket])
            self._given.append(self._its.courier.give(partial(_after, there, self._means[bucket])))

    def _begin(self, bucket: Sum, count: int, tag: int) -> None:
        """Begin to make the mean of a bucket, and carry on the others until the next one comes."""
        self._pipeline.carry_on(DEPTH - 1)
        self._pipeline.add(bucket.flow(count, tag))
        self._pipeline.carry_on(stop=lambda: self._its.courier.pending)

    def before_update(self, number: int, skips: bool = False) -> None:
        self.ready(0)
        self._given.append(self._its.courier.give(self._pipeline.carry_on))
        for future in self._given:
            self._its.courier.wait(future)
        self._given.clear()
        self._its.copies.store_gradients()
        self.fired += 1


def _after(there: Callable[[], None], mean: Callable[[], None]) -> None:
    there()
    mean()


def _by_library(messages: Messages, bucket: FloatArray, count: int) -> None:
    messages.total(bucket)
    bucket /= np.float32(count)
