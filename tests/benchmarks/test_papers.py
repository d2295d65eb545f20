"""Evaluation of the papers' experiments, which run on sandboxes (make bench-paper)."""

from __future__ import annotations

from pathlib import Path

import pytest
from judging import check_rows

from benchmarks.heterogeneous.placement_methods import DEFAULT, LEAF, NEGATIVE_CONTROL, PLACED
from benchmarks.heterogeneous.placement_savings import LEAST, JobOutcome
from benchmarks.papers import dltap, frameworks, zones
from benchmarks.results import Row
from slurmdl.bench.report import JobFigures, ReportRow
from slurmdl.bench.spec import Cell, read_matrix_spec
from slurmdl.placement.result import Cost


@pytest.mark.parametrize(("placed", "met"), [(80.0, True), (90.0, False)])
def test_dltap_compares_saving_with_published_value(placed: float, met: bool) -> None:
    costs = [{PLACED: placed, DEFAULT: 100.0, dltap.SPREAD: 200.0, LEAST: 50.0, NEGATIVE_CONTROL: 120.0}] * 3
    rows = [*dltap.evaluate("VGG-16", costs)]
    check_rows(rows, {
        f"VGG-16, 3 jobs: bytes between nodes saved relative to {DEFAULT}": (100 - placed, met),
        f"VGG-16, 3 jobs: bytes between nodes saved relative to {dltap.SPREAD}": (100 - placed / 2, None),
        f"VGG-16: bytes between nodes of {NEGATIVE_CONTROL} over those of placement (control)": True})
    assert rows[0].baseline == 50.0
    worse = {**costs[0], NEGATIVE_CONTROL: placed - 10}
    rows = [*dltap.evaluate("MLP", [{key: value for key, value in worse.items() if key != LEAST}, worse])]
    assert rows[0].baseline is None, "the least bytes of one job are unknown"
    assert rows[-1].met is False, "the control misses if random nodes send fewer bytes"


def test_zones_require_a_tie_if_slurm_is_optimal() -> None:
    def rows(*seconds: tuple[float, float]) -> list[Row]:
        return [*zones.evaluate([JobOutcome("PS", {
            DEFAULT: Cost(slurm, 0, 0), PLACED: Cost(placed, 0, 0), LEAF: Cost(slurm, 0, 0),
            NEGATIVE_CONTROL: Cost(9.0, 0, 0)}) for slurm, placed in seconds])]

    good, over = rows((2, 2), (3, 2), (4, 4), (6, 3)), f"predicted seconds of {DEFAULT} over those of placement"
    check_rows(good, {"occupancies in which Slurm's choice is as fast as placement": 0.5,
                      f"Slurm slower than placement: {over}": 1.75})
    assert all(row.met in (True, None) for row in good)
    check_rows(rows((1, 2)), {f"Slurm as fast as placement: {over}": False})


def line(framework: str, nodes: int, images: float, sums: float = 1.0) -> ReportRow:
    phases = {"data": 0.0, "forward": 1.0, "backward": 2.0, "communication": 1.0, "peer_wait": 0.0, "optimizer": 0.0}
    bytes_sent = {"intra_node": 9, "intra_zone": 5 * nodes, "inter_zone": images}
    figures = JobFigures(images, 1.0, phases, None, sums, bytes_sent, 1, 0.5, None)
    return ReportRow(Cell(framework, "allreduce", "resnet50", nodes, "slurm"), "done", (figures,),
                     images / nodes / 10)


def test_frameworks_have_ddp_as_baseline() -> None:
    lines = [line("slurmdl", 1, 10.0), line("ddp", 1, 9.5), line("slurmdl", 4, 30.0), line("ddp", 4, 20.0, sums=0.9),
             ReportRow(Cell("absent", "allreduce", "resnet50", 1, "slurm"), "missing: not in this PyTorch"),
             ReportRow(Cell("slurmdl", "allreduce", "resnet50", 2, "slurm"), "failed: of its own")]
    rows = [*frameworks.evaluate("weak scaling", lines)]
    of_four = "weak scaling, emulated computation: slurmdl allreduce, 4 nodes"
    check_rows(rows, {
        f"{of_four}: images/s": (30.0, True), f"{of_four}: scaling efficiency": 0.75,
        f"{of_four}: bytes between nodes per step": 20.0 + 30.0,
        f"{of_four.replace('slurmdl', 'ddp')}: sum of the phases over the step time": False,
        "weak scaling: absent: missing: not in this PyTorch": None,
        "weak scaling: slurmdl allreduce, resnet50, 2 nodes, slurm: failed: of its own": False,
        "weak scaling: images/s on one node, slowest framework over fastest (control)": True})
    assert {row.metric: row.baseline for row in rows}[f"{of_four}: images/s"] == 20.0


def test_frameworks_matrix_is_valid_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(frameworks.matrix((1, 2), 8, 0.5, 3))
    spec = read_matrix_spec(str(tmp_path / "spec.yaml"))
    assert (spec.nodes, spec.batch_size, spec.emulate_compute, spec.seed) == ((1, 2), 8, 0.5, 3)
