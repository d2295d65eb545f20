"""Samples of links aggregated into scores (medians, decay, hysteresis, rejections), and the capacities they give."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placing import idle, job, two_level

from slurmdl import records
from slurmdl.config import LinkScoresConfig
from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError
from slurmdl.links import aggregate, capacity, prometheus
from slurmdl.links.link_scores import LinkScore, LinkScores, MetricWeights, inter_leaf_name
from slurmdl.links.samples import SOURCES, LinkSample, format_sample_lines, parse_sample_lines
from slurmdl.links.score_sources import parse_scores
from slurmdl.placement.place import place_job

NOW = 1.8e9
FOUR = two_level(("n1", "n2"), ("n3", "n4"))
TCP, RDMA = np.array([False]), np.array([True])
bounded = settings(max_examples=20, deadline=None, derandomize=True)


def probes(*throughputs: float, name: str = "n1", every: float = 10.0, **metrics: float) -> list[LinkSample]:
    """Probe samples; the last one has the time NOW."""
    return [LinkSample("node", name, NOW - every * i, "probe", throughput=throughput, **metrics)  # type: ignore[arg-type]
            for i, throughput in enumerate(reversed(throughputs))]


def changed(samples: list[LinkSample], **metrics: list[float]) -> list[LinkSample]:
    """The samples with these values of each metric."""
    return [sample._replace(**dict(zip(metrics, values, strict=True)))
            for sample, values in zip(samples, zip(*metrics.values(), strict=True), strict=True)]


def rtts(*values: float) -> list[LinkSample]:
    return [LinkSample("node", "n1", NOW, "probe", rtt=value) for value in values]


COUNTERS = [LinkSample("node", "n1", NOW - i, "counters", throughput=1.25e9, loss=0.0) for i in range(20)]
BEFORE = LinkScore(1e9, rtt=1e-4)


@pytest.mark.parametrize(("samples", "previous", "half_life", "expected"), [
    (probes(1e9, 1.02e9, 1e3, 0.98e9, 1e9), None, 300.0, {"throughput": 1e9}),  # an outlier
    ([each._replace(time=each.time - 30) for each in probes(1e9, 1e9, 1e9)], None, 300.0,
     {"samples": 3, "age": 30.0, "source": "probe"}),
    (probes(1e9, 1e9, 1e9, 1e8, 1e8), None, 10.0, {"throughput": 1e8}),  # recent samples weigh more
    (probes(1e9, 1e9, 1e9, 1e8, 1e8), None, 0.0, {"throughput": 1e9}),
    (changed(probes(*[1e9] * 5), rtt=[1e-4] * 5, rtt_p99=[2e-4, 2e-4, 1e-2, 2e-4, 2e-4]), None, 300.0,
     {"rtt": 1e-4, "rtt_p99": 1e-2}),
    (changed(probes(*[1e9] * 12), loss=[1.0 if i == 4 else 0.0 for i in range(12)]), None, 300.0, {"loss": 0.0}),
    (changed(probes(*[1e9] * 12), loss=[0.02, 0.0, 0.0] * 4), None, 300.0,
     {"loss": pytest.approx(0.0055, abs=0.0025)}),  # a trimmed mean
    (probes(0.0, 0.0, 0.0), None, 300.0, {"throughput": aggregate.MIN_THROUGHPUT}),
    (probes(1e9) * 3, None, 300.0, {"samples": 1}),  # duplicates
    (COUNTERS, None, 300.0, {"throughput": 1.25e9, "source": "counters"}),
    ([*COUNTERS, *probes(1e8)], None, 300.0, {"throughput": 1e8, "source": "probe"}),
    # counters weigh a quarter
    ([*COUNTERS[:1], LinkSample("node", "n1", NOW, "probe", loss=0.1)], None, 300.0, {"loss": pytest.approx(0.08)}),
    # within the deadband, worse by it, all better by it, not all better
    *((probes(*values), BEFORE, 0, {"throughput": expected}) for values, expected in (
        ([1.1e9] * 5, 1e9), ([0.9e9] * 5, 1e9), ([0.8e9] * 5, 0.8e9), ([1.3e9] * 5, 1.3e9),
        ([0.9e9, 0.9e9, 1.3e9, 1.3e9, 1.3e9], 1e9))),
    *((rtts(*values), BEFORE, 0, {"rtt": expected}) for values, expected in (
        ([1.1e-4], 1e-4), ([2e-4], 2e-4), ([5e-5], 5e-5), ([5e-5, 5.1e-5, 5.2e-5, 1.1e-4, 1.2e-4], 1e-4))),
])
def test_score_of_samples(samples: list[LinkSample], previous: LinkScore | None, half_life: float,
                          expected: dict[str, object]) -> None:
    before = LinkScores(nodes={"n1": previous}) if previous else None
    result = aggregate.aggregate_scores(samples, NOW, before, LinkScoresConfig(half_life=half_life)).nodes["n1"]
    assert {key: getattr(result, key) for key in expected} == expected


def test_published_throughput_rarely_changes_with_noise() -> None:
    rng, changes = random.Random(1), 0
    published = aggregate.aggregate_scores(probes(1e9), NOW)
    for _ in range(200):
        samples = probes(*(1e9 * rng.gauss(1, 0.1) for _ in range(5)), every=30.0)
        result = aggregate.aggregate_scores(samples, NOW, published)
        throughput = result.nodes["n1"].throughput
        changes += throughput != published.nodes["n1"].throughput
        assert throughput is not None and 0.7e9 < throughput < 1.3e9
        published = result
    assert changes < 20


def test_implausible_samples_are_ignored() -> None:
    ignored = [LinkSample("node", "future", NOW + 3600, "probe", throughput=1e9),
               LinkSample("node", "old", NOW - 1e6, "probe", throughput=1e9),
               LinkSample("node", "empty", NOW, "probe"),
               LinkSample("node", "inconsistent", NOW, "probe", rtt=1e-3, rtt_p99=1e-5)]
    assert list(aggregate.aggregate_scores([*probes(1e9), *ignored], NOW).nodes) == ["n1"]


@pytest.mark.parametrize(("changes", "message"), [
    *(({key: value}, "expected a number") for key in ("throughput", "rtt", "rtt_p99", "loss", "time")
      for value in (-1.0, math.nan, math.inf, "1", True, 10**400, [], {})),
    ({"time": None}, "expected a number"), *(({key: None}, "") for key in ("throughput", "rtt", "rtt_p99", "loss")),
    *(({"name": name}, "expected a node name") for name in ("", "a\nb", 5, None)),
    *(({"kind": "inter_leaf", "name": name}, "sorted order") for name in ("a", "b|a", "|", "a|", "a|b|c")),
], ids=lambda value: str(value)[:30])
def test_sample_out_of_range_is_rejected(changes: dict[str, object], message: str) -> None:
    data = {"kind": "node", "name": "n", "time": 1.0, "source": "probe", **changes}
    if not message:
        LinkSample.from_json(data)
        return
    with pytest.raises(InputError, match=message):
        LinkSample.from_json(data)


def test_invalid_sample_lines_are_skipped() -> None:
    samples = [*probes(1e9, 2e9, rtt=1e-4, loss=0.01), LinkSample("inter_leaf", "a|b", 2.0, "file", rdma=True)]
    half = format_sample_lines(samples)[:-9].splitlines()
    result = list(parse_sample_lines([*half[:2], "", "[" * 100_000, '{"kind": 1}', *half[2:]]))
    assert [each for each in result if isinstance(each, LinkSample)] == samples[:2]
    assert [each.line for each in result if isinstance(each, InputError)] == [4, 5, 6]


def test_defaults_are_medians_of_measured_nodes() -> None:
    aggregated = aggregate.aggregate_scores([sample for i in range(5)
                                             for sample in probes(3e9, name=f"m{i}", rtt=2e-4)], NOW)
    assert (aggregated.default_node_bandwidth, aggregated.default_latency) == (3e9, 1e-4)
    few = aggregate.aggregate_scores(probes(3e9), NOW)
    assert few.default_node_bandwidth == LinkScores().default_node_bandwidth
    assert few.with_current_ages(NOW + 60).nodes["n1"].age == 60
    assert few.with_current_ages(NOW - 60).nodes["n1"].age == 0


def test_uplinks_are_inferred_from_their_best_paths() -> None:
    paths = {"a|b": 1e8, "a|c": 1.2e9, "b|c": 1e8, "b|d": 1e8}
    samples = [LinkSample("inter_leaf", name, NOW, "probe", throughput=throughput, rtt=2e-4)
               for name, throughput in paths.items()]
    zones = aggregate.aggregate_scores(samples, NOW).zones
    # a fast path gives a lower bound of the uplinks of a and c only
    assert {name: score.throughput for name, score in zones.items()} == {"a": None, "b": 1e8, "c": None, "d": 1e8}
    assert {score.rtt for score in zones.values()} == {1e-4}


@pytest.mark.parametrize(("throughput", "source", "expected"), [
    (5e9, "file", 5e9), (2e8, "probe", 2e8), (1.2e9, "probe", None)])  # the last is limited by the measuring node
def test_measured_uplink_keeps_its_score_unless_limited_by_nodes(throughput: float, source: str,
                                                                 expected: float | None) -> None:
    samples = [LinkSample("inter_leaf", "a|b", NOW, "probe", throughput=1e8),
               LinkSample("zone", "a", NOW, source, throughput=throughput)]
    assert aggregate.aggregate_scores(samples, NOW).zones["a"].throughput == expected


def test_tolerance_grows_with_the_standard_error_of_samples() -> None:
    def margin(*noise: float | None, count: int = 1) -> float:
        samples = [sample._replace(throughput_rse=rse) for i, rse in enumerate(noise)
                   for sample in probes(*[1e9] * count, name=f"n{i}")]
        return aggregate.aggregate_scores(samples, NOW).tolerance

    assert margin(*[None] * 9) == margin(*[0.0] * 9) == margin(*[0.02] * 9) == margin(0.1, 0.1) == 0.25
    assert margin(*[1.0] * 3, *[0.01] * 6) == 0.25  # few noisy nodes
    assert 0.25 < margin(*[0.1] * 9, count=5) < margin(*[0.1] * 9) < margin(*[0.15] * 9)
    assert margin(*[50.0] * 9) == aggregate.MAX_TOLERANCE  # half of the baseline always counts


# --- capacity and latency of scored links


def test_padhye_throughput_follows_equation_32() -> None:
    # Padhye et al., equation 32: b = 2, MSS 1448, RTT 0.1 s, T0 = 0.204 s, p = 0.01
    by_acks = 0.1 * (2 * 2 * 0.01 / 3) ** 0.5
    by_timeouts = 0.204 * 3 * (3 * 2 * 0.01 / 8) ** 0.5 * 0.01 * (1 + 32 * 0.0001)
    throughput = capacity.padhye_throughput(np.array([0.01]), np.array([0.1]))
    assert throughput == pytest.approx([1448 / (by_acks + by_timeouts)])
    assert np.isinf(capacity.padhye_throughput(np.zeros(1), np.array([1e-4])))
    assert capacity.usable_throughput(np.array([7e8]), np.zeros(1), np.array([1e-4]), TCP) == [7e8]


def test_rdma_loss_has_no_tcp_penalty() -> None:
    loss, rtt = np.array([0.3]), np.array([1e-5])
    assert capacity.usable_throughput(np.array([1e9]), loss, rtt, RDMA) == [1e9]
    assert capacity.usable_throughput(np.array([1e9]), loss, rtt, TCP) < 1e6
    assert capacity.expected_rto_stall(loss, rtt, RDMA) == [0.0]
    bandwidth, latency = capacity.node_links(["n"], LinkScores(nodes={"n": LinkScore(loss=0.05)}))
    assert bandwidth[0] < 1.25e9 and latency[0] > 0.05 * 0.2


@pytest.mark.parametrize("loss", [1e-4, 0.01, 0.2, 0.5, 1.0])
def test_throughput_and_stall_get_worse_with_loss(loss: float) -> None:
    rtt = np.array([1e-3])
    high, low = (np.array([loss * factor]) for factor in (1.0, 0.7))
    assert 0 < capacity.padhye_throughput(high, rtt) < capacity.padhye_throughput(low, rtt)
    assert np.isfinite(capacity.expected_rto_stall(high, rtt, TCP))
    assert capacity.expected_rto_stall(high, rtt, TCP) >= capacity.expected_rto_stall(low, rtt, TCP) > 0
    # 200 ms, then 400 ms, 800 ms: 0.02 * 0.2 + 0.02^2 * 0.4 + ...
    expected = sum(0.02 ** (k + 1) * 0.2 * 2**k for k in range(40))
    assert capacity.expected_rto_stall(np.array([0.02]), np.array([1e-4]), TCP) == pytest.approx([expected])


def test_quantize_rounds_within_the_tolerance_to_the_baseline() -> None:
    baseline = np.full(4, 100.0)
    assert (capacity.quantize(np.array([81.0, 124.0, 100.0, 99.0]), baseline, 0.25) == baseline).all()
    assert (capacity.quantize(np.array([10.0]), baseline[:1], 0.25) < 15).all()
    exact = np.array([81.0])
    for tolerance in (0.0, 1e-308):  # a step of the second one is not representable
        assert capacity.quantize(exact, baseline[:1], tolerance) is exact


@pytest.mark.parametrize(("scores", "bandwidths", "latencies"), [
    # without a measurement, or a metric, the default
    (LinkScores(nodes={"a": LinkScore(1e8, 1e-3)}, default_node_bandwidth=1e9, default_latency=2e-5),
     [1e8, 1e9], [5e-4, 2e-5]),
    (LinkScores(nodes={"a": LinkScore(rtt=0.01)}), [1.25e9, 1.25e9], [0.005, 2e-5]),
    # half of the difference (of logarithms) after each half-life
    (LinkScores(nodes={"a": LinkScore(1e7, age=60), "b": LinkScore(1e7, age=1e6)}, default_node_bandwidth=1e9,
                half_life=60.0), [1e8, 1e9], [2e-5, 2e-5]),
    (LinkScores(nodes={"a": LinkScore(1e7)}, default_node_bandwidth=1e9, half_life=60.0), [1e7, 1e9], [2e-5, 2e-5]),
])
def test_links_of_nodes(scores: LinkScores, bandwidths: list[float], latencies: list[float]) -> None:
    bandwidth, latency = capacity.node_links(["a", "b"], scores)
    assert bandwidth == pytest.approx(bandwidths) and latency == pytest.approx(latencies)


@pytest.mark.parametrize(("weights", "worst"), [
    (MetricWeights(1, 0, 0), "slow"), (MetricWeights(0, 1, 0), "distant"), (MetricWeights(0, 0, 1), "lossy")])
def test_each_weight_alone_ranks_by_its_metric(weights: MetricWeights, worst: str) -> None:
    links = {"slow": LinkScore(1e8, 4e-5), "distant": LinkScore(1e9, 4e-3), "lossy": LinkScore(1e9, 4e-5, 0.3)}
    scores = LinkScores(nodes=links, default_node_bandwidth=1e9, weights=weights)
    bandwidth, _ = capacity.node_links(list(links), scores)
    assert list(links)[int(bandwidth.argmin())] == worst
    assert (bandwidth > 0).all() and (bandwidth <= 1e9).all()


# --- arbitrary values

optional_fractions = st.none() | st.floats(0, 1)
names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=8)


@st.composite
def link_score_values(draw: st.DrawFn) -> LinkScore:
    return LinkScore(draw(st.none() | st.floats(1e-3, 1e15)), draw(st.floats(0, 60)), draw(st.floats(0, 1)),
                     draw(st.floats(0, 1e9)), draw(st.integers(1, 2**50)), draw(st.floats(0, 60)),
                     draw(st.booleans()), draw(st.sampled_from(["", *SOURCES])))


@st.composite
def snapshots(draw: st.DrawFn) -> LinkScores:
    plain = names.filter(lambda name: "|" not in name)
    return LinkScores(draw(st.dictionaries(st.sampled_from(FOUR.nodes) | names, link_score_values(), max_size=6)),
                      draw(st.dictionaries(st.sampled_from(FOUR.zones) | plain, link_score_values(), max_size=4)),
                      inter_leaf={inter_leaf_name(*pair): draw(link_score_values()) for pair in draw(st.lists(
                          st.tuples(plain, plain) | st.just(("z0", "z1")), max_size=3))},
                      time=NOW, half_life=draw(st.none() | st.floats(1, 1e5)), tolerance=draw(st.floats(0, 1)),
                      weights=draw(st.none() | st.builds(MetricWeights, *[st.floats(0, 10)] * 3)))


@st.composite
def drawn_samples(draw: st.DrawFn) -> LinkSample:
    kind, name = draw(st.sampled_from([("node", "n1"), ("node", "n2"), ("zone", "z0"), ("inter_leaf", "z0|z1")]))
    return LinkSample(kind, name, NOW + draw(st.floats(-2000, 200)), draw(st.sampled_from(SOURCES)),
                      draw(st.none() | st.floats(0, 1e15)), draw(optional_fractions), draw(optional_fractions),
                      draw(optional_fractions), draw(st.booleans()))


@bounded
@given(snapshots())
def test_any_scores_are_written_and_give_finite_links_and_a_placement(scores: LinkScores) -> None:
    assert LinkScores.from_json(json.loads(json.dumps(records.to_json(scores)))) == scores
    parsed = parse_scores(scores.to_text(), NOW)
    assert (set(parsed.nodes), set(parsed.zones), set(parsed.inter_leaf)) == (
        set(scores.nodes), set(scores.zones), set(scores.inter_leaf))
    for name, score in scores.nodes.items():
        assert np.isclose(parsed.nodes[name].throughput or 0, score.throughput or 0, rtol=1e-5)
    assert prometheus.exposition_text(scores).endswith("\n")
    ones = np.ones(len(scores.inter_leaf))
    for bandwidths, latencies in (capacity.node_links(FOUR.nodes, scores),
                                  capacity.inter_leaf_paths(list(scores.inter_leaf), ones, scores)):
        assert (bandwidths > 0).all() and np.isfinite(bandwidths).all()
        assert (latencies >= 0).all() and np.isfinite(latencies).all()
    assert len(place_job(job(3, DlOptions("ps", ps=1)), idle(FOUR), FOUR, scores).nodes) == 3
    assert all(row.slowdown > 0 for row in capacity.link_rows(scores, FOUR))


@bounded
@given(link_score_values(), st.floats(1, 1e5))
def test_older_score_is_closer_to_the_default(score: LinkScore, half_life: float) -> None:
    def distance(age: float) -> float:
        scores = LinkScores(nodes={"n": replace(score, age=age)}, half_life=half_life)
        bandwidths, _ = capacity.node_links(["n"], scores)
        return float(abs(np.log(bandwidths[0] / scores.default_node_bandwidth)))

    assert distance(0) >= distance(half_life) - 1e-9 >= distance(50 * half_life) - 2e-9
    assert distance(50 * half_life) < 1e-9


@bounded
@given(st.lists(drawn_samples(), max_size=20), st.none() | snapshots())
def test_aggregated_scores_are_valid_for_any_samples(drawn: list[LinkSample], previous: LinkScores | None) -> None:
    assert list(parse_sample_lines(format_sample_lines(drawn).splitlines())) == drawn
    scores = aggregate.aggregate_scores(drawn, NOW, previous)
    assert LinkScores.from_json(json.loads(json.dumps(records.to_json(scores)))) == scores
    link_scores = [*scores.nodes.values(), *scores.inter_leaf.values()]
    assert sum(score.samples for score in link_scores) <= len({sample for sample in drawn if sample.kind != "zone"})
    assert all(score.age <= aggregate.DEFAULT_SETTINGS.max_age for score in link_scores)
    # a second aggregation from the published scores changes nothing
    second = aggregate.aggregate_scores(drawn, NOW, scores)
    assert {name: score.throughput for name, score in second.nodes.items()} == {
        name: score.throughput for name, score in scores.nodes.items()}
