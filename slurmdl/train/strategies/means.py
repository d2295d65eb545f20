"""The mean of what all workers have, made shorter on the way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.plan import by_zone
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.kept import Kept
from slurmdl.train.messages import Messages, bounds
from slurmdl.train.mixing.sums import Sum
from slurmdl.train.strategies.strategy import Setting

FloatArray = npt.NDArray[np.float32]


class Mean(Protocol):
    """The mean of a vector over all workers, bit for bit alike on all of them.

    Attributes
    ----------
    size : bytes that a rank sends for it.
    counted : what of this rank's vector went into the mean.
    mean : of what all ranks counted; what the compressor leaves out of it goes into the next one.
    """

    size: float
    counted: FloatArray
    mean: FloatArray

    def run(self, vector: FloatArray, step: int, weights: Sequence[float]) -> None:
        """Make the mean, weighted, 1 in the mean for the workers; an errand of the courier, on all of them."""


def mean(setting: Setting) -> Mean:
    """By rings where nothing is compressed, else by owners of shards."""
    return Rings(setting) if setting.method.compress == "none" else Owners(setting)


class Rings(Kept, Mean):
    """All of it in fp32: round the ring of ranks, or in and between the zones (`hierarchical`); see sums.Sum."""

    def __init__(self, setting: Setting) -> None:
        self.counted = self.mean = np.empty_like(setting.parameters)
        self._count, self._place = np.float32(len(setting.workers)), setting.place
        groups = [setting.workers]
        if setting.method.traffic == "hierarchical":
            groups = [tuple(group) for group in by_zone(setting.workers, setting.zones)]
        self._sum = Sum(setting.messages, groups, self.mean)
        self.size = 8.0 * setting.parameters.size * (1 - 1 / len(setting.workers))

    def run(self, vector: FloatArray, step: int, weights: Sequence[float]) -> None:
        self.counted = vector
        np.multiply(vector, np.float32(weights[self._place]), out=self.mean)
        self._sum.run()
        self.mean /= self._count


class Owners(Kept, Mean):
    """Each worker owns a shard: it receives all others' parts of it, compressed, and hands round their mean,
    compressed again, with what was left out of the mean before.
    """

    kept = ("_left_out",)

    def __init__(self, setting: Setting) -> None:
        self._messages: Messages = setting.messages
        self._workers, self._place, self._seed = setting.workers, setting.place, setting.seed
        self._compressor = COMPRESSORS[setting.method.compress]
        self.counted, self.mean = np.empty_like(setting.parameters), np.empty_like(setting.parameters)
        edge = bounds(setting.parameters.size, len(setting.workers))
        self._shards = [slice(begin, end) for begin, end in pairwise(edge)]
        own = self._shards[self._place]
        self._left_out = np.zeros(own.stop - own.start, np.float32)
        sizes = [self._compressor.size(shard.stop - shard.start) for shard in self._shards]
        self._parts = [np.empty(sizes[self._place], np.uint8) for _ in self._workers]
        self._means = [np.empty(size, np.uint8) for size in sizes]
        # all others' shards, and round the ring all but the one of the next rank
        self.size = float(2 * sum(sizes) - sizes[self._place] - sizes[(self._place + 1) % len(sizes)])

    def run(self, vector: FloatArray, step: int, weights: Sequence[float]) -> None:
        random = np.random.default_rng((self._seed, self._place, step))
        compressor, place, count = self._compressor, self._place, len(self._workers)
        packed = [compressor.pack(vector[shard], random) for shard in self._shards]
        for part, shard in zip(packed, self._shards, strict=True):
            compressor.unpack(part, self.counted[shard])
        others = [other for other in range(count) if other != place]
        self._messages.swap([(self._workers[other], packed[other]) for other in others],
                            [(self._workers[other], self._parts[other]) for other in others])
        total, part_of = np.float32(weights[place]) * self.counted[self._shards[place]], np.empty_like(self._left_out)
        for other in others:
            compressor.unpack(self._parts[other], part_of)
            part_of *= np.float32(weights[other])
            total += part_of
        total /= np.float32(count)
        total += np.float32(compressor.feedback) * self._left_out
        self._means[place] = compressor.pack(total, random)
        right, left = self._workers[(place + 1) % count], self._workers[place - 1]
        for turn in range(1, count):
            self._messages.swap([(right, self._means[(place - turn + 1) % count])],
                                [(left, self._means[(place - turn) % count])])
        for its, shard in zip(self._means, self._shards, strict=True):
            compressor.unpack(its, self.mean[shard])
        np.subtract(total, self.mean[self._shards[place]], out=self._left_out)
