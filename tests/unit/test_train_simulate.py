"""Simulated runs: reproducible, and timed by a virtual clock (equal to MPI runs: test_train_transports.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmdl.errors import InvalidRunError, TrainError, UsageError
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def run_summary(*arguments: str) -> dict[str, Any]:
    summary = train(parse_train_options(["--steps", "30", "--model", "mlp:16", "--batch-size", "16", *arguments], {}))
    assert summary is not None
    return summary


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "ps"])
def test_virtual_run_is_reproducible(strategy: str) -> None:
    assert run_summary("--virtual-ranks", "4", "--strategy", strategy) == run_summary("--virtual-ranks", "4",
                                                                              "--strategy", strategy)


def test_virtual_run_counts_bytes_by_locality_level() -> None:
    size = 64 * 16 + 16 + 16 * 10 + 10
    summary = run_summary("--virtual-ranks", "8", "--virtual-zones", "A:2x2,B:4", "--strategy", "gossip",
                    "--comm-pattern", "base-2")
    # Distances alternate between 1, 2 and 4. Distance 1: ranks 0 to 3 have a partner on their node. Distance 2: all
    # partners are in the same zone. Distance 4: all are in the other zone. The remaining bytes are the final average.
    per_turn = 8 * 4 * size * 10
    sent = summary["bytes_sent"]
    final = sum(sent.values()) - 3 * per_turn
    assert 0 < final < 2 * 8 * 4 * size
    assert per_turn <= sent["inter_zone"] < per_turn + final
    assert per_turn // 2 <= sent["intra_node"] < per_turn // 2 + final


def test_virtual_time_is_computation_plus_links() -> None:
    size = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    summary = run_summary("--virtual-ranks", "2", "--virtual-zones", "A:1,B:1", "--strategy", "gossip",
                    "--emulate-compute", "0.5",
                    "--virtual-links", f"inter-zone={size * 8 / 0.25}:0.05")
    assert summary["seconds_per_step"] == pytest.approx(0.5 + 0.25 + 0.05)
    assert summary["exposed_comm_seconds"] == pytest.approx(30 * 0.3)


def test_straggler_delays_allreduce() -> None:
    summary = run_summary("--virtual-ranks", "4", "--strategy", "allreduce", "--emulate-compute", "0.1",
                          "--straggler",
                    "2=4")
    assert summary["seconds_per_step"] == pytest.approx(0.4)


def test_synthetic_workload_has_any_size(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    summary = run_summary("--virtual-ranks", "2", "--strategy", "allreduce", "--emulate-compute", "0.3:1000",
                          "--summary",
                    str(file))
    assert (summary["parameters"], summary["test_accuracy"]) == (1000, None)
    assert summary["seconds_per_step"] == pytest.approx(0.3)
    assert sum(summary["bytes_sent"].values()) == 30 * 2 * 4000
    assert json.loads(file.read_text()) == json.loads(json.dumps(summary))


def test_error_names_virtual_rank_unless_all_ranks_raise_it() -> None:
    with pytest.raises(TrainError, match=r"^rank \d on B\d: step \d: the gradient of .* has infinite or NaN"):
        run_summary("--virtual-ranks", "2", "--virtual-zones", "B:2", "--strategy", "gossip", "--lr", "1e30")
    with pytest.raises(InvalidRunError, match=r"^--comm-pattern ring"):
        run_summary("--virtual-ranks", "2", "--strategy", "gossip", "--comm-pattern", "ring")
    with pytest.raises(UsageError, match=r"--batch-size 800: each worker has only 718 samples"):
        run_summary("--virtual-ranks", "2", "--batch-size", "800")
    for path, reason in (("/nowhere/summary", "No such file or directory"), ("/etc", "Is a directory")):
        with pytest.raises(TrainError, match=rf"^rank 0 on \S+: --summary {path}: cannot be written \({reason}\)"):
            run_summary("--virtual-ranks", "2", "--summary", path)
    with pytest.raises(InvalidRunError, match=r"^--straggler 2=: no such rank; expected 0 to 1"):
        run_summary("--virtual-ranks", "2", "--straggler", "2=4")


@pytest.mark.parametrize("arguments", [
    "--virtual-ranks 4 --virtual-zones A:2", "--virtual-zones A:2", "--virtual-links inter-zone=1G",
    "--straggler 1=2", "--virtual-ranks 0", "--virtual-ranks 2 --virtual-zones A:1,A:1",
    "--virtual-ranks 2 --virtual-links far=1G", "--virtual-ranks 2 --virtual-links inter-zone=0",
    "--virtual-ranks 2 --virtual-links inter_zone=1G", "--emulate-compute sleep:1", "--emulate-compute x",
    "--emulate-compute 1:2:3", "--virtual-ranks 2 --straggler 1=0", "--fold 0/5", "--fold 1/1",
    "--dirichlet-alpha 0"])
def test_options_invalid_or_conflicting_raise(arguments: str) -> None:
    with pytest.raises(UsageError):
        parse_train_options(arguments.split(), {})
