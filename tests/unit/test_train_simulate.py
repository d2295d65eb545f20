"""Simulated runs: the same as real ones, the same every time, and on a clock of their own."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import mpirun, needs_mpi
from mpi_programs.virtual_vs_mpi import CASES, RANKS, run_virtual_case

from slurmdl.errors import InvalidRunError, TrainError, UsageError
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train
from slurmdl.train.transports.link_queues import Link, QueueingNetwork

PROGRAM = Path(__file__).with_name("mpi_programs") / "virtual_vs_mpi.py"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has ended in over MPI, by case."""
    folder = tmp_path_factory.mktemp("real")
    done = mpirun(RANKS, str(PROGRAM), str(folder))
    assert done.returncode == 0, done.stderr
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(RANKS)]


@needs_mpi
@pytest.mark.parametrize("case", CASES)
def test_real_and_simulated_runs_exchange_the_same(case: str, real: list[dict[str, Any]]) -> None:
    for its, virtual in zip((found[case] for found in real), run_virtual_case(case), strict=True):
        assert virtual["log"] == its["log"]
        assert virtual["bytes_sent"] == its["bytes_sent"]
        assert sum(size for _, size, _ in virtual["log"]) == sum(virtual["bytes_sent"].values()) > 0
        if its["worker_rank"] is not None:
            assert np.abs(virtual["parameters"] - its["parameters"]).max() < 1e-5


def figures(*arguments: str) -> dict[str, Any]:
    found = train(parse_train_options(["--steps", "30", "--model", "mlp:16", "--batch-size", "16", *arguments], {}))
    assert found is not None
    return found


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "ps"])
def test_a_simulation_can_be_repeated(strategy: str) -> None:
    assert figures("--virtual-ranks", "4", "--strategy", strategy) == figures("--virtual-ranks", "4",
                                                                              "--strategy", strategy)


def test_bytes_are_those_of_the_levels() -> None:
    size = 64 * 16 + 16 + 16 * 10 + 10
    found = figures("--virtual-ranks", "8", "--virtual-zones", "A:2x2,B:4", "--strategy", "gossip",
                    "--comm-pattern", "base-2")
    # distances 1, 2, 4 by turns: in turn 1 ranks 0 to 3 have their partner on their node, in turn 2 all in their
    # zone, in turn 3 in the other; then the models are the same already but for the last turn's share
    per_turn = 8 * 4 * size * 10
    final = found["bytes_sent"]["intra_node"] + found["bytes_sent"]["intra_zone"] + found["bytes_sent"]["inter_zone"] - 3 * per_turn
    assert 0 < final < 2 * 8 * 4 * size
    assert per_turn <= found["bytes_sent"]["inter_zone"] < per_turn + final
    assert per_turn // 2 <= found["bytes_sent"]["intra_node"] < per_turn // 2 + final


def test_time_is_that_of_computation_and_links() -> None:
    size = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    found = figures("--virtual-ranks", "2", "--virtual-zones", "A:1,B:1", "--strategy", "gossip",
                    "--emulate-compute", "0.5",
                    "--virtual-links", f"across={size * 8 / 0.25}:0.05")
    assert found["seconds_per_step"] == pytest.approx(0.5 + 0.25 + 0.05)
    assert found["exposed_comm_seconds"] == pytest.approx(30 * 0.3)


def test_a_slow_rank_holds_up_all_of_allreduce() -> None:
    found = figures("--virtual-ranks", "4", "--strategy", "allreduce", "--emulate-compute", "0.1", "--straggler",
                    "2=4")
    assert found["seconds_per_step"] == pytest.approx(0.4)


def test_stand_in_of_any_size(tmp_path: Path) -> None:
    summary = tmp_path / "summary"
    found = figures("--virtual-ranks", "2", "--strategy", "allreduce", "--emulate-compute", "0.3:1000", "--summary",
                    str(summary))
    assert (found["parameters"], found["test_accuracy"]) == (1000, None)
    assert found["seconds_per_step"] == pytest.approx(0.3)
    assert sum(found["bytes_sent"].values()) == 30 * 2 * 4000
    assert json.loads(summary.read_text()) == json.loads(json.dumps(found))


def test_a_failure_names_the_virtual_rank_and_what_all_refuse_does_not() -> None:
    with pytest.raises(TrainError, match=r"^rank \d on B\d: step \d: the gradient of .* are infinite or no numbers"):
        figures("--virtual-ranks", "2", "--virtual-zones", "B:2", "--strategy", "gossip", "--lr", "1e30")
    with pytest.raises(InvalidRunError, match=r"^--comm-pattern ring"):
        figures("--virtual-ranks", "2", "--strategy", "gossip", "--comm-pattern", "ring")
    with pytest.raises(InvalidRunError, match=r"^--straggler 2=: no such rank; valid: 0 to 1"):
        figures("--virtual-ranks", "2", "--straggler", "2=4")


@pytest.mark.parametrize("arguments", [
    ["--virtual-ranks", "4", "--virtual-zones", "A:2"], ["--virtual-zones", "A:2"], ["--virtual-links",
                                                                                     "across=1G"], ["--straggler",
                                                                                                    "1=2"],
    ["--virtual-ranks", "0"], ["--virtual-ranks", "2", "--virtual-zones", "A:1,A:1"], ["--virtual-ranks", "2",
                                                                                       "--virtual-links", "far=1G"],
    ["--virtual-ranks", "2", "--virtual-links", "across=0"], ["--emulate-compute",
                                                              "sleep:1"], ["--emulate-compute", "x"],
    ["--virtual-ranks", "2", "--straggler", "1=0"], ["--fold", "0/5"], ["--fold", "1/1"], ["--dirichlet-alpha", "0"]])
def test_options_that_cannot_be(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_train_options(arguments, {})


def test_links_carry_one_message_after_the_other() -> None:
    links = QueueingNetwork(["n0", "n1", "n2", "n3"], ["A", "A", "B", "B"], {
                            "inter_zone": Link(100.0, 1.0), "intra_zone": Link(1000.0)})
    assert links.arrival(0, 2, 100, 5.0) == (6.0, 7.0)
    assert links.arrival(1, 3, 100, 5.0) == (7.0, 8.0), "the zone's uplink was in use"
    assert links.arrival(2, 0, 100, 5.0) == (6.0, 7.0), "the other direction was not"
    assert links.arrival(0, 1, 100, 5.0) == (5.1, 5.1)
    assert links.arrival(2, 3, 100, 5.0) == (5.1, 5.1)


def test_who_receives_from_two_zones_receives_one_after_the_other() -> None:
    links = QueueingNetwork(["n0", "n1", "n2"], ["A", "B", "C"], {"inter_zone": Link(100.0)})
    assert links.arrival(0, 2, 100, 0.0) == (1.0, 1.0)
    assert links.arrival(1, 2, 100, 0.0) == (1.0, 2.0)
