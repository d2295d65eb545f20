"""Each strategy against its definition, run for real with 2 to 5 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mpi import mpirun, needs_mpi

from slurmdl.train.messages import bounds

STEPS, FLOAT = 12, 4
pytestmark = needs_mpi


@pytest.fixture(scope="module", params=[2, 3, 5])
def ran(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    done = mpirun(request.param, str(Path(__file__).with_name("train_ranks.py")))
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


def test_ring_equals_the_sum_for_every_length(ran: tuple[int, dict[str, Any]]) -> None:
    _, result = ran
    assert len(result["rings"]) == 7
    for ring in result["rings"]:
        assert ring["alike"]
        assert ring["error"] < 1e-5


def test_ring_bytes_by_level_are_those_of_the_formula(ran: tuple[int, dict[str, Any]]) -> None:
    size, result = ran
    for ring in result["rings"]:
        length, edge = ring["length"], bounds(ring["length"], size)
        part = [edge[i + 1] - edge[i] for i in range(size)]
        assert sum(sum(sent.values()) for sent in ring["sent"]) == 2 * (size - 1) * length * FLOAT
        for rank, sent in enumerate(ring["sent"]):
            right = (rank + 1) % size
            level = "node" if rank // 2 == right // 2 else "zone" if rank // 4 == right // 4 else "across"
            turns = [part[(rank - turn) % size] + part[(rank + 1 - turn) % size] for turn in range(size - 1)]
            assert sent == {"node": 0, "zone": 0, "across": 0} | {level: sum(turns) * FLOAT}
            assert abs(sum(turns) - 2 * length * (size - 1) / size) <= 2 * size


def test_gossip_keeps_the_sum_of_the_models_and_draws_them_together(ran: tuple[int, dict[str, Any]]) -> None:
    size, result = ran
    gossip = result["gossip"]
    assert gossip["sum_error"] < 1e-5
    assert gossip["spread"] < 0.2
    assert gossip["sent"] == STEPS * (size // 2 * 2) * gossip["length"] * FLOAT


def test_allreduce_equals_one_process_on_the_big_batch(ran: tuple[int, dict[str, Any]]) -> None:
    size, result = ran
    assert result["allreduce"]["distance"] < 1e-5
    assert sum(result["allreduce"]["sent"]) == STEPS * 2 * (size - 1) * result["allreduce"]["length"] * FLOAT


def test_ps_equals_one_process_on_the_big_batch(ran: tuple[int, dict[str, Any]]) -> None:
    size, result = ran
    assert len(result["ps"]) == min(size, 3) - 1
    for servers, run in enumerate(result["ps"], start=1):
        workers, edge = size - servers, bounds(run["length"], servers)
        assert run["distance"] < 1e-5
        assert run["sent"] == [STEPS * workers * (edge[i + 1] - edge[i]) * FLOAT for i in range(servers)] + [
            STEPS * run["length"] * FLOAT] * workers
