"""Allreduce: every worker updates with the mean of all gradients, so all replicas stay the same."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from slurmdl.train.messages import Messages
from slurmdl.train.mixing.sums import Sum, by_zone
from slurmdl.train.strategies.strategy import FloatArray, Setting, Strategy

#: elements summed at a time (4 MB), while the backward pass goes on to the ones before them
BUCKET = 1 << 20
#: into so many buckets smaller models are cut, of so many elements at least (512 KB): the sum of the last one, whose
#: gradients come at the end of the backward pass, is hidden behind nothing
BUCKETS, LEAST = 4, 1 << 17


class Allreduce(Strategy):
    """Equal to one process on the workers' batches together; traffic `ring` or `hierarchical`, or a library's call.

    The gradients are summed in buckets, from the last, whose gradients are there first, to the first: in the same
    order on all workers, whatever the order in which their gradients come in. Compressed, they travel as fp16 and are
    added in fp32; see sums.Sum for the error.

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
        length = max(LEAST, min(BUCKET, setting.gradients.size // BUCKETS))
        self._starts = list(range(0, max(setting.gradients.size, 1), length))
        buckets = [setting.gradients[start:start + length] for start in self._starts]
        wire = np.float16 if method.compress == "fp16" else np.float32
        self._means = [partial(_by_library, messages, bucket, len(setting.workers)) if method.library else
                       partial(Sum(messages, groups, bucket, wire).run, len(setting.workers)) for bucket in buckets]
        self._given: list[Future[Any]] = []

    def ready(self, start: int) -> None:
        while len(self._given) < len(self._means):
            bucket = len(self._means) - 1 - len(self._given)
            if self._starts[bucket] < start:
                return
            self._given.append(self._its.courier.give(self._means[bucket]))

    def before_update(self, number: int) -> None:
        self.ready(0)
        for future in self._given:
            self._its.courier.wait(future)
        self._given.clear()
        self.fired += 1


def _by_library(messages: Messages, bucket: FloatArray, count: int) -> None:
    messages.total(bucket)
    bucket /= np.float32(count)
