"""Benchmarks of link scores: simulated probes of a small cluster, and the cost of the collector."""

from __future__ import annotations

import numpy as np

from benchmarks.link_scores import collector_cost, scale
from benchmarks.link_scores.scale import Fabric, Rates, flagged, probe, shuffled
from slurmdl.links.link_scores import LinkScore, LinkScores


def test_scale_rows_bad_links_detected_and_not_with_shuffled_scores() -> None:
    rows = {row.metric: row for row in scale.rows(seed=3, nodes=600, repeats=1)}
    assert rows["600 nodes, 1% bad, noise 10%: recall"].met
    assert rows["600 nodes, 1% bad, noise 10%: precision"].met
    assert rows["600 nodes, 1% bad, noise 20%: recall"].met
    assert rows["600 nodes, 1% bad, noise 20%: precision"].met
    assert rows["duration of all probe rounds"].met
    control = rows["control, shuffled scores: recall"]
    assert control.value < 0.5 and control.baseline == 1.0


def test_probe_without_noise_flags_only_bad_links() -> None:
    fabric = Fabric.of(400, np.random.default_rng(1))
    rates = Rates.of(fabric, probe(fabric, 1, noise=0.0).scores)
    assert (rates.recall, rates.precision, rates.uplinks) == (1.0, 1.0, 1.0)
    assert set(fabric.kind[fabric.kind >= 0]) == {0, 1, 2}


def test_shuffled_permutes_scores() -> None:
    scores = LinkScores(nodes={f"n{i}": LinkScore(1.0 + i) for i in range(50)})
    mixed = shuffled(scores, np.random.default_rng(0))
    assert list(mixed.nodes) == list(scores.nodes) and mixed.nodes != scores.nodes
    assert sorted(score.throughput or 0 for score in mixed.nodes.values()) == [1.0 + i for i in range(50)]


def test_flagged_unmeasured_node_is_false() -> None:
    assert not flagged(("a", "b"), LinkScores()).any()
    assert flagged(("a", "b"), LinkScores(nodes={"b": LinkScore(1.0)})).tolist() == [False, True]


def test_collector_cost_rows_measure_run_and_write_sample() -> None:
    cpu_time, memory, samples = collector_cost.rows(repeats=2)
    assert cpu_time.repeats == 2 and cpu_time.baseline and cpu_time.baseline > 0
    assert memory.met and memory.baseline and memory.value >= memory.baseline > 5
    assert samples.met
