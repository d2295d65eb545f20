"""Strategies compared with their definitions, over MPI with 4 ranks, nightly also with 2 and 5."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import mpirun, needs_mpi
from mpi_programs.virtual_vs_mpi import CASES, RANKS, run_virtual_case

from slurmdl.comm_layout import split_offsets
from slurmdl.traffic import Traffic

STEPS, FLOAT = 12, 4
pytestmark = needs_mpi


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@functools.cache
def run_program(size: int, folder: Path) -> dict[str, Any]:
    """Return the strategies' results; with `RANKS` ranks, write each rank's results of `CASES` to `folder`."""
    program = Path(__file__).with_name("mpi_programs") / "strategies.py"
    proc = mpirun(size, str(program), *[str(folder)] * (size == RANKS))
    assert proc.returncode == 0, proc.stderr
    result: dict[str, Any] = json.loads(proc.stdout)
    return result


@pytest.fixture(scope="module", params=[4, *(pytest.param(size, marks=pytest.mark.nightly) for size in (2, 5))])
def program_result(request: pytest.FixtureRequest, folder: Path) -> tuple[int, dict[str, Any]]:
    return request.param, run_program(request.param, folder)


def locality_level(result: dict[str, Any], source: int, target: int) -> str:
    if result["zones"][source] != result["zones"][target]:
        return "inter_zone"
    return "intra_node" if result["nodes"][source] == result["nodes"][target] else "intra_zone"


def modeled_bytes(program_result: tuple[int, dict[str, Any]], strategy: str, pattern: str,
                  length: int) -> list[dict[str, float]]:
    """Bytes per rank, iteration and locality level in placement's traffic model."""
    size, result = program_result
    sent = [{"intra_node": 0.0, "intra_zone": 0.0, "inter_zone": 0.0} for _ in range(size)]
    _, zone = np.unique(result["zones"], return_inverse=True)
    for phase in Traffic(strategy, float(length * FLOAT), pattern=pattern).phases(size, zone):
        for source, target, amount in np.broadcast(phase.source, phase.target, phase.bytes_per_pair):
            sent[source][locality_level(result, source, target)] += amount
    return sent


def total(sent: list[dict[str, int]]) -> list[int]:
    return [sum(levels.values()) for levels in sent]


@pytest.mark.parametrize("pattern", ["ring", "hierarchical"])
def test_allreduce_any_length_is_exact_and_identical(
    program_result: tuple[int, dict[str, Any]], pattern: str) -> None:
    _, result = program_result
    assert len(result[pattern]) == 7
    for run in result[pattern]:
        assert run["identical"]
        assert run["error"] < 1e-5


def test_allreduce_fp16_halves_bytes_within_error_bound(program_result: tuple[int, dict[str, Any]]) -> None:
    size, result = program_result
    fp16, fp32 = result["fp16"], next(run for run in result["hierarchical"] if run["length"] == 1000)
    assert fp16["identical"]
    assert [2 * sent for sent in total(fp16["bytes_sent"])] == total(fp32["bytes_sent"])
    assert fp32["error"] < fp16["error"] < size * 2**-11 * 4 * size or size == 1


def test_allreduce_ring_bytes_match_formula(program_result: tuple[int, dict[str, Any]]) -> None:
    size, result = program_result
    for ring in result["ring"]:
        length, offsets = ring["length"], split_offsets(ring["length"], size)
        chunk = [offsets[i + 1] - offsets[i] for i in range(size)]
        assert sum(total(ring["bytes_sent"])) == 2 * (size - 1) * length * FLOAT
        for rank, sent in enumerate(ring["bytes_sent"]):
            turns = [chunk[(rank - 1 - turn) % size] + chunk[(rank - turn) % size] for turn in range(size - 1)]
            own_level = locality_level(result, rank, (rank + 1) % size)
            assert sent == {"intra_node": 0, "intra_zone": 0, "inter_zone": 0} | {own_level: sum(turns) * FLOAT}
            assert abs(sum(turns) - 2 * length * (size - 1) / size) <= 2 * size


@pytest.mark.parametrize("pattern", ["ring", "hierarchical"])
def test_allreduce_bytes_match_traffic_model(program_result: tuple[int, dict[str, Any]],
                                                                     pattern: str) -> None:
    size, result = program_result
    for run in result[pattern]:
        for sent, model in zip(run["bytes_sent"], modeled_bytes(
            program_result, "allreduce", pattern, run["length"]), strict=True):
            # chunks are whole elements: the rounding error is below one element per round
            assert sent == pytest.approx(model, abs=2 * size * FLOAT)


def test_gossip_preserves_sum_and_reduces_spread(program_result: tuple[int, dict[str, Any]]) -> None:
    size, result = program_result
    assert len(result["gossip"]) == (3 if size in (2, 4) else 2)
    for graph, run in result["gossip"].items():
        assert run["sum_error"] < 1e-5
        assert run["spread"] < (0.2 if graph == "random-matching" or size == 5 else 1e-6)


def test_gossip_bytes_match_traffic_model(program_result: tuple[int, dict[str, Any]]) -> None:
    """By rank and level for periodic graphs; in total for random partners."""
    size, result = program_result
    for graph, run in result["gossip"].items():
        if graph == "random-matching":
            assert sum(total(run["bytes_sent"])) == STEPS * (size // 2 * 2) * run["length"] * FLOAT
            continue
        for sent, model in zip(run["bytes_sent"], modeled_bytes(
            program_result, "gossip", graph, run["length"]), strict=True):
            assert sent == pytest.approx({level: STEPS * amount for level, amount in model.items()})


@pytest.mark.parametrize("comm_pattern", ["ring", "hierarchical"])
def test_allreduce_equals_one_process_on_global_batch(
    program_result: tuple[int, dict[str, Any]], comm_pattern: str) -> None:
    size, result = program_result
    run = result["allreduce"][comm_pattern]
    assert run["distance"] < 1e-5
    assert sum(total(run["bytes_sent"])) == STEPS * 2 * (size - 1) * run["length"] * FLOAT


def test_ps_equals_one_process_on_global_batch(program_result: tuple[int, dict[str, Any]]) -> None:
    size, result = program_result
    assert len(result["ps"]) == min(size, 3) - 1
    for servers, run in enumerate(result["ps"], start=1):
        workers, offsets, header = size - servers, split_offsets(run["length"], servers), 8
        assert run["distance"] < 1e-5
        by_servers = [STEPS * workers * (offsets[i + 1] - offsets[i]) * FLOAT for i in range(servers)]
        by_workers = [STEPS * (run["length"] * FLOAT + servers * header)] * workers
        assert total(run["bytes_sent"]) == by_servers + by_workers


@pytest.fixture(scope="module")
def mpi_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of each rank over MPI, by case."""
    run_program(RANKS, folder)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_virtual_run_sends_the_same_messages_as_mpi(case: str, mpi_results: list[dict[str, Any]]) -> None:
    for over_mpi, virtual in zip((results[case] for results in mpi_results), run_virtual_case(case), strict=True):
        assert virtual["log"] == over_mpi["log"]
        assert virtual["bytes_sent"] == over_mpi["bytes_sent"]
        assert sum(size for _, size, _ in virtual["log"]) == sum(virtual["bytes_sent"].values()) > 0
        if over_mpi["worker_rank"] is not None:
            assert np.abs(virtual["parameters"] - over_mpi["parameters"]).max() < 1e-5
