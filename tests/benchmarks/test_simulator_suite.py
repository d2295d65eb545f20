"""Evaluation of the simulator's benchmark, which measures on a sandbox, and a small run of the part `scaling`."""

from __future__ import annotations

import numpy as np
import pytest
from simgrid_marker import needs_simgrid

from benchmarks import cost_model
from benchmarks.simulator import validation
from slurmdl.sandbox.spec import round_robin_topology

NINE = round_robin_topology(9, 3)


@needs_simgrid
def test_simulate_matches_predicted_seconds() -> None:
    jobs = [next(job for job in cost_model.draw(NINE) if job.pattern == pattern) for pattern in cost_model.PATTERNS]
    simulated = [validation.simulate(job, NINE) for job in jobs]
    predicted = cost_model.predict(jobs, NINE)
    # the model averages gossip over all partners; the simulation uses the partners of each step
    assert simulated[:2] == pytest.approx(predicted[:2], rel=0.1)
    assert simulated[2] > predicted[2]


@pytest.mark.parametrize(("noise", "met"), [(0.01, True), (1.0, False)], ids=["right", "wrong"])
def test_evaluate_accepts_accurate_and_rejects_wrong_simulation(noise: float, met: bool) -> None:
    jobs = cost_model.draw(NINE)
    measured = cost_model.predict(jobs, NINE)
    random = np.random.default_rng(1)
    simulated = measured * np.exp(noise * random.standard_normal(len(jobs)))
    blocks = measured[:, None] * np.exp(0.005 * random.standard_normal((len(jobs), 3)))
    rows = list(validation.evaluate(jobs, simulated, blocks))
    assert {row.met for row in rows if row.met is not None and "control" not in row.metric} == {met}
    assert sum("right order" in row.metric for row in rows) == len(cost_model.PATTERNS) + 1
    assert all(row.met for row in rows if "control" in row.metric)
