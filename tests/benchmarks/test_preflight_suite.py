"""The benchmark of the preflight: rows of given outcomes. It runs for real in `make bench-preflight`."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from judging import check_rows

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


def test_detector_that_is_right_or_guesses(measure):
    rows = measure(lambda node: Outcome({node: "slow"} if node else {}, 5.0))
    check_rows(rows.values(), {
        "fault: found": (1.0, True), "fault: other nodes called bad": 0.0, "clean cluster: nodes called bad": True,
        "clean cluster: time of the preflight of 8 nodes": True, "busy cluster: nodes called bad": None})
    assert rows["fault: found"].baseline == 0.0
    source = random.Random(1)
    check_rows(measure(lambda node: Outcome(dict.fromkeys(source.sample(NODES, 1), "slow"), 11.0)).values(), {
        "fault: found": False, "clean cluster: nodes called bad": False,
        "clean cluster: time of the preflight of 8 nodes": False})


def test_simulated_nodes_are_judged_by_the_real_code(monkeypatch):
    """100 nodes, whose pairs a busy machine checks in time, too; the benchmark has 1,000."""
    monkeypatch.setattr(scale, "NODES", 100)
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
        return {row.metric.strip(): replace(row, metric=row.metric.strip()) for row in slow_node.rows(1)}

    return rows


def test_training_that_leaves_the_slow_node_or_stays(rows_of_trainings):
    """It makes 60 of 240 steps with the slow node, and needs 20 s more for its second start."""
    steps = {step: 0.4 if 100 < step <= 160 else 0.1 for step in range(1, slow_node.STEPS + 1)}
    rows = rows_of_trainings(trainings(slow_node.Outcome(steps, 108.0, [["n1", "n2"], ["n1", "n3"]], "n2", 100, 160)))
    ratio, variation = "exclude: mean step of the last quarter, of the clean run's", (
        "exclude: variation of the last quarter's step from run to run, in half of which a node is slow")
    check_rows(rows.values(), {
        ratio: (1.0, True), "warn: mean step of the last quarter, of the clean run's": 4.0, variation: 0.0,
        "clean: variation of the step within a run (std / mean)": 0.0,
        "exclude: share of the job's slowdown that is avoided": 4 / 42,
        "in the steps, without the time of the requeue": 24 / 42, "time of the requeue and the second start": 20.0,
        "slow steps until the node is left": 60.0, "slow node left": True,
        "control: requeues without a slow node": True})
    assert (rows[ratio].repeats, rows[variation].baseline) == (slow_node.SEEDS, pytest.approx(0.6))
    check_rows(rows_of_trainings(trainings(trainings(None)["warn"], control_starts=2)).values(), {
        ratio: False, "exclude: share of the job's slowdown that is avoided": 0.0, "slow node left": False,
        "slow steps until the node is left": 0.0, "control: requeues without a slow node": False})
