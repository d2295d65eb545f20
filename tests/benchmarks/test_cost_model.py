"""Random cases and evaluation of the cost model's benchmark, which runs on a sandbox (make bench-model)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks import cost_model
from slurmdl.sandbox.spec import round_robin_topology

NINE = round_robin_topology(9, 3)


@pytest.mark.parametrize(("x", "y", "expected"), [
    ([1, 2, 3, 4], [10, 20, 30, 99], 1.0), ([1, 2, 3, 4], [4, 3, 2, 1], -1.0), ([1, 1, 1], [1, 2, 3], 0.0),
    # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5 / sqrt(4.5 x 5)
    ([1, 5, 5, 9], [1, 3, 2, 4], 4.5 / (4.5 * 5) ** 0.5),
])
def test_spearman_known_values_match(x, y, expected):
    assert cost_model.spearman(x, y) == pytest.approx(expected)


def test_draw_is_random_and_reproducible():
    jobs = cost_model.draw(NINE)
    assert jobs == cost_model.draw(NINE)
    assert Counter(job.pattern for job in jobs) == dict.fromkeys(cost_model.PATTERNS, cost_model.PLACEMENTS)
    assert len({job.nodes for job in jobs}) > len(jobs) / 2
    assert all(len(set(job.nodes)) == cost_model.RANKS for job in jobs)
    predicted = cost_model.predict(jobs, NINE)
    for pattern in cost_model.PATTERNS:
        seconds = predicted[[job.pattern == pattern for job in jobs]]
        assert seconds.max() > 4 * seconds.min()


@pytest.mark.parametrize(("noise", "met"), [(0.01, True), (3.0, False)])
def test_evaluate_accepts_accurate_and_rejects_wrong_model(noise, met):
    jobs = cost_model.draw(NINE)
    predicted = cost_model.predict(jobs, NINE)
    random = np.random.default_rng(1)
    measured = predicted[:, None] * np.exp(noise * random.standard_normal((len(jobs), 1))) * np.ones(3)
    rows = cost_model.evaluate(jobs, predicted, measured)
    assert [row.met for row in rows if "measured seconds" in row.metric and row.met is not None] == [met] * 3
    assert all(row.met for row in rows if "control" in row.metric) or not met
