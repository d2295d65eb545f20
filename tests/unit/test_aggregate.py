"""Aggregation of samples into scores: medians, decay, hysteresis, rejections."""

from __future__ import annotations

import math

import pytest

from slurmdl.config import LinkScoresConfig
from slurmdl.errors import InputError
from slurmdl.links import aggregate
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample, format_sample_lines, parse_sample_lines

NOW = 1.8e9


def probes(*throughputs: float, name: str = "n1", every: float = 10.0, **metrics: float) -> list[LinkSample]:
    """Probe samples; the last one has the time NOW."""
    return [LinkSample("node", name, NOW - every * i, "probe", throughput=throughput, **metrics)  # type: ignore[arg-type]
            for i, throughput in enumerate(reversed(throughputs))]


def score(samples: list[LinkSample], previous: LinkScore | None = None,
          settings: LinkScoresConfig = aggregate.DEFAULT_SETTINGS) -> LinkScore:
    before = LinkScores(nodes={"n1": previous}) if previous else None
    return aggregate.aggregate_scores(samples, NOW, before, settings).nodes["n1"]


def changed(samples: list[LinkSample], **metrics: list[float]) -> list[LinkSample]:
    """The samples with these values of each metric."""
    return [sample._replace(**dict(zip(metrics, values, strict=True)))
            for sample, values in zip(samples, zip(*metrics.values(), strict=True), strict=True)]


COUNTERS = [LinkSample("node", "n1", NOW - i, "counters", throughput=1.25e9, loss=0.0) for i in range(20)]


@pytest.mark.parametrize(("samples", "half_life", "expected"), [
    (probes(1e9, 1.02e9, 1e3, 0.98e9, 1e9), 300.0, {"throughput": 1e9}),  # an outlier
    ([each._replace(time=each.time - 30) for each in probes(1e9, 1e9, 1e9)], 300.0,
     {"samples": 3, "age": 30.0, "source": "probe"}),
    (probes(1e9, 1e9, 1e9, 1e8, 1e8), 10.0, {"throughput": 1e8}),  # recent samples weigh more
    (probes(1e9, 1e9, 1e9, 1e8, 1e8), 0.0, {"throughput": 1e9}),
    (changed(probes(*[1e9] * 5), rtt=[1e-4] * 5, rtt_p99=[2e-4, 2e-4, 1e-2, 2e-4, 2e-4]), 300.0,
     {"rtt": 1e-4, "rtt_p99": 1e-2}),
    (changed(probes(*[1e9] * 12), loss=[1.0 if i == 4 else 0.0 for i in range(12)]), 300.0, {"loss": 0.0}),
    (probes(0.0, 0.0, 0.0), 300.0, {"throughput": aggregate.MIN_THROUGHPUT}),
    (probes(1e9) * 3, 300.0, {"samples": 1}),  # duplicates
    (COUNTERS, 300.0, {"throughput": 1.25e9, "source": "counters"}),
    ([*COUNTERS, *probes(1e8)], 300.0, {"throughput": 1e8, "source": "probe"}),
    # counters weigh a quarter
    ([*COUNTERS[:1], LinkSample("node", "n1", NOW, "probe", loss=0.1)], 300.0, {"loss": pytest.approx(0.08)}),
])
def test_score_of_samples(samples: list[LinkSample], half_life: float, expected: dict[str, object]) -> None:
    result = score(samples, settings=LinkScoresConfig(half_life=half_life))
    assert {key: getattr(result, key) for key in expected} == expected


def test_loss_is_a_trimmed_mean() -> None:
    assert 0.003 < score(changed(probes(*[1e9] * 12), loss=[0.02, 0.0, 0.0] * 4)).loss < 0.008


@pytest.mark.parametrize(("throughputs", "expected"), [
    ([1.1e9] * 5, 1e9),                    # within the deadband
    ([0.9e9] * 5, 1e9),
    ([0.8e9] * 5, 0.8e9),                  # worse by the deadband
    ([1.3e9] * 5, 1.3e9),                  # all better by the deadband
    ([0.9e9, 0.9e9, 1.3e9, 1.3e9, 1.3e9], 1e9),    # not all better
])
def test_published_throughput_changes_beyond_the_deadband_only(throughputs: list[float], expected: float) -> None:
    assert score(probes(*throughputs), LinkScore(1e9), LinkScoresConfig(half_life=0)).throughput == expected


def test_published_rtt_changes_beyond_the_deadband_only() -> None:
    def delays(*values: float) -> float:
        return score([LinkSample("node", "n1", NOW, "probe", rtt=value) for value in values],
                     LinkScore(rtt=1e-4), LinkScoresConfig(half_life=0)).rtt

    assert delays(1.1e-4) == 1e-4
    assert delays(2e-4) == 2e-4
    assert delays(5e-5) == 5e-5
    assert delays(5e-5, 5.1e-5, 5.2e-5, 1.1e-4, 1.2e-4) == 1e-4


def test_published_throughput_rarely_changes_with_noise() -> None:
    import random

    rng, changes, published = random.Random(1), 0, None
    for i in range(200):
        samples = [LinkSample("node", "n1", NOW - 30 * i, "probe", throughput=1e9 * rng.gauss(1, 0.1))
                   for i in range(5)]
        result = score(samples, published)
        changes += published is not None and result.throughput != published.throughput
        published = result
        assert result.throughput is not None and 0.7e9 < result.throughput < 1.3e9, i
    assert changes < 20


