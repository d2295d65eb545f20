"""Properties of samples, scores and figures of links, whatever they are."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from placing import cluster, node, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.links import aggregate, capacity, link_table, prometheus_exporter, score_files
from slurmdl.links.link_scores import LinkScore, LinkScores, MetricWeights, inter_leaf_name
from slurmdl.links.samples import SOURCES, LinkSample, format_sample_lines, parse_sample_lines
from slurmdl.placement.place import place_job

NOW = 1.8e9
FOUR = two_level(("n1", "n2"), ("n3", "n4"))
bounded = settings(max_examples=20, deadline=None, derandomize=True)

maybe = st.none() | st.floats(0, 1)
names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=8)


@st.composite
def scores_of_links(draw: st.DrawFn) -> LinkScore:
    return LinkScore(draw(st.none() | st.floats(1e-3, 1e15)), draw(st.floats(0, 60)), draw(st.floats(0, 1)),
                     draw(st.floats(0, 1e9)), draw(st.integers(1, 2**50)), draw(st.floats(0, 60)),
                     draw(st.booleans()), draw(st.sampled_from(["", *SOURCES])))


@st.composite
def snapshots(draw: st.DrawFn) -> LinkScores:
    plain = names.filter(lambda name: "|" not in name)
    return LinkScores(draw(st.dictionaries(st.sampled_from(FOUR.nodes) | names, scores_of_links(), max_size=6)),
                      draw(st.dictionaries(st.sampled_from(FOUR.zones) | plain, scores_of_links(), max_size=4)),
                      inter_leaf={inter_leaf_name(*pair): draw(scores_of_links()) for pair in draw(st.lists(
                          st.tuples(plain, plain) | st.just(("z0", "z1")), max_size=3))},
                      time=NOW, half_life=draw(st.none() | st.floats(1, 1e5)), tolerance=draw(st.floats(0, 1)),
                      weights=draw(st.none() | st.builds(MetricWeights, *[st.floats(0, 10)] * 3)))


@st.composite
def samples(draw: st.DrawFn) -> LinkSample:
    kind, name = draw(st.sampled_from([("node", "n1"), ("node", "n2"), ("zone", "z0"), ("inter_leaf", "z0|z1")]))
    return LinkSample(kind, name, NOW + draw(st.floats(-2000, 200)), draw(st.sampled_from(SOURCES)),
                      draw(st.none() | st.floats(0, 1e15)), draw(maybe), draw(maybe), draw(maybe),
                      draw(st.booleans()))


@bounded
@given(snapshots())
def test_scores_round_trip_as_json_and_nearly_as_text(found: LinkScores) -> None:
    assert LinkScores.from_json(json.loads(json.dumps(found.to_json()))) == found
    told = score_files.parse_scores(found.to_text(), NOW)
    assert (set(told.nodes), set(told.zones), set(told.inter_leaf)) == (
        set(found.nodes), set(found.zones), set(found.inter_leaf))
    for name, score in found.nodes.items():
        assert np.isclose(told.nodes[name].throughput or 0, score.throughput or 0, rtol=1e-5)
    assert prometheus_exporter.exposition_text(found).endswith("\n")


@bounded
@given(snapshots())
def test_figures_are_finite_and_no_score_stops_a_placement(found: LinkScores) -> None:
    for carried, delay in (capacity.node_links(FOUR.nodes, found),
                           capacity.inter_leaf_paths(list(found.inter_leaf), np.ones(len(found.inter_leaf)), found)):
        assert (carried > 0).all() and np.isfinite(carried).all()
        assert (delay >= 0).all() and np.isfinite(delay).all()
    placed = place_job(JobRequest(nodes=(3, 3), dl=DlOptions(strategy="ps", ps=1)), cluster(*map(node, FOUR.nodes)),
                       FOUR, found)
    assert len(placed.nodes) == 3
    assert all(row.slowdown > 0 for row in link_table.link_rows(found, FOUR))


@bounded
@given(scores_of_links(), st.floats(1, 1e5))
def test_the_older_a_score_the_nearer_it_is_to_the_default(score: LinkScore, half_life: float) -> None:
    def away(age: float) -> float:
        known = LinkScores(nodes={"n": replace(score, age=age)}, half_life=half_life)
        carried, _ = capacity.node_links(["n"], known)
        return float(abs(np.log(carried[0] / known.default_node_bandwidth)))

    assert away(0) >= away(half_life) - 1e-9 >= away(50 * half_life) - 2e-9
    assert away(50 * half_life) < 1e-9


@bounded
@given(st.lists(samples(), max_size=20), st.none() | snapshots())
def test_any_samples_make_valid_scores(given_: list[LinkSample], previous: LinkScores | None) -> None:
    made = aggregate.aggregate_scores(given_, NOW, previous)
    assert LinkScores.from_json(json.loads(json.dumps(made.scores.to_json()))) == made.scores
    kept = [*made.scores.nodes.values(), *made.scores.inter_leaf.values()]
    counted = len({sample for sample in given_ if sample.kind != "zone"})
    assert sum(score.samples for score in kept) <= counted
    assert all(score.age <= aggregate.DEFAULT_RULES.window for score in kept)
    # once more, from what was published: nothing moves
    again = aggregate.aggregate_scores(given_, NOW, made.scores).scores
    assert {name: score.throughput for name, score in again.nodes.items()} == {
        name: score.throughput for name, score in made.scores.nodes.items()}


@bounded
@given(st.lists(samples(), max_size=10))
def test_lines_round_trip(given_: list[LinkSample]) -> None:
    assert list(parse_sample_lines(format_sample_lines(given_).splitlines())) == given_
