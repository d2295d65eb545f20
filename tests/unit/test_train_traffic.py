"""Who sends what to whom: the trainer's partners and rings against their definitions and against the model."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from placing import matrix

from slurmdl.placement.traffic import Traffic
from slurmdl.plan import COMM_PATTERNS, group_ranks
from slurmdl.train.mixing.collectives import AllreduceOp
from slurmdl.train.mixing.weighted_graph import GRAPHS, GossipGroup, spectral_gap
from slurmdl.train.p2p import MeteredP2P

FloatArray = npt.NDArray[np.float32]
EVERY = [(name, count) for name in GRAPHS for count in range(1, 18)]
DRAWN = ("random", "links")


def zoned(count: int, names: int = 3) -> tuple[str, ...]:
    """Zones of several sizes, in any order."""
    return tuple(map(str, np.random.default_rng(count).integers(0, names, count)))


def mixing(name: str, count: int, step: int) -> npt.NDArray[np.float64]:
    """The matrix that a step multiplies the workers' models with."""
    return GRAPHS[name](GossipGroup(zoned(count), 3)).round(step).matrix


def modelled(strategy: str, pattern: str, ranks: int, model_bytes: float,
             zone: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
    """Bytes from rank to rank per iteration, as placement models them."""
    phases = Traffic(strategy, model_bytes, pattern=pattern).phases(ranks, zone)
    return sum((matrix(phase, ranks) for phase in phases), np.zeros((ranks, ranks)))


@pytest.mark.parametrize(("name", "count"), EVERY)
def test_graphs_keep_the_sum_and_draw_the_models_together(name: str, count: int) -> None:
    models = np.random.default_rng(count).standard_normal((count, 5))
    start = models - models.mean(0)
    for step in range(120):
        matrix = mixing(name, count, step)
        assert np.allclose(matrix.sum(0), 1, rtol=0, atol=1e-12)
        assert np.allclose(matrix.sum(1), 1, rtol=0, atol=1e-12)
        assert matrix.min() >= 0
        models = matrix @ models
    assert np.abs(models - models.mean(0)).max() <= 1e-3 * np.abs(start).max()


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["base", "exponential"])
def test_powers_of_two_reach_the_exact_average_in_k_rounds_and_not_before(name: str, count: int) -> None:
    rounds = count.bit_length() - 1
    for first in range(rounds):
        after = np.eye(count)
        for step in range(first, first + rounds):
            assert not (after == 1 / count).all()
            after = mixing(name, count, step) @ after
        assert (after == 1 / count).all()


@pytest.mark.parametrize("count", range(1, 18))
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_partners_are_a_new_matching_in_each_step(name: str, count: int) -> None:
    seen = set()
    for step in range(5):
        target = GRAPHS[name](GossipGroup(zoned(count), 1, {"0|0": 1e-9, "0|1": 1e-7})).round(step).target
        seen.add(tuple(target))
        assert (target[target] == np.arange(count)).all()
        assert (target == np.arange(count)).sum() == count % 2
    assert len(seen) > 1 or count <= 2


@pytest.mark.parametrize(("name", "count"), EVERY)
def test_partners_are_those_of_the_model(name: str, count: int) -> None:
    """Over a period of the turns exactly; drawn partners, all links alike, in the mean of many steps."""
    zones = zoned(count)
    graph = GRAPHS[name](GossipGroup(zones, 3))
    steps = graph.period or 2000
    sent = np.zeros((count, count))
    for step in range(steps):
        sent[np.arange(count), graph.round(step).target] += 1
    np.fill_diagonal(sent, 0)
    expected = modelled("gossip", name, count, 1.0, np.array(zones, dtype=np.int64))
    assert np.allclose(sent / steps, expected, rtol=0, atol=0.06 if name in DRAWN else 1e-12)
    assert np.isclose(sent.sum() / steps, expected.sum())


@pytest.mark.parametrize("count", range(1, 18))
def test_base_reaches_the_exact_average_of_any_number_in_one_period(count: int) -> None:
    graph = GRAPHS["base"](GossipGroup(("",) * count))
    odd = count // (count & -count)
    blocks = (count & -count).bit_length() - 1
    assert graph.period == max(1, blocks + (2 * (odd.bit_length() - 1) + 1 if odd > 1 else 0))
    after = np.eye(count)
    for step in range(graph.period):
        after = graph.round(step).matrix @ after
    assert np.allclose(after, 1 / count, rtol=0, atol=1e-12)
    assert spectral_gap("base", GossipGroup(("",) * count)) == pytest.approx(1, abs=0.02)


