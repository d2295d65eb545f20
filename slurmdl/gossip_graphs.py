"""Gossip graphs for any number of workers, shared by training and placement.

In each round every worker sends its model to one worker and receives that of one: a permutation with weights. The
mixing matrix is doubly stochastic, so the sum of all models is preserved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import cycle

import numpy as np
import numpy.typing as npt

from slurmdl.plan import group_ranks

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MixingRound:
    """One round of a graph.

    Attributes:
        target: shape (count,): entry i is the receiver of worker i's model, i itself if it is idle.
        weight: shape (count,): weight of the received model in worker i's new model; equal along each cycle.
    """

    target: IntArray
    weight: FloatArray

    @cached_property
    def source(self) -> IntArray:
        """Shape (count,): entry i is the sender to worker i."""
        return np.argsort(self.target)

    def mix(self, models: FloatArray) -> FloatArray:
        """The models after the round; shape (count, elements), row i is worker i's."""
        weight = self.weight[:, None]
        return (1 - weight) * models + weight * models[self.source]


def _pairwise_round(count: int, pairs: IntArray, weight: float | FloatArray = 0.5) -> MixingRound:
    """Round in which the workers pairs[i, 0] and pairs[i, 1] exchange; all others are idle."""
    target, weights = np.arange(count), np.full(count, 0.5)
    target[pairs] = pairs[:, ::-1]
    weights[pairs] = np.reshape(weight, (-1, 1))
    return MixingRound(target, weights)


class Graph:
    """Base of all graphs.

    Args:
        zones: entry i is the leaf zone of worker i.
        seed: of random partners; the same on all workers.

    Attributes:
        pairwise: whether each worker receives from the worker that it sends to, in every round.
        static_neighbors: whether each worker has a fixed set of few neighbors.
    """

    pairwise = True
    static_neighbors = True

    def __init__(self, zones: Sequence[str], seed: int = 0) -> None:
        idle = MixingRound(np.arange(len(zones)), np.full(len(zones), 0.5))
        self._rounds = tuple(self._make_rounds(zones)) or (idle,)

    def _make_rounds(self, zones: Sequence[str]) -> Sequence[MixingRound]:
        """The rounds of a period; none for a single worker."""
        raise NotImplementedError

    def round(self, step: int) -> MixingRound:
        """Round of a step, counted from 0."""
        return self._rounds[step % len(self._rounds)]

    @property
    def period(self) -> int:
        """Steps after which the rounds repeat; 0 if they are random."""
        return len(self._rounds)

    def weighted_rounds(self) -> list[tuple[MixingRound, float]]:
        """All different rounds, each with its share of the steps; [] if they are random."""
        return [(entry, count / len(self._rounds)) for entry, count in Counter(self._rounds).items()]


