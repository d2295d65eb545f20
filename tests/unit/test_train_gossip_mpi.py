"""Gossip and local SGD over MPI, compared with virtual ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi import mpirun, needs_mpi
from mpi_programs.gossip import CONFIGS, STEPS, WORKER_OPTIONS
from strategy_harness import run_strategy

pytestmark = needs_mpi
RANKS = 4


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program, file = Path(__file__).with_name("mpi_programs") / "gossip.py", tmp_path_factory.mktemp("gossip") / "logs"
    proc = mpirun(RANKS, str(program), str(file), environ={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert proc.returncode == 0, proc.stderr
    return pickle.loads(file.read_bytes())


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if not config.asynchronous])
def test_strategy_mpi_equals_virtual_ranks(logs: dict[str, Any], name: str) -> None:
    for real, virtual in zip(logs[name], run_strategy(CONFIGS[name], RANKS, STEPS, **WORKER_OPTIONS), strict=True):
        assert real["exchange_steps"] == virtual.exchange_steps
        assert 0 < real["exchanges"] <= STEPS
        assert np.abs(real["final"] - virtual.final).max() < 1e-5


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if "gossip" in (config.strategy or "")])
def test_gossip_preserves_sum(logs: dict[str, Any], name: str) -> None:
    expected = sum(log["initial"] + log["total_update"] for log in logs[name])
    actual = sum(log["final"] * log["model_weight"] for log in logs[name])
    assert np.abs(expected - actual).max() < 1e-4
    assert sum(log["model_weight"] for log in logs[name]) == pytest.approx(RANKS, rel=1e-12)
    assert sum(log["exchanges"] for log in logs[name]) > 0


def test_gossip_makes_no_mpi_collective_call(logs: dict[str, Any]) -> None:
    for name, ranks in logs.items():
        assert [log["collectives"] for log in ranks] == [[]] * RANKS, name
