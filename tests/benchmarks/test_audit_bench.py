"""Benchmark of audits: rows, negative control, and results file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import audit as bench


def test_audit_one_repeat_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "SHAPE", (1, 4, 16, 320))
    monkeypatch.setattr(bench, "RECORDS", 600)
    monkeypatch.setattr(bench, "CONTROL_RECORDS", 600)
    monkeypatch.setattr(bench, "INTERVAL_S", 120)
    monkeypatch.setattr(bench, "MAX_SECONDS", 1e-9)
    file = tmp_path / "results.json"
    bench.main(["--repeats", "1", "--results", str(file)])
    rows = {row["metric"]: row for row in json.loads(file.read_text())["rows"]}
    assert (rows["audit of 600 records"]["met"], rows["audit of 600 records"]["unit"]) == (False, "s")
    assert rows["factor of dense traffic, 600 records, lowest node numbers"]["value"] > 1.01
    control = rows["control: the same jobs on the best nodes for it"]
    assert (control["met"], round(control["value"], 2)) == (True, 1.0)
    zones = rows["control: leaf zones above the fewest possible, per job, on the best nodes for a ring"]
    assert zones["met"] and zones["value"] < zones["baseline"] / 5
    assert capsys.readouterr().out.splitlines()[-1].startswith("met ")
