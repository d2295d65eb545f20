"""Rounds of a probe, and links from pairs."""

from __future__ import annotations

import itertools
import math
import random
from statistics import median, pstdev

import pytest

from slurmdl.errors import InputError
from slurmdl.links.probe.link_estimator import estimate_links, estimate_own_link
from slurmdl.links.probe.measurement import PairMeasurement, ProbeConfig
from slurmdl.links.probe.protocol import steady_state_rate
from slurmdl.links.probe.schedule import round_robin_schedule


@pytest.mark.parametrize("sizes", [[2], [3], [4], [7, 1], [8, 8], [5, 6, 7], [1, 1, 1], [40] * 9])
def test_rounds_are_disjoint_and_few(sizes):
    leaf = [zone for zone, size in enumerate(sizes) for _ in range(size)]
    drawn = list(round_robin_schedule(leaf, seed=3))
    met: dict[int, set[int]] = {node: set() for node in range(len(leaf))}
    ways = set()
    for pairs in drawn:
        nodes = [node for pair in pairs for node in pair]
        assert len(set(nodes)) == len(nodes)
        across = [zone for a, b in pairs for zone in (leaf[a], leaf[b]) if leaf[a] != leaf[b]]
        assert len(set(across)) == len(across)  # no uplink carries two probes
        for a, b in pairs:
            met[a].add(b)
            met[b].add(a)
            ways.add(frozenset((leaf[a], leaf[b])))
    for node, others in met.items():
        inside = [other for other in others if leaf[other] == leaf[node]]
        assert len(inside) >= min(3, sizes[leaf[node]] - 1 - sizes[leaf[node]] % 2)
    assert {frozenset(pair) for pair in itertools.combinations(range(len(sizes)), 2)} <= ways
    assert sum(map(len, drawn)) <= 2 * len(leaf) + 2 * math.comb(len(sizes), 2)


def test_rounds_are_the_same_for_a_seed():
    assert list(round_robin_schedule([0, 1] *
    8, 5)) == list(round_robin_schedule([0, 1] *
    8, 5)) != list(round_robin_schedule([0, 1] *
     8, 6))


def pairs_of(nodes: dict[str, tuple[float, float, float]], leaf: dict[str, str], noise: float = 0.0,
             trunk: tuple[float, float, float] = (1e9, 0.0, 0.0)) -> list[PairMeasurement]:
    """What a probe would measure over links of these throughputs, delays and losses."""
    names, draw = list(nodes), random.Random(1)
    found = []
    for drawn in round_robin_schedule([sorted(set(leaf.values())).index(leaf[name]) for name in names], 2):
        for a, b in ((names[i], names[j]) for i, j in drawn):
            links = [nodes[a], nodes[b]] + [trunk] * (leaf[a] != leaf[b])
            rate, delay, loss = (min(link[0] for link in links), sum(link[1] for link in links),
                                 1 - math.prod(1 - link[2] for link in links))
            shake = [draw.gauss(1, noise) for _ in range(3)]
            found.append(PairMeasurement(a, b, rate * shake[0], rate * shake[1], delay * shake[2], delay, loss))
    return found


CLEAN = (1e9, 2e-5, 0.0)


def test_each_link_is_told_apart():
    nodes = dict.fromkeys((f"n{i}" for i in range(12)), CLEAN) | {
        "n2": (1e8, 2e-5, 0.0), "n5": (1e9, 2e-2, 0.0), "n9": (1e9, 2e-5, 0.03)}
    leaf = {name: "ab"[int(name[1:]) % 2] for name in nodes}
    found = {(s.kind, s.name): s for s in estimate_links(pairs_of(nodes, leaf, trunk=(5e7, 1e-4, 0.01)), leaf, 7.0)}
    for name, (rate, delay, loss) in nodes.items():
        sample = found["node", name]
        assert sample.throughput == pytest.approx(rate)
        assert sample.rtt == pytest.approx(delay, abs=1e-9)
        assert sample.loss == pytest.approx(loss, abs=1e-9)
        assert (sample.time, sample.source) == (7.0, "probe")
    trunk = found["inter_leaf", "a|b"]
    assert (trunk.throughput, trunk.rtt, trunk.loss) == pytest.approx((5e7, 1e-4, 0.01))
    assert found["zone", "a"].throughput == pytest.approx(5e7)
    assert found["zone", "a"].rtt == pytest.approx(5e-5)


def test_noise_moves_no_link_far_and_a_bad_peer_blackens_nobody():
    nodes = dict.fromkeys((f"n{i:02d}" for i in range(40)), CLEAN) | {"n07": (1e8, 1e-2, 0.02)}
    found = {s.name: s for s in estimate_links(pairs_of(nodes, dict.fromkeys(nodes, "z"), noise=0.1), {}, 0.0)}
    assert found["n07"].throughput == pytest.approx(1e8, rel=0.2)
    assert found["n07"].rtt == pytest.approx(1e-2, rel=0.2)
    clean = [sample for name, sample in found.items() if name != "n07"]
    assert min(sample.throughput for sample in clean) > 7e8
    assert max(sample.rtt for sample in clean) < 1e-3
    assert max(sample.loss for sample in clean) < 1e-3


