"""From samples to scores: medians, decay, hysteresis, and what is left out."""

from __future__ import annotations

import math

import pytest

from slurmdl.errors import InputError
from slurmdl.links import aggregate
from slurmdl.links.aggregate import AggregationRules
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample, format_sample_lines, parse_sample_lines

NOW = 1.8e9


def probes(*speeds: float, name: str = "n1", every: float = 10.0, **more: float) -> list[LinkSample]:
    """Samples, the last one taken now."""
    return [LinkSample("node", name, NOW - every * i, "probe", throughput=speed, **more)  # type: ignore[arg-type]
            for i, speed in enumerate(reversed(speeds))]


def score(samples: list[LinkSample], previous: LinkScore | None = None,
          rules: AggregationRules = aggregate.DEFAULT_RULES) -> LinkScore:
    before = LinkScores(nodes={"n1": previous}) if previous else None
    return aggregate.aggregate_scores(samples, NOW, before, rules).scores.nodes["n1"]


def test_one_wild_sample_changes_nothing() -> None:
    assert score(probes(1e9, 1.02e9, 1e3, 0.98e9, 1e9)).throughput == 1e9


def test_number_and_age() -> None:
    found = score([sample._replace(time=sample.time - 30) for sample in probes(1e9, 1e9, 1e9)])
    assert (found.samples, found.age, found.source) == (3, 30.0, "probe")


def test_what_is_recent_counts_more() -> None:
    rules = AggregationRules(half_life=10.0)
    assert score(probes(1e9, 1e9, 1e9, 1e8, 1e8), rules=rules).throughput == 1e8
    assert score(probes(1e9, 1e9, 1e9, 1e8, 1e8), rules=AggregationRules(half_life=0)).throughput == 1e9


def test_the_tail_is_of_all_recent_samples() -> None:
    samples = [sample._replace(rtt=1e-4, rtt_p99=1e-2 if i == 2 else 2e-4)
               for i, sample in enumerate(probes(*[1e9] * 5))]
    assert score(samples).rtt_p99 == 1e-2
    assert score(samples).rtt == 1e-4


def test_rare_losses_are_not_nothing() -> None:
    samples = [sample._replace(loss=0.02 if i % 3 == 0 else 0.0) for i, sample in enumerate(probes(*[1e9] * 12))]
    assert 0.003 < score(samples).loss < 0.008
    one_bad_peer = [sample._replace(loss=1.0 if i == 4 else 0.0) for i, sample in enumerate(probes(*[1e9] * 12))]
    assert score(one_bad_peer).loss == 0.0


@pytest.mark.parametrize(("speeds", "expected"), [
    ([1.1e9] * 5, 1e9),                    # within the margin: what was published stays
    ([0.9e9] * 5, 1e9),
    ([0.8e9] * 5, 0.8e9),                  # worse by the margin
    ([1.3e9] * 5, 1.3e9),                  # better by the margin, all of them
    ([0.9e9, 0.9e9, 1.3e9, 1.3e9, 1.3e9], 1e9),    # better, but not for long enough
])
def test_a_published_figure_stays_until_it_is_left_by_a_margin(speeds: list[float], expected: float) -> None:
    assert score(probes(*speeds), LinkScore(1e9), AggregationRules(half_life=0)).throughput == expected


def test_delay_has_the_same_margin_the_other_way_round() -> None:
    def delays(*values: float) -> float:
        return score([LinkSample("node", "n1", NOW, "probe", rtt=value) for value in values],
                     LinkScore(rtt=1e-4), AggregationRules(half_life=0)).rtt

    assert delays(1.1e-4) == 1e-4
    assert delays(2e-4) == 2e-4
    assert delays(5e-5) == 5e-5
    assert delays(5e-5, 5.1e-5, 5.2e-5, 1.1e-4, 1.2e-4) == 1e-4


def test_a_choice_does_not_turn_with_noise() -> None:
    """Two equal nodes, noise of a tenth: what is published of each changes rarely, its samples always."""
    import random

    draw, changes, published = random.Random(1), 0, None
    for round_ in range(200):
        samples = [LinkSample("node", "n1", NOW - 30 * i, "probe", throughput=1e9 * draw.gauss(1, 0.1))
                   for i in range(5)]
        found = score(samples, published)
        changes += published is not None and found.throughput != published.throughput
        published = found
        assert found.throughput is not None and 0.7e9 < found.throughput < 1.3e9, round_
    assert changes < 20


def test_samples_that_cannot_be_are_counted_and_the_rest_is_kept() -> None:
    future = LinkSample("node", "n2", NOW + 3600, "probe", throughput=1e9)
    old = LinkSample("node", "n3", NOW - 1e6, "probe", throughput=1e9)
    empty = LinkSample("node", "n4", NOW, "probe")
    absurd = LinkSample("node", "n5", NOW, "probe", rtt=1e-3, rtt_p99=1e-5)
    made = aggregate.aggregate_scores([*probes(1e9), future, old, empty, absurd], NOW)
    assert made.rejected == {"in the future": 1, "too old": 1, "without a metric": 1, "rtt_p99 below rtt": 1}
    assert list(made.scores.nodes) == ["n1"]


