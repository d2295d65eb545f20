"""Who averages with whom in gossip, for any number of workers; placement models what training sends.

In every step of a graph each worker sends its model to one worker and takes in that of one: a permutation of the
workers, with a weight. The matrix of the weights is doubly stochastic, so that the sum of all models stays what it
is. A new graph is one class here, one line in GRAPHS, and its name in plan.PATTERNS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GossipGroup:
    """The workers that a graph is made for.

    Attributes
    ----------
    zones : entry i is the leaf zone of worker i.
    seed : of partners that are drawn; the same on all workers, so that nothing need be agreed on.
    costs : "leafA|leafB" (names sorted) -> seconds per byte between two leaf zones; {} where none are known.
    """

    zones: Sequence[str]
    seed: int = 0
    costs: Mapping[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.zones)


@dataclass(frozen=True, eq=False)
class MixingRound:
    """One step of a graph.

    Attributes
    ----------
    target : shape (count,): entry i is the worker that worker i sends to, and where it rests i itself.
    weight : shape (count,): the share of what worker i takes in in its new model; equal along each cycle.
    """

    target: IntArray
    weight: FloatArray

    @cached_property
    def source(self) -> IntArray:
        """Shape (count,): entry i is the worker whose model worker i takes in."""
        return np.argsort(self.target)

    @property
    def matrix(self) -> FloatArray:
        """Shape (count, count): what the step multiplies the stacked models with."""
        everyone = np.arange(len(self.target))
        mixed = np.diag(1 - self.weight)
        mixed[everyone, self.source] += self.weight
        return mixed


def _pairwise_round(count: int, pairs: IntArray, weight: float | FloatArray = 0.5) -> MixingRound:
    """Worker pairs[i, 0] and worker pairs[i, 1] exchange; all others rest."""
    target, weights = np.arange(count), np.full(count, 0.5)
    target[pairs] = pairs[:, ::-1]
    weights[pairs] = np.reshape(weight, (-1, 1))
    return MixingRound(target, weights)


class Graph:
    """Base of all graphs.

    Attributes
    ----------
    paired : whether a worker takes in the model of the one that it sends to, in every step.
    fixed : whether each worker meets the same few others again and again.
    """

    pairwise = True
    static_neighbors = True

    def __init__(self, members: GossipGroup) -> None:
        self._rounds: tuple[MixingRound, ...] = (MixingRound(np.arange(len(members)), np.full(len(members), 0.5)),)

    def round(self, step: int) -> MixingRound:
        """What is done in a step, counted from 0."""
        return self._rounds[step % len(self._rounds)]

    @property
    def period(self) -> int:
        """Steps after which the graph begins again; 0 where each step is drawn."""
        return len(self._rounds)

    def weighted_rounds(self) -> list[tuple[MixingRound, float]]:
        """All different rounds, each with the share of the steps in which it is played; [] where they are drawn."""
        return [(turn, 1 / len(self._rounds)) for turn in self._rounds]


class RandomizedGraph(Graph):
    """Base of graphs whose pairs are drawn anew in each step."""

    static_neighbors = False

    def __init__(self, members: GossipGroup) -> None:
        self._count, self._seed = len(members), members.seed

    @property
    def period(self) -> int:
        return 0

    def weighted_rounds(self) -> list[tuple[MixingRound, float]]:
        return []


class RandomMatching(RandomizedGraph):
    """A random permutation paired off; the one left over of an odd count rests.

    References
    ----------
    S. Boyd, A. Ghosh, B. Prabhakar, D. Shah: Randomized gossip algorithms. IEEE Trans. Inf. Theory 52 (2006).
    doi:10.1109/TIT.2006.874516
    """

    def round(self, step: int) -> MixingRound:
        order = np.random.default_rng((self._seed, step)).permutation(self._count)
        return _pairwise_round(self._count, order[:self._count // 2 * 2].reshape(-1, 2))


class OnePeerExponential(Graph):
    """Each sends to the one at distance 1, 2, 4, ... by turns, one way round the circle of workers.

    Where the count is 2^k, k steps make all models the mean of those before; else they draw near to it.

    References
    ----------
    B. Ying et al.: Exponential graph is provably efficient for decentralized deep training. NeurIPS 2021.
    arXiv:2110.13363
    """

    pairwise = False

    def __init__(self, members: GossipGroup) -> None:
        super().__init__(members)
        count = len(members)
        everyone, half = np.arange(count), np.full(count, 0.5)
        if count > 1:
            self._rounds = tuple(MixingRound((everyone + distance) % count, half)
                                 for distance in _hop_distances(count))


class Base2Graph(Graph):
    """Pairs by turns, whose weights make all models the mean of those before after a few steps, for any count.

    For a count of 2^a m, m odd: a steps of a hypercube between blocks of m workers, and where m > 1 further
    2 floor(log2 m) + 1 inside the blocks. Inside a block, groups of 2^p workers, one for each bit of m, first reach
    their own means. Then each group, the largest first, meets all that are in smaller ones, with the weight by
    which its sum becomes its share of the whole, and spreads that in itself. The Base-(k+1) graph for k = 1.

    References
    ----------
    Y. Takezawa, R. Sato, H. Bao, K. Niwa, M. Yamada: Beyond exponential graph: communication-efficient topologies
    for decentralized learning via finite-time convergence. NeurIPS 2023. arXiv:2305.11420
    """

    def __init__(self, members: GossipGroup) -> None:
        super().__init__(members)
        self._rounds = _base2_rounds(len(members)) or self._rounds


@cache
def _base2_rounds(count: int) -> tuple[MixingRound, ...]:
    """The rounds of Base; () for a worker alone."""
    blocks = count & -count
    size = count // blocks
    everyone = np.arange(count)
    rounds = [MixingRound((everyone // size ^ distance) * size + everyone % size, np.full(count, 0.5))
              for distance in _hop_distances(blocks)]
    bits = [bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    start = [sum(1 << bit for bit in bits[:place]) for place in range(len(bits))]
    inside: list[list[tuple[IntArray, float]]] = [[] for _ in range(2 * bits[0] + 1)] if size > 1 else []
    for place, (first, bit) in enumerate(zip(start, bits, strict=True)):
        met = bits[0] + place  # the step in which the group meets the smaller ones
        own, rest = 1 << bit, size - first - (1 << bit)
        for turn in range(bit):
            lower = first + np.flatnonzero(~np.arange(own) >> turn & 1)
            halves = np.stack([lower, lower + (1 << turn)], axis=1), 0.5
            inside[turn].append(halves)
            if rest:
                inside[met + 1 + turn].append(halves)
        if rest:
            smaller = np.arange(rest) + first + own
            inside[met].append((np.stack([smaller - own, smaller], axis=1), own / (own + rest)))
    for step in inside:
        pairs = np.concatenate([block + begin for block, _ in step for begin in range(0, count, size)])
        weights = np.concatenate([np.full(len(block) * blocks, weight) for block, weight in step])
        rounds.append(_pairwise_round(count, pairs, weights))
    return tuple(rounds)


class ZoneAware(Graph):
    """Three steps inside the leaf zones, then one between them, and so on.

    Inside a zone its workers play Base; between zones, the zones play it, and the i-th worker of one exchanges
    with the i-th of the other, as far as both have one. Where there is one zone, or no two workers share one, only
    the steps that can be are made.
    """

    #: one step in so many goes to another zone
    INTER_ZONE_EVERY = 4

    def __init__(self, members: GossipGroup) -> None:
        count = len(members)
        groups: dict[str, list[int]] = {}
        for worker, zone in enumerate(members.zones):
            groups.setdefault(zone, []).append(worker)
        zones = [np.array(group) for group in groups.values()]
        near = max((len(_base2_rounds(len(own))) for own in zones), default=0)
        self._intra_zone_rounds, self._inter_zone_rounds = [], []
        for turn in range(near):
            target, weight = np.arange(count), np.full(count, 0.5)
            for own in zones:
                if len(own) > 1:
                    plays = _base2_rounds(len(own))[turn % len(_base2_rounds(len(own)))]
                    target[own], weight[own] = own[plays.target], plays.weight
            self._intra_zone_rounds.append(MixingRound(target, weight))
        for plays in _base2_rounds(len(zones)):
            target, weight = np.arange(count), np.full(count, 0.5)
            for own, other, share in zip(zones, plays.target.tolist(), plays.weight, strict=True):
                meet = min(len(own), len(zones[other]))
                target[own[:meet]], weight[own[:meet]] = zones[other][:meet], share
            self._inter_zone_rounds.append(MixingRound(target, weight))
        if not self._intra_zone_rounds and not self._inter_zone_rounds:
            super().__init__(members)
            self._intra_zone_rounds = list(self._rounds)

    def round(self, step: int) -> MixingRound:
        block, turn = divmod(step, self.INTER_ZONE_EVERY)
        if not self._inter_zone_rounds or not self._intra_zone_rounds:
            only = self._intra_zone_rounds or self._inter_zone_rounds
            return only[step % len(only)]
        if turn == self.INTER_ZONE_EVERY - 1:
            return self._inter_zone_rounds[block % len(self._inter_zone_rounds)]
        return self._intra_zone_rounds[(block * (self.INTER_ZONE_EVERY - 1) + turn) % len(self._intra_zone_rounds)]

    @property
    def period(self) -> int:
        if not self._inter_zone_rounds or not self._intra_zone_rounds:
            return len(self._intra_zone_rounds or self._inter_zone_rounds)
        blocks = len(self._intra_zone_rounds) // np.gcd(len(self._intra_zone_rounds), self.INTER_ZONE_EVERY - 1)
        return int(self.INTER_ZONE_EVERY * np.lcm(blocks, len(self._inter_zone_rounds)))

    def weighted_rounds(self) -> list[tuple[MixingRound, float]]:
        far = 1 / \
            self.INTER_ZONE_EVERY if self._intra_zone_rounds and self._inter_zone_rounds else float(
                not self._intra_zone_rounds)
        return [*((turn, (1 - far) / len(self._intra_zone_rounds)) for turn in self._intra_zone_rounds),
                *((turn, far / len(self._inter_zone_rounds)) for turn in self._inter_zone_rounds)]


class LinkAware(RandomizedGraph):
    """A random matching that prefers quick links; without known costs all links are alike.

    A pair is preferred by the inverse of the cost of its link, and a fifth of all preference is spread evenly, so
    that slow links are used, too.

    References
    ----------
    P. Zhou, Q. Lin, D. Loghin, B. C. Ooi, Y. Wu, H. Yu: Communication-efficient decentralized machine learning over
    heterogeneous networks. ICDE 2021. arXiv:2009.05766
    """

    #: of all preference
    UNIFORM_SHARE = 0.2

    def __init__(self, members: GossipGroup) -> None:
        super().__init__(members)
        count = len(members)
        names, zone = np.unique(np.array(members.zones, dtype=str), return_inverse=True)
        known = [members.costs.get("|".join(sorted((one, other))), np.nan) for one in names for other in names]
        cost = np.array(known, dtype=float).reshape(len(names), len(names))
        cost[~np.isfinite(cost)] = np.nanmean(cost) if np.isfinite(cost).any() else 1.0
        speed = 1 / np.maximum(cost, 1e-30)[np.ix_(zone, zone)]
        np.fill_diagonal(speed, 0)
        share = (1 - self.UNIFORM_SHARE) * speed / np.maximum(speed.sum(1, keepdims=True), 1e-30)
        share += self.UNIFORM_SHARE / max(count - 1, 1)
        self._upper_triangle = np.triu_indices(count, 1)
        self._log_preferences = np.log(share + share.T)[self._upper_triangle]

    def round(self, step: int) -> MixingRound:
        count = self._count
        # with Gumbel noise the largest key is each pair's with the probability of its preference
        key = np.full((count, count), -np.inf)
        noise = np.random.default_rng((self._seed, step)).gumbel(size=len(self._log_preferences))
        key[self._upper_triangle] = self._log_preferences + noise
        key = np.maximum(key, key.T)
        pairs, free = [], np.arange(count)
        while len(free) > 1:
            # pairs that prefer each other stand in any matching by falling keys
            best = free[key[np.ix_(free, free)].argmax(1)]
            mutual = np.zeros(count, np.int64)
            mutual[free] = best
            agreed = free[(mutual[best] == free) & (free < best)]
            pairs.append(np.stack([agreed, mutual[agreed]], axis=1))
            free = np.setdiff1d(free, pairs[-1])
        return _pairwise_round(count, np.concatenate([np.empty((0, 2), np.int64), *pairs]))


def _hop_distances(count: int) -> list[int]:
    return [1 << bit for bit in range((count - 1).bit_length())]


#: pattern, one of plan.PATTERNS -> its graph
GRAPHS: dict[str, type[Graph]] = {
    "random-matching": RandomMatching, "one-peer-exponential": OnePeerExponential, "base-2": Base2Graph,
    "zone-aware": ZoneAware, "link-aware": LinkAware}
