"""Evaluation of the SPANK plugin's benchmark, which runs on sandboxes (make bench-spank)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import spank_overhead
from benchmarks.spank_overhead import Step


class RandomSteps:
    """Random steps: a launch takes 40 +- 2 ms plus the overhead of the plugin."""

    def __init__(self, seed: int, added: float, grows: float = 0.0) -> None:
        self._random = np.random.default_rng(seed)
        self._added, self._grows, self._memory, self._sleeps = added, grows, 6000.0, 0.0

    def step(self, *options: str) -> Step:
        self._memory += self._grows
        added = self._added + self._sleeps
        launch = self._random.gamma(400, 0.0001) + added
        return Step(launch, launch + 0.01, added / 4, added * 3 / 4)

    def memory(self) -> float:
        return self._memory

    def plugstack(self, text: str) -> None:
        self._sleeps = spank_overhead.SLEEP / 1e6


@pytest.mark.parametrize(("added", "grows", "missed"), [
    (0.0001, 0.0, set()), (0.004, 0.0, {"srun's start to", "callbacks in srun and slurmstepd"}),
    (0.0001, 1.0, {"growth"})])
def test_measure_overhead_or_memory_growth_misses_targets(added, grows, missed):
    steps = RandomSteps(1, 0.0), RandomSteps(2, added, grows), RandomSteps(3, added)
    rows = list(spank_overhead.measure(*steps, Path("timing.so"), 1000))
    rows_with_targets = [row for row in rows if row.met is not None]
    assert len(rows_with_targets) == 9
    failed = [row.metric for row in rows_with_targets if not row.met]
    assert all(any(metric.startswith(start) for metric in failed) for start in missed), failed
    assert all(any(metric.startswith(start) for start in missed) for metric in failed), failed


def test_measure_control_without_sleep_misses_targets(monkeypatch):
    monkeypatch.setattr(spank_overhead, "SLEEP", 0)
    steps = RandomSteps(1, 0.0), RandomSteps(2, 0.0), RandomSteps(3, 0.0)
    rows = list(spank_overhead.measure(*steps, Path("timing.so"), 1000))
    assert [row.met for row in rows if row.metric.startswith("control")] == [False, False]
