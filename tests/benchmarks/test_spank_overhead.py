"""How the benchmark of the plugin judges; it runs on sandboxes (make bench-spank)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import spank_overhead
from benchmarks.spank_overhead import Step


class Drawn:
    """Steps that a generator draws: a launch takes 40 ms, give or take 2, and what the plugin adds."""

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
    (0.0001, 0.0, set()), (0.004, 0.0, {"srun's start to", "callbacks in both"}), (0.0001, 1.0, {"growth"})])
def test_what_costs_more_than_a_millisecond_or_grows_is_told(added, grows, missed):
    rows = list(spank_overhead.measure(Drawn(1, 0.0), Drawn(2, added, grows), Drawn(3, added), Path("timed.so"),
                                       1000))
    judged = [row for row in rows if row.met is not None]
    assert len(judged) == 9
    failed = [row.metric for row in judged if not row.met]
    assert all(any(metric.startswith(start) for metric in failed) for start in missed), failed
    assert all(any(metric.startswith(start) for start in missed) for metric in failed), failed


def test_a_control_that_does_not_lose_is_told(monkeypatch):
    monkeypatch.setattr(spank_overhead, "SLEEP", 0)
    rows = list(spank_overhead.measure(Drawn(1, 0.0), Drawn(2, 0.0), Drawn(3, 0.0), Path("timed.so"), 1000))
    assert [row.met for row in rows if row.metric.startswith("control")] == [False, False]
