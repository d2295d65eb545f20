"""Properties of link samples, scores and derived link values, for arbitrary values."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from placing import cluster, node, two_level

from slurmdl import records
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.links import aggregate, capacity, prometheus
from slurmdl.links.link_scores import LinkScore, LinkScores, MetricWeights, inter_leaf_name
from slurmdl.links.samples import SOURCES, LinkSample, format_sample_lines, parse_sample_lines
from slurmdl.links.score_sources import parse_scores
from slurmdl.placement.place import place_job

NOW = 1.8e9
FOUR = two_level(("n1", "n2"), ("n3", "n4"))
bounded = settings(max_examples=20, deadline=None, derandomize=True)

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
def samples(draw: st.DrawFn) -> LinkSample:
    kind, name = draw(st.sampled_from([("node", "n1"), ("node", "n2"), ("zone", "z0"), ("inter_leaf", "z0|z1")]))
    return LinkSample(kind, name, NOW + draw(st.floats(-2000, 200)), draw(st.sampled_from(SOURCES)),
                      draw(st.none() | st.floats(0, 1e15)), draw(optional_fractions), draw(optional_fractions),
                      draw(optional_fractions), draw(st.booleans()))


@bounded
@given(snapshots())
def test_scores_round_trip_as_json_and_approximately_as_text(scores: LinkScores) -> None:
    assert LinkScores.from_json(json.loads(json.dumps(records.to_json(scores)))) == scores
    parsed = parse_scores(scores.to_text(), NOW)
    assert (set(parsed.nodes), set(parsed.zones), set(parsed.inter_leaf)) == (
        set(scores.nodes), set(scores.zones), set(scores.inter_leaf))
    for name, score in scores.nodes.items():
        assert np.isclose(parsed.nodes[name].throughput or 0, score.throughput or 0, rtol=1e-5)
    assert prometheus.exposition_text(scores).endswith("\n")


@bounded
@given(snapshots())
def test_link_values_are_finite_and_no_score_prevents_placement(scores: LinkScores) -> None:
    ones = np.ones(len(scores.inter_leaf))
    for bandwidths, latencies in (capacity.node_links(FOUR.nodes, scores),
                                  capacity.inter_leaf_paths(list(scores.inter_leaf), ones, scores)):
        assert (bandwidths > 0).all() and np.isfinite(bandwidths).all()
        assert (latencies >= 0).all() and np.isfinite(latencies).all()
    placed = place_job(JobRequest(nodes=(3, 3), dl=DlOptions(strategy="ps", ps=1)), cluster(*map(node, FOUR.nodes)),
                       FOUR, scores)
    assert len(placed.nodes) == 3
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
@given(st.lists(samples(), max_size=20), st.none() | snapshots())
def test_aggregated_scores_are_valid_for_any_samples(drawn: list[LinkSample], previous: LinkScores | None) -> None:
    scores = aggregate.aggregate_scores(drawn, NOW, previous)
    assert LinkScores.from_json(json.loads(json.dumps(records.to_json(scores)))) == scores
    link_scores = [*scores.nodes.values(), *scores.inter_leaf.values()]
    sample_count = len({sample for sample in drawn if sample.kind != "zone"})
    assert sum(score.samples for score in link_scores) <= sample_count
    assert all(score.age <= aggregate.DEFAULT_SETTINGS.max_age for score in link_scores)
    # a second aggregation from the published scores changes nothing
    second = aggregate.aggregate_scores(drawn, NOW, scores)
    assert {name: score.throughput for name, score in second.nodes.items()} == {
        name: score.throughput for name, score in scores.nodes.items()}


@bounded
@given(st.lists(samples(), max_size=10))
def test_sample_lines_round_trip(drawn: list[LinkSample]) -> None:
    assert list(parse_sample_lines(format_sample_lines(drawn).splitlines())) == drawn
