"""Communication patterns compared with their definitions and with placement's traffic model."""

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

from slurmdl.gossip_graphs import GRAPHS
from slurmdl.plan import COMM_PATTERNS, group_ranks
from slurmdl.traffic import Traffic
from slurmdl.train.collectives import AllreduceOp
from slurmdl.train.mixers import spectral_gap
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.transports.transport import CHUNK_BYTES, MPI_INTER_ZONE_CHUNK_BYTES

FloatArray = npt.NDArray[np.float32]
GRAPHS_AND_COUNTS = [(name, count) for name in GRAPHS for count in range(1, 18)]


def make_zones(count: int, names: int = 3) -> tuple[str, ...]:
    """Zones of different sizes, in random order."""
    return tuple(map(str, np.random.default_rng(count).integers(0, names, count)))


def mixing_matrix(name: str, count: int, step: int) -> npt.NDArray[np.float64]:
    """Mixing matrix of a step."""
    return GRAPHS[name](make_zones(count), 3).round(step).mix(np.eye(count))


def modeled_bytes(strategy: str, pattern: str, ranks: int, model_bytes: float,
             zone: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
    """Bytes from rank to rank per iteration in placement's traffic model."""
    phases = Traffic(strategy, model_bytes, pattern=pattern).phases(ranks, zone)
    return sum((matrix(phase, ranks) for phase in phases), np.zeros((ranks, ranks)))


@pytest.mark.parametrize(("name", "count"), GRAPHS_AND_COUNTS)
def test_graph_preserves_sum_and_reaches_consensus(name: str, count: int) -> None:
    models = np.random.default_rng(count).standard_normal((count, 5))
    start = models - models.mean(0)
    for step in range(120):
        matrix = mixing_matrix(name, count, step)
        assert np.allclose(matrix.sum(0), 1, rtol=0, atol=1e-12)
        assert np.allclose(matrix.sum(1), 1, rtol=0, atol=1e-12)
        assert matrix.min() >= 0
        models = matrix @ models
    assert np.abs(models - models.mean(0)).max() <= 1e-3 * np.abs(start).max()


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["base-2", "one-peer-exponential"])
def test_graph_of_power_of_two_averages_exactly_in_log2_rounds(name: str, count: int) -> None:
    rounds = count.bit_length() - 1
    for first in range(rounds):
        after = np.eye(count)
        for step in range(first, first + rounds):
            assert not (after == 1 / count).all()
            after = mixing_matrix(name, count, step) @ after
        assert (after == 1 / count).all()


@pytest.mark.parametrize("count", range(1, 18))
def test_random_matching_is_new_in_each_step(count: int) -> None:
    targets = set()
    for step in range(5):
        target = GRAPHS["random-matching"](make_zones(count), 1).round(step).target
        targets.add(tuple(target))
        assert (target[target] == np.arange(count)).all()
        assert (target == np.arange(count)).sum() == count % 2
    assert len(targets) > 1 or count <= 2


@pytest.mark.parametrize(("name", "count"), GRAPHS_AND_COUNTS)
def test_graph_partners_match_traffic_model(name: str, count: int) -> None:
    """Exactly over a period; for random matching, in the mean of many steps."""
    zones = make_zones(count)
    graph = GRAPHS[name](zones, 3)
    steps = graph.period or 2000
    sent = np.zeros((count, count))
    for step in range(steps):
        sent[np.arange(count), graph.round(step).target] += 1
    np.fill_diagonal(sent, 0)
    expected = modeled_bytes("gossip", name, count, 1.0, np.array(zones, dtype=np.int64))
    assert np.allclose(sent / steps, expected, rtol=0, atol=0.06 if name == "random-matching" else 1e-12)
    assert np.isclose(sent.sum() / steps, expected.sum())


@pytest.mark.parametrize("count", range(1, 18))
def test_base2_averages_any_count_exactly_in_one_period(count: int) -> None:
    graph = GRAPHS["base-2"](("",) * count)
    odd = count // (count & -count)
    blocks = (count & -count).bit_length() - 1
    assert graph.period == max(1, blocks + (2 * (odd.bit_length() - 1) + 1 if odd > 1 else 0))
    after = np.eye(count)
    for step in range(graph.period):
        after = graph.round(step).mix(after)
    assert np.allclose(after, 1 / count, rtol=0, atol=1e-12)
    assert spectral_gap("base-2", ("",) * count) == pytest.approx(1, abs=0.02)