def test_zones_are_left_in_one_step_of_four_and_make_the_mean_exact_where_they_are_alike() -> None:
    zones = ("a", "b", "b", "a", "c", "c", "d", "d")
    graph = GRAPHS["zones"](GossipGroup(zones))
    after = np.eye(8)
    for step in range(graph.period):
        target = graph.round(step).target
        leaves = [zones[worker] != zones[peer] for worker, peer in enumerate(target.tolist())]
        assert all(leaves) if step % 4 == 3 else not any(leaves)
        after = graph.round(step).matrix @ after
    assert graph.period == 8
    assert np.allclose(after, 1 / 8, rtol=0, atol=1e-12)


def test_links_prefer_the_quick_and_leave_out_none() -> None:
    """Two zones of 4, links between them 10 times slower: at most 1 pair in 3 crosses, at random 4 in 7 would."""
    zones = ("a",) * 4 + ("b",) * 4
    graph = GRAPHS["links"](GossipGroup(zones, 1, {"a|a": 1e-9, "b|b": 1e-9, "a|b": 1e-8}))
    steps = 400
    sent = np.zeros((8, 8))
    for step in range(steps):
        sent[np.arange(8), graph.round(step).target] += 1 / steps
    assert 0.05 < sent[:4, 4:].sum() / 4 < 0.33
    assert (sent + np.eye(8)).min() > 0


@pytest.mark.parametrize("count", range(2, 18))
def test_spectral_gap_is_what_the_steps_take_away(count: int) -> None:
    # the exponential graph's matrices are circulant: eigenvalues (1 + w^d) / 2 for a distance d, w^count = 1
    distances = [1 << bit for bit in range((count - 1).bit_length())]
    cosines = np.abs(np.cos(np.pi * np.outer(np.arange(1, count), distances) / count)).prod(1)
    alone = GossipGroup(("",) * count)
    assert (1 - spectral_gap("exponential", alone)) ** len(distances) == pytest.approx(cosines.max(), abs=1e-9)
    if not count & count - 1:
        assert spectral_gap("base", alone) == spectral_gap("exponential", alone) == 1
    models = np.random.default_rng(count).standard_normal((count, 50))
    models -= models.mean(0)
    left = [(np.linalg.norm(mixing("random", count, step) @ models) / np.linalg.norm(models)) ** 2
            for step in range(500)]
    assert 1 - np.mean(left) ** 0.5 == pytest.approx(spectral_gap("random", alone), abs=0.02)
    assert spectral_gap("links", alone) == pytest.approx(spectral_gap("random", alone), abs=0.1)


class Local:
    """Messages between threads of this process, with the bytes from rank to rank.

    A message waits for nobody; what is received comes in the order in which the same sender sent it.
    """

    def __init__(self, rank: int, mail: dict[tuple[int, int], queue.Queue[FloatArray]],
                 sent: npt.NDArray[np.int64]) -> None:
        self.rank, self._mail, self._sent = rank, mail, sent

    def now(self) -> float:
        return time.perf_counter()

    def isend(self, peer: int, array: FloatArray, tag: int) -> None:
        self._sent[self.rank, peer] += array.nbytes
        self._mail[self.rank, peer].put(array.copy())

    def irecv(self, peer: int, array: FloatArray, tag: int) -> tuple[int, FloatArray]:
        return peer, array

    def waitall(self, requests: Sequence[tuple[int, FloatArray] | None]) -> None:
        for peer, array in filter(None, requests):
            array[:] = self._mail[peer, self.rank].get(timeout=10)


