"""The parts of the placement benchmark that need a real controller, at small size."""

from __future__ import annotations

import os

import pytest
from conftest import skipped_without_cluster

from benchmarks.placement import concurrent_submitters, quality, sbatch_overhead
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.topology.source import tree_topology


@pytest.fixture(autouse=True, scope="module")
def _controller() -> None:
    """Skip the tests if no sandbox starts; the benchmark itself would only print a message."""
    with skipped_without_cluster():
        lifecycle.sandbox_up(SandboxSpec(f"cloud-{os.getpid()}", round_robin_topology(2, 1), cloud_nodes=True))
    lifecycle.sandbox_down(f"cloud-{os.getpid()}")


def test_quality_with_a_real_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "shapes", lambda: (quality.Shape("tree", tree_topology((1, 8, 80))),))
    monkeypatch.setattr(quality, "SIZES", (12,))
    monkeypatch.setattr(quality, "LOADS", ((0.5, 1),))
    row_by_metric = {row.metric: row for row in quality.rows()}
    for pattern in quality.PATTERNS:
        for order in ("names", "leaves"):
            row = row_by_metric[f"tree, thin uplinks, {pattern.name}: predicted seconds over those of Slurm, {order}"]
            assert row.repeats == 1
            assert row.value > 0
    assert any("largest possible saving" in metric for metric in row_by_metric)


@pytest.mark.nightly
def test_concurrent_submitters_with_a_real_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NODES": 40, "LEAVES": 4, "SUBMITTERS": 3, "JOBS": 4, "SIZES": (1, 8), "ARRIVALS": 1.0,
                        "DURATIONS": (1.0, 2.0), "SNAPSHOTS": 2, "BURSTS": 1, "TRACES": 1}.items():
        monkeypatch.setattr(concurrent_submitters, name, value)
    row_by_metric = {row.metric: row for row in concurrent_submitters.rows(seed=1)}
    assert row_by_metric["burst: jobs that never start, slurmdl"].value == 0
    assert row_by_metric["burst: longest wait, slurmdl"].repeats == 1
    assert row_by_metric["one snapshot: pairs of 3 choices that share a node"].repeats == 2
    assert row_by_metric["trace: longest wait of other users' jobs, slurmdl"].met is not None
    assert row_by_metric["trace: jobs that the controller ended early"].value == 0
    queue = row_by_metric["trace of 4 jobs: completion of the queue, slurmdl"]
    assert queue.value > 1
    assert queue.baseline is not None
    assert queue.baseline > 1


@pytest.mark.nightly
def test_sbatch_overhead_with_a_real_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch_overhead, "REPEATS", 1)
    monkeypatch.setattr(sbatch_overhead, "LARGE", 200)
    monkeypatch.setattr(sbatch_overhead, "LEAVES", (10,))
    row_by_metric = {row.metric: row for row in sbatch_overhead.rows()}
    assert len([metric for metric in row_by_metric if metric.startswith("time added by slurmdl sbatch")]) == 7
    assert all(row.baseline is not None and row.baseline > 0 for metric, row in row_by_metric.items()
               if metric.startswith("time added by slurmdl sbatch"))
    assert len([metric for metric in row_by_metric if metric.startswith("from the job ID")]) == 2