class RandomMatching(Graph):
    """Random matching in each step; one worker of an odd number is idle.

    Reference: S. Boyd, A. Ghosh, B. Prabhakar, D. Shah: Randomized gossip algorithms. IEEE Trans. Inf. Theory 52
    (2006). doi:10.1109/TIT.2006.874516
    """

    static_neighbors = False

    def __init__(self, zones: Sequence[str], seed: int = 0) -> None:
        self._rounds = ()
        self._count, self._seed = len(zones), seed

    def round(self, step: int) -> MixingRound:
        order = np.random.default_rng((self._seed, step)).permutation(self._count)
        return _pairwise_round(self._count, order[:self._count // 2 * 2].reshape(-1, 2))


class OnePeerExponential(Graph):
    """One-peer exponential graph: send to distance 1, 2, 4, ... around a circle of workers, alternately.

    Exact average after k rounds for 2^k workers; approximate for other numbers.

    Reference: B. Ying et al.: Exponential graph is provably efficient for decentralized deep training. NeurIPS 2021.
    arXiv:2110.13363
    """

    pairwise = False

    def _make_rounds(self, zones: Sequence[str]) -> Sequence[MixingRound]:
        count = len(zones)
        return [MixingRound((np.arange(count) + distance) % count, np.full(count, 0.5))
                for distance in _hop_distances(count)]


class Base2Graph(Graph):
    """Base-(k+1) graph for k = 1: exact average after a few rounds of pairs, for any number of workers.

    For 2^a m workers, m odd: a hypercube rounds between blocks of m workers, and if m > 1 further 2 floor(log2 m) + 1
    rounds inside the blocks. Inside a block, groups of 2^p workers, one per bit of m, first average among themselves.
    Then each group, the largest first, exchanges with the members of all smaller ones, with the weight that makes its
    sum its share of the total, and averages again.

    Reference: Y. Takezawa, R. Sato, H. Bao, K. Niwa, M. Yamada: Beyond exponential graph: communication-efficient
    topologies for decentralized learning via finite-time convergence. NeurIPS 2023. arXiv:2305.11420
    """

    def _make_rounds(self, zones: Sequence[str]) -> Sequence[MixingRound]:
        return _base2_rounds(len(zones))


@cache
def _base2_rounds(count: int) -> tuple[MixingRound, ...]:
    """Rounds of Base2Graph; () for a single worker."""
    blocks = count & -count
    size = count // blocks
    workers = np.arange(count)
    rounds = [MixingRound((workers // size ^ distance) * size + workers % size, np.full(count, 0.5))
              for distance in _hop_distances(blocks)]
    bits = [bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    starts = [sum(1 << bit for bit in bits[:index]) for index in range(len(bits))]
    inside: list[list[tuple[IntArray, float]]] = [[] for _ in range(2 * bits[0] + 1)] if size > 1 else []
    for index, (first, bit) in enumerate(zip(starts, bits, strict=True)):
        exchange = bits[0] + index  # round in which the group exchanges with the smaller ones
        own, smaller_total = 1 << bit, size - first - (1 << bit)
        for turn in range(bit):
            lower = first + np.flatnonzero(~np.arange(own) >> turn & 1)
            halves = np.stack([lower, lower + (1 << turn)], axis=1), 0.5
            inside[turn].append(halves)
            if smaller_total:
                inside[exchange + 1 + turn].append(halves)
        if smaller_total:
            smaller = np.arange(smaller_total) + first + own
            inside[exchange].append((np.stack([smaller - own, smaller], axis=1), own / (own + smaller_total)))
    for step in inside:
        pairs = np.concatenate([block + begin for block, _ in step for begin in range(0, count, size)])
        weights = np.concatenate([np.full(len(block) * blocks, weight) for block, weight in step])
        rounds.append(_pairwise_round(count, pairs, weights))
    return tuple(rounds)


class ZoneAware(Graph):
    """Alternates three rounds inside the leaf zones with one between them.

    Both follow Base2Graph, inside each zone and between zones; there the i-th workers of two zones exchange, if both
    exist. With one zone, or one worker per zone, only one kind of round exists.
    """

    #: period of rounds between zones
    INTER_ZONE_EVERY = 4

    def _make_rounds(self, zones: Sequence[str]) -> Sequence[MixingRound]:
        size = len(zones)
        groups = [np.array(group) for group in group_ranks(range(size), zones)]
        intra_zone, inter_zone = list[MixingRound](), list[MixingRound]()
        for turn in range(max((len(_base2_rounds(len(own))) for own in groups), default=0)):
            target, weight = np.arange(size), np.full(size, 0.5)
            for own in groups:
                if len(own) > 1:
                    base2 = _base2_rounds(len(own))[turn % len(_base2_rounds(len(own)))]
                    target[own], weight[own] = own[base2.target], base2.weight
            intra_zone.append(MixingRound(target, weight))
        for base2 in _base2_rounds(len(groups)):
            target, weight = np.arange(size), np.full(size, 0.5)
            for own, other, share in zip(groups, base2.target.tolist(), base2.weight, strict=True):
                paired = min(len(own), len(groups[other]))
                target[own[:paired]], weight[own[:paired]] = groups[other][:paired], share
            inter_zone.append(MixingRound(target, weight))
        if not (intra_zone and inter_zone):
            return intra_zone or inter_zone
        every, near, far = self.INTER_ZONE_EVERY, cycle(intra_zone), cycle(inter_zone)
        blocks = math.lcm(len(intra_zone) // math.gcd(len(intra_zone), every - 1), len(inter_zone))
        return [next(near if turn % every else far) for turn in range(1, blocks * every + 1)]


def _hop_distances(count: int) -> list[int]:
    return [1 << bit for bit in range((count - 1).bit_length())]


#: communication pattern -> its graph
GRAPHS: dict[str, type[Graph]] = {
    "random-matching": RandomMatching, "one-peer-exponential": OnePeerExponential, "base-2": Base2Graph,
    "zone-aware": ZoneAware}
