"""Schedule of a probe, and links estimated from pairs."""

from __future__ import annotations

import itertools
import math
import random
from statistics import median, pstdev

import pytest

from slurmdl import records
from slurmdl.errors import InputError
from slurmdl.links.probe.pair_probe import PairMeasurement, ProbeConfig
from slurmdl.links.probe.probe_step import estimate_links, round_robin_schedule
from slurmdl.links.probe.protocol import steady_state_rate


@pytest.mark.parametrize("sizes", [[2], [3], [4], [7, 1], [8, 8], [5, 6, 7], [1, 1, 1], [40] * 9])
def test_rounds_are_disjoint_and_cover_all_zone_pairs(sizes):
    leaf = [zone for zone, size in enumerate(sizes) for _ in range(size)]
    rounds = list(round_robin_schedule(leaf, seed=3))
    peers_of: dict[int, set[int]] = {node: set() for node in range(len(leaf))}
    zone_pairs = set()
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(set(nodes)) == len(nodes)
        across = [zone for a, b in pairs for zone in (leaf[a], leaf[b]) if leaf[a] != leaf[b]]
        assert len(set(across)) == len(across)  # at most one probe per uplink
        for a, b in pairs:
            peers_of[a].add(b)
            peers_of[b].add(a)
            zone_pairs.add(frozenset((leaf[a], leaf[b])))
    for node, peers in peers_of.items():
        inside = [right for right in peers if leaf[right] == leaf[node]]
        assert len(inside) >= min(3, sizes[leaf[node]] - 1 - sizes[leaf[node]] % 2)
    assert {frozenset(pair) for pair in itertools.combinations(range(len(sizes)), 2)} <= zone_pairs
    assert sum(map(len, rounds)) <= 2 * len(leaf) + 2 * math.comb(len(sizes), 2)


def test_rounds_are_reproducible_by_seed():
    first, same, right = (list(round_robin_schedule([0, 1] * 8, seed)) for seed in (5, 5, 6))
    assert first == same != right


def pairs_of(nodes: dict[str, tuple[float, float, float]], leaf: dict[str, str], noise: float = 0.0,
             inter_leaf: tuple[float, float, float] = (1e9, 0.0, 0.0)) -> list[PairMeasurement]:
    """Pairs that a probe would measure over links of these throughputs, RTTs and losses."""
    names, rng = list(nodes), random.Random(1)
    samples = []
    for rounds in round_robin_schedule([sorted(set(leaf.values())).index(leaf[name]) for name in names], 2):
        for a, b in ((names[i], names[j]) for i, j in rounds):
            links = [nodes[a], nodes[b]] + [inter_leaf] * (leaf[a] != leaf[b])
            rate, rtt, loss = (min(link[0] for link in links), sum(link[1] for link in links),
                                 1 - math.prod(1 - link[2] for link in links))
            factors = [rng.gauss(1, noise) for _ in range(3)]
            samples.append(PairMeasurement(a, b, rate * factors[0], rate * factors[1], rtt * factors[2], rtt, loss))
    return samples


CLEAN = (1e9, 2e-5, 0.0)


def test_estimates_separate_node_and_inter_leaf_links():
    nodes = dict.fromkeys((f"n{i}" for i in range(12)), CLEAN) | {
        "n2": (1e8, 2e-5, 0.0), "n5": (1e9, 2e-2, 0.0), "n9": (1e9, 2e-5, 0.03)}
    leaf = {name: "ab"[int(name[1:]) % 2] for name in nodes}
    pairs = pairs_of(nodes, leaf, inter_leaf=(5e7, 1e-4, 0.01))
    samples = {(s.kind, s.name): s for s in estimate_links(pairs, leaf, 7.0)}
    for name, (rate, rtt, loss) in nodes.items():
        sample = samples["node", name]
        assert sample.throughput == pytest.approx(rate)
        assert sample.rtt == pytest.approx(rtt, abs=1e-9)
        assert sample.loss == pytest.approx(loss, abs=1e-9)
        assert (sample.time, sample.source) == (7.0, "probe")
    inter_leaf = samples["inter_leaf", "a|b"]
    assert (inter_leaf.throughput, inter_leaf.rtt, inter_leaf.loss) == pytest.approx((5e7, 1e-4, 0.01))
    assert samples["zone", "a"].throughput == pytest.approx(5e7)
    assert samples["zone", "a"].rtt == pytest.approx(5e-5)