def test_nodes_alone_in_their_zones_have_their_ways():
    pairs = [PairMeasurement("x", "y", 1e8, 2e8, 1e-3, 2e-3, 0.02)]
    found = {(s.kind, s.name): s for s in estimate_links(pairs, {"x": "a", "y": "b"}, 0.0)}
    assert found["node", "x"].throughput == 1e8
    assert found["node", "x"].rtt == pytest.approx(5e-4)
    assert found["inter_leaf", "a|b"].rtt == 0.0


def test_a_tail_is_never_below_the_median():
    """The other ends' tails vary more than their medians; a sample that contradicts itself would be thrown away."""
    pairs = [PairMeasurement("late", "a", rtt=2e-2, rtt_p99=2.05e-2), PairMeasurement("late", "b", rtt=2e-2, rtt_p99=2.1e-2),
             PairMeasurement("a", "b", rtt=4e-5, rtt_p99=5e-3)]
    for sample in estimate_links(pairs, {}, 0.0):
        assert sample.rtt is not None
        assert sample.rtt_p99 is not None
        assert sample.rtt_p99 >= sample.rtt


def test_what_was_not_measured_stays_unknown():
    [first, second] = estimate_links([PairMeasurement("x", "y", rtt=1e-3)], {}, 0.0)
    assert (first.throughput, first.loss, second.rtt) == (None, None, 5e-4)
    assert estimate_links([], {}, 0.0) == []


def test_one_node_alone_says_what_its_best_way_says():
    pairs = [
    PairMeasurement(
        "x",
        "y",
        1e8,
        9e7,
        1e-3,
        2e-3,
        0.02),
        PairMeasurement(
            "x",
            "z",
            1e9,
            9e8,
            4e-5,
            5e-5,
             0.0)]
    sample = estimate_own_link(pairs, "x", 1.0)
    assert sample is not None
    assert (sample.throughput, sample.rtt, sample.loss, sample.source) == (9e8, 2e-5, 0.0, "serve")
    assert estimate_own_link([], "x", 1.0) is None


@pytest.mark.parametrize("data", [
    {}, [], None, {"first": "a"}, {"first": "a", "second": "b", "loss": -1},
    {"first": "a", "second": "b", "rtt": "x"},
    {"first": "a", "second": "b", "forward": float("nan")}, {"first": "a", "second": "b", "forward": 1e16},
    {"first": "a", "second": "b", "speed": 1}])
def test_a_pair_that_is_none(data):
    with pytest.raises(InputError):
        PairMeasurement.from_json(data)


def test_a_pair_survives_json():
    pair = PairMeasurement("a", "b", 1e8, None, 1e-3, 2e-3, 0.0)
    assert PairMeasurement.from_json(pair.to_json()) == pair
    assert pair.throughput == 1e8


def test_a_rate_is_that_of_the_running_stream():
    slow_start = [(0.0, 0), (1.0, 10), (1.5, 60), (2.0, 110)]
    assert steady_state_rate(slow_start) == pytest.approx(100)
    full_bucket = [(0.0, 0), (0.0, 20), (0.2, 40), (0.4, 60), (0.6, 80), (0.8, 100)]
    assert steady_state_rate(full_bucket) == pytest.approx(100)
    assert steady_state_rate([(0.0, 0), (0.5, 10)]) == pytest.approx(20)
    assert steady_state_rate([(0.0, 0), (0.0, 10)]) == 0.0


def test_an_effort_takes_about_as_long_as_there_is_time():
    assert ProbeConfig().scaled_to(0.2).expected_s == pytest.approx(0.2, rel=0.1)
    assert ProbeConfig().scaled_to(2.0).expected_s == pytest.approx(2.0, rel=0.1)
    assert ProbeConfig().scaled_to(1e6).expected_s < 5


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_a_fit_tells_its_own_noise(noise):
    """Of 400 nodes of two speeds, one in 50 slow: what the fit says it is off by is near what it is off by."""
    draw = random.Random(4)
    speed = {f"n{i}": (1e9 if i % 2 else 1e10) / (10 if i % 50 == 7 else 1) for i in range(400)}
    names = list(speed)
    pairs = [PairMeasurement(names[a], names[b], carried * draw.gauss(1, noise), carried * draw.gauss(1, noise))
             for games in round_robin_schedule([i // 20 for i in range(400)], 1, pairs_per_zone_pair=0) for a, b in games
             for carried in [min(speed[names[a]], speed[names[b]])]]
    found = estimate_links(pairs, dict.fromkeys(names, "z"), 0.0)
    off = [math.log(sample.throughput / speed[sample.name]) for sample in found if speed[sample.name] == 1e9]
    assert median(sample.throughput_rse for sample in found) == pytest.approx(pstdev(off), rel=0.6)


def test_too_few_ways_tell_no_noise():
    assert [sample.throughput_rse for sample in estimate_links(
        [PairMeasurement("a", "b", 1e9, 1e9)], {}, 0.0)] == [None, None]