@pytest.mark.parametrize("key", ["throughput", "rtt", "rtt_p99", "loss", "time"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", True, None, 10**400, [], {}],
                         ids=lambda value: str(value)[:8])
def test_a_sample_holds_numbers_in_their_ranges(key: str, value: object) -> None:
    data = {"kind": "node", "name": "n", "time": 1.0, "source": "probe", key: value}
    if value is None and key != "time":
        LinkSample.from_json(data)
    else:
        with pytest.raises(InputError, match="expected a number"):
            LinkSample.from_json(data)


@pytest.mark.parametrize("name", ["", "a\nb", 5, None])
def test_a_sample_has_a_name(name: object) -> None:
    with pytest.raises(InputError, match="expected a node name"):
        LinkSample.from_json({"kind": "node", "name": name, "time": 1.0, "source": "probe"})


@pytest.mark.parametrize("name", ["a", "b|a", "|", "a|", "a|b|c"])
def test_a_trunk_names_two_zones_in_order(name: str) -> None:
    with pytest.raises(InputError, match="sorted order"):
        LinkSample("inter_leaf", name, 1.0, "probe")


def test_lines_round_trip_and_bad_ones_cost_only_themselves() -> None:
    samples = [*probes(1e9, 2e9, rtt=1e-4, loss=0.01), LinkSample("inter_leaf", "a|b", 2.0, "file", rdma=True)]
    assert list(parse_sample_lines(format_sample_lines(samples).splitlines())) == samples
    half = format_sample_lines(samples)[:-9].splitlines()
    found = list(parse_sample_lines([*half[:2], "", "[" * 100_000, '{"kind": 1}', *half[2:]]))
    assert [each for each in found if isinstance(each, LinkSample)] == samples[:2]
    assert [each.line for each in found if isinstance(each, InputError)] == [4, 5, 6]


def test_a_dead_link_is_slow_not_infinitely_slow() -> None:
    assert score(probes(0.0, 0.0, 0.0)).throughput == aggregate.MIN_THROUGHPUT


def test_counters_bound_a_link_that_was_not_probed_and_do_not_outvote_a_probe() -> None:
    counters = [LinkSample("node", "n1", NOW - i, "counters", throughput=1.25e9, loss=0.0) for i in range(20)]
    assert score(counters).throughput == 1.25e9
    assert score(counters).source == "counters"
    both = score([*counters, *probes(1e8)])
    assert (both.throughput, both.source) == (1e8, "probe")


def test_a_link_without_samples_has_no_score_but_a_prior_that_was_measured() -> None:
    made = aggregate.aggregate_scores([sample for i in range(5)
                                    for sample in probes(3e9, name=f"m{i}", rtt=2e-4)], NOW).scores
    assert "n1" not in made.nodes
    assert (made.default_node_bandwidth, made.default_latency) == (3e9, 1e-4)
    few = aggregate.aggregate_scores(probes(3e9), NOW).scores
    assert few.default_node_bandwidth == LinkScores().default_node_bandwidth


def test_uplinks_by_the_best_way_over_them() -> None:
    ways = {"a|b": 1e8, "a|c": 1.2e9, "b|c": 1e8, "b|d": 1e8}
    samples = [LinkSample("inter_leaf", name, NOW, "probe", throughput=speed, rtt=2e-4) for name, speed in ways.items()]
    zones = aggregate.aggregate_scores(samples, NOW).scores.zones
    # one fast way shows that a and c are fast; how fast, the nodes that measured cannot say
    assert {name: score.throughput for name, score in zones.items()} == {"a": None, "b": 1e8, "c": None, "d": 1e8}
    assert {score.rtt for score in zones.values()} == {1e-4}


def test_a_zone_that_was_measured_itself_keeps_its_own_score() -> None:
    def zone(speed: float, source: str) -> float | None:
        samples = [LinkSample("inter_leaf", "a|b", NOW, "probe", throughput=1e8),
                   LinkSample("zone", "a", NOW, source, throughput=speed)]
        return aggregate.aggregate_scores(samples, NOW).scores.zones["a"].throughput

    assert zone(5e9, "file") == 5e9
    assert zone(2e8, "probe") == 2e8
    assert zone(1.2e9, "probe") is None  # no slower than a node's link, by which it was measured


def test_the_same_sample_twice_counts_once() -> None:
    assert score(probes(1e9) * 3).samples == 1


def test_scores_grow_older() -> None:
    made = aggregate.aggregate_scores(probes(1e9), NOW).scores
    assert aggregate.with_current_ages(made, NOW + 60).nodes["n1"].age == 60
    assert aggregate.with_current_ages(made, NOW - 60).nodes["n1"].age == 0


def test_the_margin_widens_with_the_noise_that_samples_tell_of() -> None:
    def margin(noise: float | None, count: int = 1, nodes: int = 9) -> float:
        each = [probes(*[1e9] * count, name=f"n{i}") for i in range(nodes)]
        told = [sample._replace(throughput_rse=noise) for samples in each for sample in samples]
        return aggregate.aggregate_scores(told, NOW).scores.tolerance

    assert margin(None) == margin(0.0) == margin(0.02) == margin(0.1, nodes=2) == 0.25
    assert 0.25 < margin(0.1, count=5) < margin(0.1) < margin(0.15)
    assert margin(50.0) == aggregate.MAX_TOLERANCE  # what is at less than half counts, however noisy the probes


def test_a_few_noisy_nodes_widen_nothing() -> None:
    told = [LinkSample("node", f"n{i}", NOW, "probe", throughput=1e9, throughput_rse=1.0 if i < 3 else 0.01) for i in range(9)]
    assert aggregate.aggregate_scores(told, NOW).scores.tolerance == 0.25