def summed(vectors: FloatArray, groups: Sequence[Sequence[int]], wire: type[np.floating[Any]] = np.float32,
           count: int = 1, at_once: bool = False) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """What each rank has after the sum, shape (ranks, elements), and the bytes from rank to rank."""
    ranks = len(vectors)
    result, sent = vectors.copy(), np.zeros((ranks, ranks), np.int64)
    mail = {pair: queue.Queue() for pair in itertools.product(range(ranks), repeat=2)}
    messages = [MeteredP2P(Local(rank, mail, sent), ("node",) * ranks)
                           for rank in range(ranks)]  # type: ignore[arg-type]
    threads = [threading.Thread(target=AllreduceOp(its, groups, vector, wire, at_once).run, args=(count,))
               for its, vector in zip(messages, result, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result, sent


def layouts() -> Iterator[tuple[int, ...]]:
    """Zone of each rank: every number of ranks, in zones of any size and order; one zone, and a zone for each."""
    random = np.random.default_rng(5)
    for ranks in range(1, 18):
        for zones in {1, 2, 3, ranks}:
            yield tuple(random.integers(0, zones, ranks).tolist()) if zones < ranks else tuple(range(ranks))


@pytest.mark.parametrize("zone", list(layouts()), ids=str)
def test_hierarchical_sum_and_its_bytes_are_those_of_the_definition(zone: tuple[int, ...]) -> None:
    ranks, zones = len(zone), len(set(zone))
    # divisible by the shards of every zone and the parts of every piece: no rounding is in the bytes
    sizes = [zone.count(name) for name in set(zone)]
    length = int(np.lcm.reduce(sizes)) * zones
    vectors = np.random.default_rng(ranks).standard_normal((ranks, length)).astype(np.float32)
    result, sent = summed(vectors, group_ranks(range(ranks), [str(name) for name in zone]))
    assert (result == result[0]).all(), "all ranks hold the same"
    assert np.allclose(result[0], vectors.sum(0, dtype=np.float64), rtol=0, atol=1e-5)
    assert np.array_equal(sent, np.rint(modelled("allreduce", "hierarchical", ranks, 4.0 * length, np.array(zone))))
    for name in set(zone):
        inside = np.array(zone) == name
        uplink = 2 * 4 * length * (zones - 1) // zones
        assert (sent[np.ix_(inside, ~inside)].sum(), sent[np.ix_(~inside, inside)].sum()) == (uplink, uplink)


@pytest.mark.parametrize("zone", list(layouts()), ids=str)
def test_sums_at_once_inside_zones_are_the_same_with_as_many_bytes(zone: tuple[int, ...]) -> None:
    ranks, groups = len(zone), group_ranks(range(len(zone)), [str(name) for name in zone])
    vectors = np.random.default_rng(ranks).standard_normal((ranks, 720_720)).astype(np.float32)
    result, sent = summed(vectors, groups, at_once=True)
    assert (result == result[0]).all(), "all ranks hold the same"
    assert np.allclose(result[0], vectors.sum(0, dtype=np.float64), rtol=0, atol=1e-4)
    _, by_rings = summed(vectors, groups)
    inside = np.equal.outer(zone, zone)
    assert np.array_equal(np.where(inside, 0, sent), np.where(inside, 0, by_rings)), "nothing else between zones"
    for group in groups:
        # a part of each to each of the others, on its way there and back
        part = 4 * vectors.shape[1] / len(group)
        assert np.allclose(sent[np.ix_(group, group)], 2 * part * (1 - np.eye(len(group))), atol=8)


@pytest.mark.parametrize("zone", list(layouts()), ids=str)
def test_means_in_half_the_bytes_err_by_no_more_than_is_said(zone: tuple[int, ...]) -> None:
    """Of values between 10^-9 and 10^3: below and above where numbers of 16 bits lose their precision."""
    ranks, groups, length = len(zone), group_ranks(range(len(zone)), [str(name) for name in zone]), 2 * len(zone) + 13
    random = np.random.default_rng(ranks)
    vectors = (random.standard_normal((ranks, length)) * 10 ** random.uniform(-9, 3, length)).astype(np.float32)
    result, sent = summed(vectors, groups, np.float16, ranks)
    assert (result == result[0]).all(), "all ranks hold the same"
    magnitude = np.abs(vectors).mean(0, dtype=np.float64)
    error = np.abs(result[0] - vectors.mean(0, dtype=np.float64))
    assert (error <= 1.01 * ranks * (2.0**-11 * magnitude + 2.0**-25)).all()
    whole, full = summed(vectors, groups, count=ranks)
    assert np.allclose(whole[0], vectors.mean(0, dtype=np.float64), rtol=0, atol=1e-6 * magnitude.max())
    assert np.array_equal(2 * sent, full)
    assert ranks == 1 or error.max() > np.abs(whole[0] - vectors.mean(0, dtype=np.float64)).max()


@pytest.mark.parametrize("length", [0, 1, 2, 7, 1000])
def test_vectors_that_no_zone_divides(length: int) -> None:
    vectors = np.random.default_rng(length).standard_normal((7, length)).astype(np.float32)
    result, sent = summed(vectors, [[0, 4, 5, 6], [1], [2, 3]])
    assert (result == result[0]).all()
    assert np.allclose(result[0], vectors.sum(0, dtype=np.float64), rtol=0, atol=1e-5)
    assert sent.sum() == 2 * 4 * length * (3 + 0 + 1 + 2), "2 N (m - 1) in a zone of m, 2 N (Z - 1) between the zones"


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_flat_ring_is_that_of_the_model(ranks: int) -> None:
    vectors = np.ones((ranks, 2 * ranks), np.float32)
    result, sent = summed(vectors, [range(ranks)])
    assert (result == ranks).all()
    assert np.array_equal(sent, modelled("allreduce", "ring", ranks, 8.0 * ranks))


def test_a_worker_alone_has_no_distance_from_the_mean() -> None:
    assert [spectral_gap(name, GossipGroup(("",))) for name in GRAPHS] == [1] * len(GRAPHS)


def test_every_pattern_of_gossip_has_its_graph() -> None:
    assert tuple(GRAPHS) == COMM_PATTERNS["gossip"]
    assert set(GRAPHS) == set(COMM_PATTERNS["adaptive-gossip"])
