"""The benchmark of the preflight: verdicts on given outcomes. It runs for real in `make bench-preflight`."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from benchmarks.preflight import detection, scale
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


def test_simulated_nodes_are_judged_by_the_real_code():
    rows = {row.metric: row for row in scale.rows(1, quick=True)}
    assert all(row.met for row in rows.values()), rows
