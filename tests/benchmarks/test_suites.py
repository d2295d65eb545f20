"""All benchmarks: their command lines, results files and tables, and a small run of those that need no sandbox."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simgrid_marker import needs_simgrid

from benchmarks import (
    audit,
    cost_model,
    demo,
    heterogeneous,
    link_scores,
    papers,
    placement,
    results,
    simulator,
    spank_overhead,
    strategies,
    topology_io,
)
from benchmarks.placement import optimality_gap, speed
from benchmarks.simulator import scaling
from benchmarks.strategies import accuracy_vs_bytes
from benchmarks.suite import Suite, worker_pool
from benchmarks.virtual_runs import Outcome
from slurmdl.errors import SandboxError, UsageError

SUITES = (heterogeneous.SUITE, link_scores.SUITE, papers.SUITE, placement.SUITE, simulator.SUITE, strategies.SUITE)
Main = Callable[[list[str]], None]
Rows = dict[str, dict[str, Any]]


@pytest.mark.parametrize("main", [
    *(module.main for module in (demo, topology_io, cost_model, spank_overhead, optimality_gap)),
    *(suite.main for suite in SUITES)])
def test_unwritable_results_file_raises_before_measurements(main: Main, tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none" / "x.json", "No such file or directory")):
        with pytest.raises(UsageError, match=re.escape(f"--results={path}: cannot be written ({reason})")):
            main(["--results", str(path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_unknown_part_raises(suite: Suite) -> None:
    with pytest.raises(UsageError, match=f"sped: unknown part; expected one of {', '.join(suite.parts)}"):
        suite.run(["sped"])


def topology_rows(rows: Rows) -> None:
    missed = rows["read conf, 2000 nodes"]
    assert (missed["met"], missed["repeats"], missed["unit"]) == (False, 1, "s")
    controls = [row for metric, row in rows.items() if metric.startswith("control: ")]
    assert len(controls) == 2
    assert all(row["baseline"] > 0 and row["met"] is (row["value"] > 2 * row["baseline"]) for row in controls)
    assert rows["growth of read yaml, 200 to 2000 nodes"]["value"] > 0


def audit_rows(rows: Rows) -> None:
    assert (rows["audit of 600 records"]["met"], rows["audit of 600 records"]["unit"]) == (False, "s")
    assert rows["factor of dense traffic, 600 records, lowest node numbers"]["value"] > 1.01
    control = rows["control: the same jobs on the best nodes for it"]
    assert (control["met"], round(control["value"], 2)) == (True, 1.0)
    zones = rows["control: leaf zones above the fewest possible, per job, on the best nodes for a ring"]
    assert zones["met"] and zones["value"] < zones["baseline"] / 5


def speed_rows(rows: Rows) -> None:
    assert rows["place, ps, 64 ranks, 800 nodes"]["met"] is False
    assert rows["place, allreduce, 64 ranks, 400 nodes"]["met"] is None
    assert rows["peak memory, gossip, 800 nodes"]["value"] > 10
    assert rows["place, gossip, 40 ranks, 40 nodes"]["met"] is True


def scaling_rows(rows: Rows) -> None:
    for strategy in ("allreduce", "gossip", "adaptive-gossip", "ps"):
        assert rows[f"{strategy}, 8 nodes: seconds per step, placed (baseline: leaf order)"]["met"]


def strategy_rows(rows: Rows) -> None:
    assert {metric.split(":")[0] for metric in rows} == {*accuracy_vs_bytes.SITUATIONS}


@pytest.mark.parametrize(("main", "argv", "changes", "check"), [
    (topology_io.main, ["--repeats", "1"], {topology_io: {
        "SIZES": (200, 2000), "TARGETS": {2000: (1e-9, None)}, "CONTROL_NODES": 2000}}, topology_rows),
    (audit.main, ["--repeats", "1"], {audit: {
        "SHAPE": (1, 4, 16, 320), "RECORDS": 600, "CONTROL_RECORDS": 600, "INTERVAL_S": 120, "MAX_SECONDS": 1e-9}},
     audit_rows),
    (placement.SUITE.main, ["--only", "speed"], {speed: {
        "SIZES": (400, 800), "TARGETS": {800: 1e-9}, "LARGEST": 40, "RANKS": 64, "REPEATS": 1}}, speed_rows),
    pytest.param(simulator.SUITE.main, ["--only", "scaling"], {scaling: {"SIZES": (8,), "CLUSTER": (1, 4, 40)}},
                 scaling_rows, marks=needs_simgrid),
    (strategies.SUITE.main, ["--only", "accuracy-vs-bytes", "--quick"], {accuracy_vs_bytes: {
        "run_trainings": lambda runs: (Outcome(97, 97, 1000, 0.5) for _ in runs)}},
     strategy_rows),
], ids=["topology", "audit", "speed", "scaling", "strategies"])
def test_small_run_writes_rows(main: Main, argv: list[str], changes: dict[object, dict[str, object]],
                               check: Callable[[Rows], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture[str]) -> None:
    for module, values in changes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    file = tmp_path / "results.json"
    main([*argv, "--results", str(file)])
    written = json.loads(file.read_text())
    check({row["metric"]: row for row in written["rows"]})
    assert isinstance(written["seed"], int) and " ".join(argv) in written["command"] and written["versions"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("met ")
    if main == simulator.SUITE.main:
        assert written["versions"]["simgrid"]
        pytest.importorskip("matplotlib")
        assert "<svg" in (tmp_path / "results.svg").read_text()


def test_table_repeats_missed_rows_and_failed_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(part: str, seed: int, quick: bool) -> Iterator[results.Row]:
        yield results.make_row(f"{part} of it", [1.0, 3.0, 2.0], "s", baseline=4.0, target="at most 1 s",
                               met=part == "quality")
        if part == "exact":
            raise SandboxError("no more disk")

    suite = Suite("some", "", ("quality", "exact"), rows, dict)
    suite.run(["quality", "exact"], str(tmp_path / "results.json"), 7)
    out, err = capsys.readouterr()
    missed = ["MISSED          2          4 s      exact of it (1 to 3): at most 1 s",
              "MISSED          0                   exact: completed: 1"]
    assert out.splitlines() == [
        "           median   baseline unit   metric (smallest to largest): target", "", "quality",
        "met             2          4 s      quality of it (1 to 3): at most 1 s", "", "exact", *missed, "", "missed",
        *missed, "met 1 of 3"]
    assert "exact: failed: no more disk" in err
    written = json.loads((tmp_path / "results.json").read_text())
    assert (written["seed"], len(written["rows"])) == (7, 3)


def test_processes_of_a_pool_end_by_the_signal_that_this_one_ignores() -> None:
    def ignore(*_: object) -> None:
        pass

    previous = signal.signal(signal.SIGTERM, ignore)
    try:
        with worker_pool() as pool:
            assert pool.map(signal.getsignal, [signal.SIGTERM] * 2) == [signal.SIG_DFL] * 2
        assert signal.getsignal(signal.SIGTERM) is ignore
    finally:
        signal.signal(signal.SIGTERM, previous)
