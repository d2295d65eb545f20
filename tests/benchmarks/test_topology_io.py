"""Benchmark of topologies: rows, negative controls, and results file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import topology_io as bench


def test_topology_io_one_repeat_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "SIZES", (200, 2000))
    monkeypatch.setattr(bench, "TARGETS", {2000: (1e-9, None)})
    monkeypatch.setattr(bench, "CONTROL_NODES", 2000)
    file = tmp_path / "results.json"
    bench.main(["--repeats", "1", "--results", str(file)])
    document = json.loads(file.read_text())
    rows = {row["metric"]: row for row in document["rows"]}
    missed = rows["read conf, 2000 nodes"]
    assert (missed["met"], missed["repeats"], missed["unit"]) == (False, 1, "s")
    controls = [row for metric, row in rows.items() if metric.startswith("control: ")]
    assert len(controls) == 2
    assert all(row["baseline"] > 0 and row["met"] is (row["value"] > 2 * row["baseline"]) for row in controls)
    assert rows["growth of read yaml, 200 to 2000 nodes"]["value"] > 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("met ")
    assert document["seed"] == bench.SEED
