"""The benchmark of the preflight: rows of given outcomes. It runs for real in `make bench-preflight`."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from benchmarks.preflight import detection, scale, slow_node
from benchmarks.preflight.detection import Outcome
from benchmarks.results import Row

NODES = tuple(f"n{number}" for number in range(1, detection.NODES + 1))


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch):
    """Function that runs the benchmark with given outcomes; the current fault's node is the argument of `outcome`."""
    sandbox = SimpleNamespace(spec=SimpleNamespace(name="none", node_hosts=NODES))
    current: list[str] = []

    def fault(_: object, node: str) -> nullcontext[None]:
        current[:] = [node]
        return nullcontext()

    def run(outcome) -> dict[str, Row]:
        monkeypatch.setattr(detection, "start_sandbox", lambda: sandbox)
        monkeypatch.setattr(detection.lifecycle, "sandbox_down", lambda name: None)
        monkeypatch.setattr(detection, "FAULTS", {"fault": fault})
        monkeypatch.setattr(detection, "busy_nodes", lambda _: (current.clear(), nullcontext())[1])
        monkeypatch.setattr(detection, "nullcontext", lambda _: (current.clear(), nullcontext())[1])
        monkeypatch.setattr(detection, "run_preflight", lambda _: outcome(current[0] if current else ""))
        return {row.metric: row for row in detection.rows(1)}

    return run


def test_a_detector_that_is_right_meets_the_goals_and_its_control_does_not(measure):
    rows = measure(lambda node: Outcome({node: "slow"} if node else {}, 5.0))
    found = rows["fault: found"]
    assert (found.value, found.baseline, found.met) == (1.0, 0.0, True)
    assert rows["fault: other nodes called bad"].value == 0.0
    assert rows["clean cluster: nodes called bad"].met and rows["clean cluster: time of the preflight of 8 nodes"].met
    assert rows["busy cluster: nodes called bad"].met is None


def test_a_detector_that_guesses_misses_the_goals(measure):
    source = random.Random(1)
    rows = measure(lambda node: Outcome(dict.fromkeys(source.sample(NODES, 1), "slow"), 11.0))
    assert rows["fault: found"].met is False and rows["clean cluster: nodes called bad"].met is False
    assert rows["clean cluster: time of the preflight of 8 nodes"].met is False


def test_simulated_nodes_are_judged_by_the_real_code(monkeypatch):
    """200 nodes, whose pairs a busy machine checks in time, too; the benchmark has 1,000."""
    monkeypatch.setattr(scale, "NODES", 200)
    _, verdict = scale.rows(1, quick=True)
    assert verdict.met, verdict


def trainings(excluded: slow_node.Outcome, control_starts: int = 1) -> dict[str, slow_node.Outcome]:
    """Steps of 0.1 s, from step 101 on of 0.4 s with a warning only."""
    clean = slow_node.Outcome(dict.fromkeys(range(1, slow_node.STEPS + 1), 0.1), 70.0, [["n1", "n2"]])
    warned = slow_node.Outcome({step: 0.1 if step <= 100 else 0.4 for step in clean.steps}, 112.0, [["n1", "n2"]],
                               "n2", 100)
    return {"clean": clean, "warn": warned, "exclude": excluded,
            "control": slow_node.Outcome(clean.steps, 70.0, control_starts * [["n1", "n2"]])}


@pytest.fixture
def rows_of_trainings(monkeypatch: pytest.MonkeyPatch):
    """Function that returns the rows of the slow node's benchmark for given outcomes."""
    def rows(outcomes: dict[str, slow_node.Outcome]) -> dict[str, Row]:
        cases = {id(case): outcomes[name] for name, case in slow_node.CASES.items()}
        monkeypatch.setattr(slow_node, "start_sandbox", lambda: SimpleNamespace(spec=SimpleNamespace(name="none")))
        monkeypatch.setattr(slow_node.lifecycle, "sandbox_down", lambda name: None)
        monkeypatch.setattr(slow_node, "Jobs", lambda sandbox: None)
        monkeypatch.setattr(slow_node, "run_training", lambda jobs, case, seed: cases[id(case)])
        return {row.metric.strip(): row for row in slow_node.rows(1)}

    return rows


def test_a_training_that_leaves_the_slow_node_meets_the_goals(rows_of_trainings):
    """It makes 60 of 240 steps with the slow node, and needs 20 s more for its second start."""
    steps = {step: 0.4 if 100 < step <= 160 else 0.1 for step in range(1, slow_node.STEPS + 1)}
    rows = rows_of_trainings(trainings(slow_node.Outcome(steps, 108.0, [["n1", "n2"], ["n1", "n3"]], "n2", 100, 160)))
    ratio = rows["exclude: mean step of the last quarter, of the clean run's"]
    assert (ratio.value, ratio.met, ratio.repeats) == (pytest.approx(1.0), True, slow_node.SEEDS)
    assert rows["warn: mean step of the last quarter, of the clean run's"].value == pytest.approx(4.0)
    assert rows["clean: variation of the step within a run (std / mean)"].value == pytest.approx(0.0, abs=1e-6)
    between = rows["exclude: variation of the last quarter's step from run to run, in half of which a node is slow"]
    assert (between.value, between.baseline) == (pytest.approx(0.0, abs=1e-6), pytest.approx(0.6))
    assert rows["exclude: share of the job's slowdown that is avoided"].value == pytest.approx(4 / 42)
    assert rows["in the steps, without the time of the requeue"].value == pytest.approx(24 / 42)
    assert rows["time of the requeue and the second start"].value == pytest.approx(20.0)
    assert rows["slow steps until the node is left"].value == 60
    assert rows["slow node left"].met and rows["control: requeues without a slow node"].met


def test_a_training_that_stays_or_leaves_good_nodes_misses_the_goals(rows_of_trainings):
    rows = rows_of_trainings(trainings(trainings(None)["warn"], control_starts=2))
    assert rows["exclude: mean step of the last quarter, of the clean run's"].met is False
    assert rows["exclude: share of the job's slowdown that is avoided"].value == 0.0
    assert rows["slow node left"].met is False and rows["slow steps until the node is left"].value == 0
    assert rows["control: requeues without a slow node"].met is False