def test_estimates_are_robust_against_noise_and_a_bad_peer():
    nodes = dict.fromkeys((f"n{i:02d}" for i in range(40)), CLEAN) | {"n07": (1e8, 1e-2, 0.02)}
    samples = {s.name: s for s in estimate_links(pairs_of(nodes, dict.fromkeys(nodes, "z"), noise=0.1), {}, 0.0)}
    assert samples["n07"].throughput == pytest.approx(1e8, rel=0.2)
    assert samples["n07"].rtt == pytest.approx(1e-2, rel=0.2)
    clean = [sample for name, sample in samples.items() if name != "n07"]
    assert min(sample.throughput for sample in clean) > 7e8
    assert max(sample.rtt for sample in clean) < 1e-3
    assert max(sample.loss for sample in clean) < 1e-3


def test_estimates_of_few_pairs():
    pairs = [PairMeasurement("x", "y", 1e8, 2e8, 1e-3, 2e-3, 0.02)]
    samples = {(s.kind, s.name): s for s in estimate_links(pairs, {"x": "a", "y": "b"}, 0.0)}
    assert samples["node", "x"].throughput == 1e8  # lone nodes get the values of their path
    assert samples["node", "x"].rtt == pytest.approx(5e-4)
    assert samples["inter_leaf", "a|b"].rtt == 0.0
    [first, second] = estimate_links([PairMeasurement("x", "y", rtt=1e-3)], {}, 0.0)
    assert (first.throughput, first.loss, second.rtt) == (None, None, 5e-4), "not measured"
    assert [sample.throughput_rse for sample in estimate_links([PairMeasurement("a", "b", 1e9, 1e9)], {}, 0.0)] == [
        None, None], "too few paths for a standard error"
    assert estimate_links([], {}, 0.0) == []


def test_estimated_p99_is_not_below_the_median():
    pairs = [PairMeasurement("late", "a", rtt=2e-2, rtt_p99=2.05e-2),
             PairMeasurement("late", "b", rtt=2e-2, rtt_p99=2.1e-2),
             PairMeasurement("a", "b", rtt=4e-5, rtt_p99=5e-3)]
    assert all(sample.rtt_p99 >= sample.rtt > 0 for sample in estimate_links(pairs, {}, 0.0))


@pytest.mark.parametrize("data", [
    {}, [], None, {"first": "a"}, {"first": "a", "second": "b", "loss": -1},
    {"first": "a", "second": "b", "rtt": "x"},
    {"first": "a", "second": "b", "forward": float("nan")}, {"first": "a", "second": "b", "forward": 1e16},
    {"first": "a", "second": "b", "speed": 1}])
def test_malformed_pair_is_rejected(data):
    with pytest.raises(InputError):
        records.from_json(PairMeasurement, data)


def test_pair_round_trips_as_json():
    pair = PairMeasurement("a", "b", 1e8, None, 1e-3, 2e-3, 0.0)
    assert records.from_json(PairMeasurement, records.to_json(pair)) == pair
    assert pair.throughput == 1e8


@pytest.mark.parametrize(("received", "rate"), [
    ([(0.0, 0), (1.0, 10), (1.5, 60), (2.0, 110)], 100),  # a slow start
    ([(0.0, 0), (0.0, 20), (0.2, 40), (0.4, 60), (0.6, 80), (0.8, 100)], 100),  # a full bucket
    ([(0.0, 0), (0.5, 10)], 20), ([(0.0, 0), (0.0, 10)], 0.0)])
def test_steady_state_rate(received, rate):
    assert steady_state_rate(received) == pytest.approx(rate)


def test_scaled_config_takes_the_given_time():
    assert ProbeConfig().scaled_to(0.2).expected_s == pytest.approx(0.2, rel=0.1)
    assert ProbeConfig().scaled_to(2.0).expected_s == pytest.approx(2.0, rel=0.1)
    assert ProbeConfig().scaled_to(1e6).expected_s < 5


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_estimated_standard_error_matches_the_actual_error(noise):
    """400 nodes of two speeds, one in 50 slow."""
    rng = random.Random(4)
    speed = {f"n{i}": (1e9 if i % 2 else 1e10) / (10 if i % 50 == 7 else 1) for i in range(400)}
    names = list(speed)
    pairs = [PairMeasurement(names[a], names[b], expected * rng.gauss(1, noise), expected * rng.gauss(1, noise))
             for pairs_of_round in round_robin_schedule([i // 20 for i in range(400)], 1, pairs_per_zone_pair=0)
             for a, b in pairs_of_round
             for expected in [min(speed[names[a]], speed[names[b]])]]
    samples = estimate_links(pairs, dict.fromkeys(names, "z"), 0.0)
    errors = [math.log(sample.throughput / speed[sample.name]) for sample in samples if speed[sample.name] == 1e9]
    assert median(sample.throughput_rse for sample in samples) == pytest.approx(pstdev(errors), rel=0.6)