def test_zone_aware_crosses_zones_in_every_fourth_step_and_averages_exactly() -> None:
    zones = ("a", "b", "b", "a", "c", "c", "d", "d")
    graph = GRAPHS["zone-aware"](zones)
    after = np.eye(8)
    for step in range(graph.period):
        target = graph.round(step).target
        crosses = [zones[worker] != zones[peer] for worker, peer in enumerate(target.tolist())]
        assert all(crosses) if step % 4 == 3 else not any(crosses)
        after = graph.round(step).mix(after)
    assert graph.period == 8
    assert np.allclose(after, 1 / 8, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", range(2, 18))
def test_spectral_gap_matches_observed_contraction(count: int) -> None:
    # the exponential graph's matrices are circulant: eigenvalues (1 + w^d) / 2 for a distance d, w^count = 1
    distances = [1 << bit for bit in range((count - 1).bit_length())]
    cosines = np.abs(np.cos(np.pi * np.outer(np.arange(1, count), distances) / count)).prod(1)
    zones = ("",) * count
    assert (1 - spectral_gap("one-peer-exponential", zones)) ** len(distances) == pytest.approx(cosines.max(),
                                                                                                abs=1e-9)
    if not count & count - 1:
        assert spectral_gap("base-2", zones) == spectral_gap("one-peer-exponential", zones) == 1
    models = np.random.default_rng(count).standard_normal((count, 50))
    models -= models.mean(0)
    contraction = [(np.linalg.norm(mixing_matrix("random-matching", count,
                   step) @ models) / np.linalg.norm(models)) ** 2
            for step in range(500)]
    assert 1 - np.mean(contraction) ** 0.5 == pytest.approx(spectral_gap("random-matching", zones), abs=0.02)


class ThreadTransport:
    """Messages between threads of this process; counts the bytes from rank to rank.

    Sends do not block, and messages of one sender arrive in order.
    """

    inter_zone_chunk_bytes = MPI_INTER_ZONE_CHUNK_BYTES

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[FloatArray]],
                 sent: npt.NDArray[np.int64]) -> None:
        self.rank, self._queues, self._sent = rank, queues, sent

    def now(self) -> float:
        return time.perf_counter()

    def isend(self, peer: int, array: FloatArray, tag: int) -> None:
        assert array.nbytes <= CHUNK_BYTES
        self._sent[self.rank, peer] += array.nbytes
        self._queues[self.rank, peer].put(array.copy())

    def irecv(self, peer: int, array: FloatArray, tag: int) -> tuple[int, FloatArray]:
        return peer, array

    def waitall(self, requests: Sequence[tuple[int, FloatArray] | None]) -> None:
        for peer, array in filter(None, requests):
            array[:] = self._queues[peer, self.rank].get(timeout=60)


