"""Each strategy against its definition, run for real with 2 to 5 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi import mpirun, needs_mpi

from slurmdl.placement.traffic import Traffic
from slurmdl.train.p2p import split_offsets

STEPS, FLOAT = 12, 4
pytestmark = needs_mpi


@pytest.fixture(scope="module", params=[2, 4, 5])
def ran(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    done = mpirun(request.param, str(Path(__file__).with_name("train_ranks.py")))
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


def level(result: dict[str, Any], one: int, other: int) -> str:
    if result["zones"][one] != result["zones"][other]:
        return "across"
    return "node" if result["nodes"][one] == result["nodes"][other] else "zone"


def modelled(ran: tuple[int, dict[str, Any]], strategy: str, pattern: str, length: int) -> list[dict[str, float]]:
    """What each rank sends per iteration, by level, as placement models it."""
    size, result = ran
    sent = [{"node": 0.0, "zone": 0.0, "across": 0.0} for _ in range(size)]
    _, zone = np.unique(result["zones"], return_inverse=True)
    for phase in Traffic(strategy, float(length * FLOAT), pattern=pattern).phases(size, zone):
        for source, target, amount in np.broadcast(phase.source, phase.target, phase.bytes_per_pair):
            sent[source][level(result, source, target)] += amount
    return sent


def total(sent: list[dict[str, int]]) -> list[int]:
    return [sum(levels.values()) for levels in sent]


@pytest.mark.parametrize("pattern", ["ring", "hierarchical"])
def test_sums_for_every_length(ran: tuple[int, dict[str, Any]], pattern: str) -> None:
    _, result = ran
    assert len(result[pattern]) == 7
    for run in result[pattern]:
        assert run["alike"]
        assert run["error"] < 1e-5


def test_sums_in_half_the_bytes(ran: tuple[int, dict[str, Any]]) -> None:
    size, result = ran
    halved, whole = result["halved"], next(run for run in result["hierarchical"] if run["length"] == 1000)
    assert halved["alike"]
    assert [2 * sent for sent in total(halved["sent"])] == total(whole["sent"])
    assert whole["error"] < halved["error"] < size * 2**-11 * 4 * size or size == 1


def test_ring_bytes_by_level_are_those_of_the_formula(ran: tuple[int, dict[str, Any]]) -> None:
    size, result = ran
    for ring in result["ring"]:
        length, edge = ring["length"], split_offsets(ring["length"], size)
        part = [edge[i + 1] - edge[i] for i in range(size)]
        assert sum(total(ring["sent"])) == 2 * (size - 1) * length * FLOAT
        for rank, sent in enumerate(ring["sent"]):
            turns = [part[(rank - 1 - turn) % size] + part[(rank - turn) % size] for turn in range(size - 1)]
            way = level(result, rank, (rank + 1) % size)
            assert sent == {"node": 0, "zone": 0, "across": 0} | {way: sum(turns) * FLOAT}
            assert abs(sum(turns) - 2 * length * (size - 1) / size) <= 2 * size


@pytest.mark.parametrize("pattern", ["ring", "hierarchical"])
def test_bytes_of_allreduce_by_rank_and_level_are_those_of_the_model(ran: tuple[int, dict[str, Any]],
                                                                     pattern: str) -> None:
    size, result = ran
    for run in result[pattern]:
        for sent, model in zip(run["sent"], modelled(ran, "allreduce", pattern, run["length"]), strict=True):
            # parts are whole numbers of elements: in each of the rounds they differ by less than one
            assert sent == pytest.approx(model, abs=2 * size * FLOAT)


def test_gossip_keeps_the_sum_of_the_models_and_draws_them_together(ran: tuple[int, dict[str, Any]]) -> None:
    size, result = ran
    assert len(result["gossip"]) == (3 if size in (2, 4) else 2)
    for graph, run in result["gossip"].items():
        assert run["sum_error"] < 1e-5
        assert run["spread"] < (0.2 if graph == "random" or size == 5 else 1e-6)


def test_bytes_of_gossip_are_those_of_the_model(ran: tuple[int, dict[str, Any]]) -> None:
    """By rank and level for the graphs, whose distances take turns; in all for partners that are drawn."""
    size, result = ran
    for graph, run in result["gossip"].items():
        if graph == "random":
            assert sum(total(run["sent"])) == STEPS * (size // 2 * 2) * run["length"] * FLOAT
            continue
        for sent, model in zip(run["sent"], modelled(ran, "gossip", graph, run["length"]), strict=True):
            assert sent == pytest.approx({level: STEPS * amount for level, amount in model.items()})


@pytest.mark.parametrize("traffic", ["ring", "hierarchical"])
def test_allreduce_equals_one_process_on_the_big_batch(ran: tuple[int, dict[str, Any]], traffic: str) -> None:
    size, result = ran
    run = result["allreduce"][traffic]
    assert run["distance"] < 1e-5
    assert sum(total(run["sent"])) == STEPS * 2 * (size - 1) * run["length"] * FLOAT


def test_ps_equals_one_process_on_the_big_batch(ran: tuple[int, dict[str, Any]]) -> None:
    size, result = ran
    assert len(result["ps"]) == min(size, 3) - 1
    for servers, run in enumerate(result["ps"], start=1):
        workers, edge, header = size - servers, split_offsets(run["length"], servers), 8
        assert run["distance"] < 1e-5
        assert total(run["sent"]) == [STEPS * workers * (edge[i + 1] - edge[i]) * FLOAT for i in range(servers)] + [
            STEPS * (run["length"] * FLOAT + servers * header)] * workers
