"""Cases and evaluation of the benchmarks of the cost model and the simulator, which measure on sandboxes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from simgrid_marker import needs_simgrid

from benchmarks import cost_model
from benchmarks.simulator import validation
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


def noisy(seconds, noise, repeats=1):
    """Seconds with errors of this standard deviation of their logarithm, shape (jobs, repeats)."""
    errors = np.random.default_rng(1).standard_normal((len(seconds), repeats))
    return seconds[:, None] * np.exp(noise * errors)


@pytest.mark.parametrize(("noise", "met"), [(0.01, True), (3.0, False)])
def test_accurate_model_is_accepted_and_wrong_one_rejected(noise, met):
    jobs = cost_model.draw(NINE)
    predicted = cost_model.predict(jobs, NINE)
    rows = cost_model.evaluate(jobs, predicted, noisy(predicted, noise) * np.ones(3))
    assert [row.met for row in rows if "measured seconds" in row.metric and row.met is not None] == [met] * 3
    assert all(row.met for row in rows if "control" in row.metric) or not met


@pytest.mark.parametrize(("noise", "met"), [(0.01, True), (1.0, False)])
def test_accurate_simulation_is_accepted_and_wrong_one_rejected(noise, met):
    jobs = cost_model.draw(NINE)
    measured = cost_model.predict(jobs, NINE)
    rows = list(validation.evaluate(jobs, noisy(measured, noise)[:, 0], noisy(measured, 0.005, 3)))
    assert {row.met for row in rows if row.met is not None and "control" not in row.metric} == {met}
    assert sum("right order" in row.metric for row in rows) == len(cost_model.PATTERNS) + 1
    assert all(row.met for row in rows if "control" in row.metric)


@needs_simgrid
def test_simulation_matches_predicted_seconds():
    jobs = [next(job for job in cost_model.draw(NINE) if job.pattern == pattern) for pattern in cost_model.PATTERNS]
    simulated, predicted = [validation.simulate(job, NINE) for job in jobs], cost_model.predict(jobs, NINE)
    # the model averages gossip over all partners; the simulation uses the partners of each step
    assert simulated[:2] == pytest.approx(predicted[:2], rel=0.1)
    assert simulated[2] > predicted[2]