def run_allreduce(vectors: FloatArray, groups: Sequence[Sequence[int]],
                  wire_dtype: type[np.floating[Any]] = np.float32, divisor: int = 1,
                  direct: bool = False) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Each rank's result, shape (ranks, elements), and the bytes from rank to rank."""
    ranks = len(vectors)
    result, sent = vectors.copy(), np.zeros((ranks, ranks), np.int64)
    queues = {pair: queue.Queue() for pair in itertools.product(range(ranks), repeat=2)}
    p2ps = [MeteredP2P(ThreadTransport(rank, queues, sent), ("intra_node",) * ranks)  # type: ignore[arg-type]
            for rank in range(ranks)]
    threads = [threading.Thread(target=AllreduceOp(p2p, groups, vector, wire_dtype, direct).run, args=(divisor,))
               for p2p, vector in zip(p2ps, result, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result, sent


def layouts() -> Iterator[tuple[int, ...]]:
    """Zone of each rank, for all numbers of ranks: random zones, a single zone, and one zone per rank."""
    random = np.random.default_rng(5)
    for ranks in range(1, 18):
        for zones in {1, 2, 3, ranks}:
            yield tuple(random.integers(0, zones, ranks).tolist()) if zones < ranks else tuple(range(ranks))


@pytest.mark.parametrize("zone", list(layouts()), ids=str)
def test_hierarchical_allreduce_result_and_bytes_match_definition(zone: tuple[int, ...]) -> None:
    ranks, zones = len(zone), len(set(zone))
    # divisible by all shards and chunks, so that the bytes have no rounding
    sizes = [zone.count(name) for name in set(zone)]
    length = int(np.lcm.reduce(sizes)) * zones
    vectors = np.random.default_rng(ranks).standard_normal((ranks, length)).astype(np.float32)
    result, sent = run_allreduce(vectors, group_ranks(range(ranks), [str(name) for name in zone]))
    assert (result == result[0]).all(), "ranks differ"
    assert np.allclose(result[0], vectors.sum(0, dtype=np.float64), rtol=0, atol=1e-5)
    assert np.array_equal(sent, np.rint(modeled_bytes("allreduce", "hierarchical", ranks, 4.0 * length,
                          np.array(zone))))
    for name in set(zone):
        inside = np.array(zone) == name
        uplink = 2 * 4 * length * (zones - 1) // zones
        assert (sent[np.ix_(inside, ~inside)].sum(), sent[np.ix_(~inside, inside)].sum()) == (uplink, uplink)


@pytest.mark.parametrize("zone", list(layouts()), ids=str)
def test_direct_allreduce_in_zones_sends_same_bytes_as_rings(zone: tuple[int, ...]) -> None:
    ranks, groups = len(zone), group_ranks(range(len(zone)), [str(name) for name in zone])
    vectors = np.random.default_rng(ranks).standard_normal((ranks, 55_440)).astype(np.float32)
    result, sent = run_allreduce(vectors, groups, direct=True)
    assert (result == result[0]).all(), "ranks differ"
    assert np.allclose(result[0], vectors.sum(0, dtype=np.float64), rtol=0, atol=1e-4)
    _, by_rings = run_allreduce(vectors, groups)
    inside = np.equal.outer(zone, zone)
    assert np.array_equal(np.where(inside, 0, sent), np.where(inside, 0, by_rings)), "other bytes between zones"
    for group in groups:
        # each pair exchanges one chunk in the reduce-scatter, and one in the allgather
        chunk = 4 * vectors.shape[1] / len(group)
        assert np.allclose(sent[np.ix_(group, group)], 2 * chunk * (1 - np.eye(len(group))), atol=8)


@pytest.mark.parametrize("zone", list(layouts()), ids=str)
def test_fp16_allreduce_halves_bytes_within_error_bound(zone: tuple[int, ...]) -> None:
    """Values between 10^-9 and 10^3, below and above the range of normal fp16 numbers."""
    ranks, groups, length = len(zone), group_ranks(range(len(zone)), [str(name) for name in zone]), 2 * len(zone) + 13
    random = np.random.default_rng(ranks)
    vectors = (random.standard_normal((ranks, length)) * 10 ** random.uniform(-9, 3, length)).astype(np.float32)
    result, sent = run_allreduce(vectors, groups, np.float16, ranks)
    assert (result == result[0]).all(), "ranks differ"
    magnitude = np.abs(vectors).mean(0, dtype=np.float64)
    error = np.abs(result[0] - vectors.mean(0, dtype=np.float64))
    assert (error <= 1.01 * ranks * (2.0**-11 * magnitude + 2.0**-25)).all()
    fp32_result, fp32_sent = run_allreduce(vectors, groups, divisor=ranks)
    assert np.allclose(fp32_result[0], vectors.mean(0, dtype=np.float64), rtol=0, atol=1e-6 * magnitude.max())
    assert np.array_equal(2 * sent, fp32_sent)
    assert ranks == 1 or error.max() > np.abs(fp32_result[0] - vectors.mean(0, dtype=np.float64)).max()


@pytest.mark.parametrize("length", [0, 1, 2, 7, 1000, 7 * CHUNK_BYTES // 4 + 3])
def test_hierarchical_allreduce_indivisible_length(length: int) -> None:
    vectors = np.random.default_rng(length).standard_normal((7, length)).astype(np.float32)
    result, sent = run_allreduce(vectors, [[0, 4, 5, 6], [1], [2, 3]])
    assert (result == result[0]).all()
    assert np.allclose(result[0], vectors.sum(0, dtype=np.float64), rtol=0, atol=1e-5)
    assert sent.sum() == 2 * 4 * length * (3 + 0 + 1 + 2), "2 N (m - 1) in a zone of m, 2 N (Z - 1) between the zones"


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_ring_allreduce_bytes_match_traffic_model(ranks: int) -> None:
    vectors = np.ones((ranks, 2 * ranks), np.float32)
    result, sent = run_allreduce(vectors, [range(ranks)])
    assert (result == ranks).all()
    assert np.array_equal(sent, modeled_bytes("allreduce", "ring", ranks, 8.0 * ranks))


def test_spectral_gap_of_single_worker_is_one() -> None:
    assert [spectral_gap(name, ("",)) for name in GRAPHS] == [1] * len(GRAPHS)


def test_graphs_match_comm_patterns() -> None:
    assert tuple(GRAPHS) == COMM_PATTERNS["gossip"]
    assert set(GRAPHS) == set(COMM_PATTERNS["adaptive-gossip"])
