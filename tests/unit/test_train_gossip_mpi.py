"""Gossip and local SGD by real messages of four ranks, beside virtual ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gossip_ranks import FURTHER, METHODS, STEPS
from mpi import mpirun, needs_mpi
from training import play

pytestmark = needs_mpi
RANKS = 4


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    here, file = Path(__file__), tmp_path_factory.mktemp("gossip") / "played"
    done = mpirun(RANKS, str(here.with_name("gossip_ranks.py")), str(file),
                  environ={"PYTHONPATH": str(here.parents[1])})
    assert done.returncode == 0, done.stderr
    return pickle.loads(file.read_bytes())


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.asynchronous])
def test_real_and_virtual_ranks_of_one_seed_do_the_same(ran: dict[str, Any], name: str) -> None:
    for real, virtual in zip(ran[name], play(METHODS[name], RANKS, STEPS, **FURTHER), strict=True):
        assert real["exchanges"] == virtual.exchanges
        assert 0 < real["fired"] <= STEPS
        assert np.abs(real["last"] - virtual.last).max() < 1e-5


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "gossip" in (method.strategy or "")])
def test_nothing_is_lost(ran: dict[str, Any], name: str) -> None:
    before = sum(its["first"] + its["added"] for its in ran[name])
    after = sum(its["last"] * its["weight"] for its in ran[name])
    assert np.abs(before - after).max() < 1e-4
    assert sum(its["weight"] for its in ran[name]) == pytest.approx(RANKS, rel=1e-12)
    assert sum(its["fired"] for its in ran[name]) > 0


def test_no_step_makes_a_collective_call(ran: dict[str, Any]) -> None:
    assert {name: its["collective"] for name, ranks in ran.items() for its in ranks} == {name: [] for name in ran}
