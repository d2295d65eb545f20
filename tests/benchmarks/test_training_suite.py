"""The benchmark of the training library: real runs over one backend, and rows of given times."""

from __future__ import annotations

import pytest

from benchmarks.training import equality, overhead


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
