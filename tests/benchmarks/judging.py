"""Comparison of a benchmark's rows with expected ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from benchmarks.results import Row


def check_rows(rows: Iterable[Row], expected: Mapping[str, float | bool | tuple[float, bool | None] | None]) -> None:
    """Compare rows with metric -> value, whether the target is met (None without one), or both."""
    found = {row.metric: row for row in rows}
    for metric, wanted in expected.items():
        row = found[metric]
        value, met = wanted if isinstance(wanted, tuple) else (wanted, row.met)
        if isinstance(value, bool | None):
            value, met = row.value, value
        assert (row.value, row.met) == (pytest.approx(value, abs=1e-6), met), metric