def test_implausible_samples_are_ignored() -> None:
    future = LinkSample("node", "n2", NOW + 3600, "probe", throughput=1e9)
    old = LinkSample("node", "n3", NOW - 1e6, "probe", throughput=1e9)
    empty = LinkSample("node", "n4", NOW, "probe")
    inconsistent = LinkSample("node", "n5", NOW, "probe", rtt=1e-3, rtt_p99=1e-5)
    aggregated = aggregate.aggregate_scores([*probes(1e9), future, old, empty, inconsistent], NOW)
    assert list(aggregated.nodes) == ["n1"]


@pytest.mark.parametrize("key", ["throughput", "rtt", "rtt_p99", "loss", "time"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", True, None, 10**400, [], {}],
                         ids=lambda value: str(value)[:8])
def test_sample_number_out_of_range_is_rejected(key: str, value: object) -> None:
    data = {"kind": "node", "name": "n", "time": 1.0, "source": "probe", key: value}
    if value is None and key != "time":
        LinkSample.from_json(data)
    else:
        with pytest.raises(InputError, match="expected a number"):
            LinkSample.from_json(data)


@pytest.mark.parametrize(("kind", "name", "message"), [
    *(("node", name, "expected a node name") for name in ("", "a\nb", 5, None)),
    *(("inter_leaf", name, "sorted order") for name in ("a", "b|a", "|", "a|", "a|b|c"))])
def test_sample_without_valid_name_is_rejected(kind: str, name: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinkSample.from_json({"kind": kind, "name": name, "time": 1.0, "source": "probe"})


def test_sample_lines_round_trip_and_invalid_ones_are_skipped() -> None:
    samples = [*probes(1e9, 2e9, rtt=1e-4, loss=0.01), LinkSample("inter_leaf", "a|b", 2.0, "file", rdma=True)]
    assert list(parse_sample_lines(format_sample_lines(samples).splitlines())) == samples
    half = format_sample_lines(samples)[:-9].splitlines()
    result = list(parse_sample_lines([*half[:2], "", "[" * 100_000, '{"kind": 1}', *half[2:]]))
    assert [each for each in result if isinstance(each, LinkSample)] == samples[:2]
    assert [each.line for each in result if isinstance(each, InputError)] == [4, 5, 6]


def test_defaults_are_medians_of_measured_nodes() -> None:
    aggregated = aggregate.aggregate_scores([sample for i in range(5)
                                    for sample in probes(3e9, name=f"m{i}", rtt=2e-4)], NOW)
    assert "n1" not in aggregated.nodes
    assert (aggregated.default_node_bandwidth, aggregated.default_latency) == (3e9, 1e-4)
    few = aggregate.aggregate_scores(probes(3e9), NOW)
    assert few.default_node_bandwidth == LinkScores().default_node_bandwidth


def test_uplinks_are_inferred_from_their_best_paths() -> None:
    paths = {"a|b": 1e8, "a|c": 1.2e9, "b|c": 1e8, "b|d": 1e8}
    samples = [LinkSample("inter_leaf", name, NOW, "probe", throughput=throughput, rtt=2e-4)
               for name, throughput in paths.items()]
    zones = aggregate.aggregate_scores(samples, NOW).zones
    # a fast path gives a lower bound of the uplinks of a and c only
    assert {name: score.throughput for name, score in zones.items()} == {"a": None, "b": 1e8, "c": None, "d": 1e8}
    assert {score.rtt for score in zones.values()} == {1e-4}


def test_measured_uplink_keeps_its_score_unless_limited_by_nodes() -> None:
    def zone(throughput: float, source: str) -> float | None:
        samples = [LinkSample("inter_leaf", "a|b", NOW, "probe", throughput=1e8),
                   LinkSample("zone", "a", NOW, source, throughput=throughput)]
        return aggregate.aggregate_scores(samples, NOW).zones["a"].throughput

    assert zone(5e9, "file") == 5e9
    assert zone(2e8, "probe") == 2e8
    assert zone(1.2e9, "probe") is None  # limited by the measuring node's link


def test_current_ages_include_the_time_since_publication() -> None:
    aggregated = aggregate.aggregate_scores(probes(1e9), NOW)
    assert aggregated.with_current_ages(NOW + 60).nodes["n1"].age == 60
    assert aggregated.with_current_ages(NOW - 60).nodes["n1"].age == 0


def test_tolerance_grows_with_the_standard_error_of_samples() -> None:
    def margin(noise: float | None, count: int = 1, nodes: int = 9) -> float:
        each = [probes(*[1e9] * count, name=f"n{i}") for i in range(nodes)]
        samples = [sample._replace(throughput_rse=noise) for node_samples in each for sample in node_samples]
        return aggregate.aggregate_scores(samples, NOW).tolerance

    assert margin(None) == margin(0.0) == margin(0.02) == margin(0.1, nodes=2) == 0.25
    assert 0.25 < margin(0.1, count=5) < margin(0.1) < margin(0.15)
    assert margin(50.0) == aggregate.MAX_TOLERANCE  # half of the baseline always counts


def test_few_noisy_nodes_do_not_raise_the_tolerance() -> None:
    samples = [LinkSample("node", f"n{i}", NOW, "probe", throughput=1e9, throughput_rse=1.0 if i < 3 else 0.01)
               for i in range(9)]
    assert aggregate.aggregate_scores(samples, NOW).tolerance == 0.25
