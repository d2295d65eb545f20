"""Evaluation of the papers' experiments, which run on sandboxes (make bench-paper)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.heterogeneous.placement_methods import DEFAULT, LEAF, NEGATIVE_CONTROL, PLACED
from benchmarks.heterogeneous.placement_savings import LEAST, JobOutcome
from benchmarks.papers import dltap, frameworks, zones
from benchmarks.results import Row
from slurmdl.bench.report import JobFigures, ReportRow
from slurmdl.bench.spec import Cell, read_matrix_spec
from slurmdl.placement.result import Cost


def by_metric(rows: Sequence[Row]) -> dict[str, Row]:
    return {row.metric: row for row in rows}


@pytest.mark.parametrize(("placed", "met"), [(80.0, True), (90.0, False)])
def test_dltap_evaluate_compares_saving_with_published_value(placed: float, met: bool) -> None:
    costs = [{PLACED: placed, DEFAULT: 100.0, dltap.SPREAD: 200.0, LEAST: 50.0, NEGATIVE_CONTROL: 120.0}] * 3
    rows = by_metric(list(dltap.evaluate("VGG-16", costs)))
    row = rows[f"VGG-16, 3 jobs: bytes between nodes saved relative to {DEFAULT}"]
    assert (row.value, row.baseline, row.met) == (pytest.approx(100 - placed), 50.0, met)
    spread = rows[f"VGG-16, 3 jobs: bytes between nodes saved relative to {dltap.SPREAD}"]
    assert (spread.value, spread.met) == (pytest.approx(100 - placed / 2), None)
    assert rows[f"VGG-16: bytes between nodes of {NEGATIVE_CONTROL} over those of placement (control)"].met


def test_dltap_evaluate_incomplete_least_bytes_has_no_baseline() -> None:
    costs = [{PLACED: 80.0, DEFAULT: 100.0, dltap.SPREAD: 200.0, NEGATIVE_CONTROL: 70.0}] * 2
    rows = list(dltap.evaluate("MLP", [*costs, {**costs[0], LEAST: 3.0}]))
    assert rows[0].baseline is None
    assert rows[-1].met is False, "the control misses if random nodes send fewer bytes"


def test_zones_evaluate_requires_tie_if_slurm_is_optimal() -> None:
    def outcome(slurm: float, placed: float) -> JobOutcome:
        return JobOutcome("PS", {DEFAULT: Cost(slurm, 0, 0), PLACED: Cost(placed, 0, 0), LEAF: Cost(slurm, 0, 0),
                                 NEGATIVE_CONTROL: Cost(9.0, 0, 0)})
    outcomes = [outcome(2.0, 2.0), outcome(3.0, 2.0), outcome(4.0, 4.0), outcome(6.0, 3.0)]
    rows = by_metric(list(zones.evaluate(outcomes)))
    assert rows["occupancies in which Slurm's choice is as fast as placement"].value == 0.5
    assert all(row.met in (True, None) for row in rows.values())
    assert rows[f"Slurm slower than placement: predicted seconds of {DEFAULT} over those of placement"].value == 1.75
    worse = by_metric(list(zones.evaluate([outcome(1.0, 2.0)])))
    assert worse[f"Slurm as fast as placement: predicted seconds of {DEFAULT} over those of placement"].met is False


def line(framework: str, nodes: int, images: float, sums: float = 1.0) -> ReportRow:
    phases = {"data": 0.0, "forward": 1.0, "backward": 2.0, "communication": 1.0, "peer_wait": 0.0, "optimizer": 0.0}
    bytes_sent = {"intra_node": 9, "intra_zone": 5 * nodes, "inter_zone": images}
    figures = JobFigures(images, 1.0, phases, None, sums, bytes_sent, 1, 0.5, None)
    return ReportRow(Cell(framework, "allreduce", "resnet50", nodes, "slurm"), "done", (figures,),
                     images / nodes / 10)


def test_frameworks_evaluate_uses_ddp_as_baseline() -> None:
    lines = [line("slurmdl", 1, 10.0), line("ddp", 1, 9.5), line("slurmdl", 4, 30.0), line("ddp", 4, 20.0, sums=0.9),
             ReportRow(Cell("absent", "allreduce", "resnet50", 1, "slurm"), "missing: not in this PyTorch"),
             ReportRow(Cell("slurmdl", "allreduce", "resnet50", 2, "slurm"), "failed: of its own")]
    rows = by_metric(list(frameworks.evaluate("weak scaling", lines)))
    slurmdl = rows["weak scaling, emulated computation: slurmdl allreduce, 4 nodes: images/s"]
    assert (slurmdl.value, slurmdl.baseline, slurmdl.met) == (30.0, 20.0, True)
    assert rows["weak scaling, emulated computation: slurmdl allreduce, 4 nodes: scaling efficiency"].value == 0.75
    sent = rows["weak scaling, emulated computation: slurmdl allreduce, 4 nodes: bytes between nodes per step"]
    assert (sent.value, sent.baseline) == (20 + 30, 20 + 20)
    assert rows["weak scaling, emulated computation: ddp allreduce, 4 nodes: sum of the phases over the step time"
                ].met is False
    assert rows["weak scaling: absent: missing: not in this PyTorch"].met is None
    assert rows["weak scaling: slurmdl allreduce, resnet50, 2 nodes, slurm: failed: of its own"].met is False
    assert rows["weak scaling: images/s on one node, slowest framework over fastest (control)"].met


def test_frameworks_matrix_is_valid_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(frameworks.matrix((1, 2), 8, 0.5, 3))
    spec = read_matrix_spec(str(tmp_path / "spec.yaml"))
    assert (spec.nodes, spec.batch_size, spec.emulate_compute, spec.seed) == ((1, 2), 8, 0.5, 3)
