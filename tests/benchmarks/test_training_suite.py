"""The benchmark of the training library: real runs over one backend, and rows of given times."""

from __future__ import annotations

import pytest

from benchmarks.training import equality, intra_node, overhead


def test_virtual_ranks_end_with_the_model_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, whose workers have the same samples, does not."""
    monkeypatch.setattr(equality, "BACKENDS", ("virtual",))
    rows = list(equality.rows(1))
    assert len(rows) == len(equality.CASES) + 1
    assert all(row.met for row in rows), rows


@pytest.mark.parametrize(("ratio", "peak", "met"), [(1.01, 1.5e8, True), (1.05, 4e8, False)])
def test_limits_of_the_overhead(ratio: float, peak: float, met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(task: str, network: str, kind: str) -> dict[str, float]:
        is_library = kind == "library"
        return {"ratio": ratio if is_library else 1.0, "step_s": 0.005, "peak": 1e8 + peak * is_library * 0.5}

    monkeypatch.setattr(overhead, "_measure", measure)
    judged = [row for row in overhead.rows(1) if row.met is not None]
    assert [row.met for row in judged] == 4 * [met]


@pytest.mark.parametrize(("library", "met"), [(95.0, True), (60.0, False)])
def test_goals_inside_a_node(library: float, met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"library": library, "ddp": 40.0, "none": 100.0}
    monkeypatch.setattr(intra_node, "_steps_per_s", lambda ranks, network, memory: rates)
    monkeypatch.setattr(intra_node.os, "cpu_count", lambda: 2)
    rows = {row.metric: row.met for row in intra_node.rows(1)}
    assert rows["1.1 million parameters, 4 ranks on one node: rate, slurmdl to DistributedDataParallel"] is met
    assert rows["1.1 million parameters, 2 ranks on one node: rate, slurmdl to no communication"] is met
    assert [name for name, judged in rows.items() if judged is not None and "4 ranks" not in name
            and "no communication" not in name] == []


@pytest.mark.nightly
def test_rates_are_those_of_real_ranks() -> None:
    """A network of a few parameters."""
    rates = intra_node._steps_per_s(2, 0, "shared")
    assert set(rates) == set(intra_node.LABELS) and all(rate > 0 for rate in rates.values())
