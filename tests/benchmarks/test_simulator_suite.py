"""Evaluation of the simulator's benchmark, which measures on a sandbox, and a small run of the part `scaling`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from simgrid_marker import needs_simgrid

from benchmarks import cost_model, simulator
from benchmarks.simulator import scaling, validation
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


@needs_simgrid
def test_scaling_writes_rows_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scaling, "SIZES", (8,))
    monkeypatch.setattr(scaling, "CLUSTER", (1, 4, 40))
    file = tmp_path / "simulate.json"
    simulator.SUITE.main(["--only", "scaling", "--results", str(file)])
    written = json.loads(file.read_text())
    rows = {row["metric"]: row for row in written["rows"]}
    assert written["versions"]["simgrid"]
    for strategy in ("allreduce", "gossip", "adaptive-gossip", "ps"):
        assert rows[f"{strategy}, 8 nodes: seconds per step, placed (baseline: leaf order)"]["met"]
    assert "<svg" in (tmp_path / "simulate.svg").read_text()
    assert capsys.readouterr().out.splitlines()[-1].startswith("met ")
