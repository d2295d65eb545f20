"""Runs in which one rank computes slowly: of the library over MPI, and of a plain DistributedDataParallel script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mpi import mpirun, needs_mpi, torchrun

from slurmdl.train import watch_slow_ranks

DDP_SCRIPT = str(Path(__file__).with_name("ddp_slow_rank_script.py"))
#: the computation sleeps; so long that the delays of a busy machine (tens of ms) change neither ratio nor MAD much
EMULATED = ("-m", "slurmdl.train", "--emulate-compute", "0.06", "--model", "mlp:16", "--batch-size", "8")
NIGHTLY = pytest.mark.nightly


def slow_rank_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "computes" in line or "requeue" in line]


@needs_mpi
@pytest.mark.parametrize(("arguments", "slow_rank"), [
    (("--strategy", "allreduce"), 1),
    *(pytest.param(words, 1 if "ps" in words else 3, marks=NIGHTLY) for words in (
        ("--strategy", "ps"), ("--strategy", "gossip"), ("--strategy", "gossip", "--async"),
        ("--strategy", "ps", "--async"),
        ("--strategy", "gossip", "--shared-memory"), ("--strategy", "local-sgd", "--period", "8")))],
    ids=lambda words: "".join(words[1:]).replace("--", "-") if isinstance(words, tuple) else "")
def test_slow_rank_is_reported_once(arguments: tuple[str, ...], slow_rank: int, tmp_path: Path) -> None:
    """The first worker reports it; with a server that is rank 1, here the slow one.

    An asynchronous slow rank makes few steps while the others make many.
    """
    steps = "400" if "--async" in arguments else "100"
    ranks = 2 if "allreduce" in arguments else 4  # MAD counts with four or more
    proc = mpirun(ranks, *EMULATED, *arguments, "--steps", steps, "--straggler", f"{slow_rank}=4@20",
                  "--summary", str(tmp_path / "summary"))
    assert proc.returncode == 0, proc.stderr
    line, = slow_rank_lines(proc.stderr)
    assert line.startswith(f"slurmdl: train: rank {slow_rank} on "), line
    found, = json.loads((tmp_path / "summary").read_text())["slow_ranks"]
    assert found["rank"] == slow_rank
    assert found["since_step"] >= 21
    assert f"since step {found['since_step']} (" in line
    assert found["factor"] > 1.5


@NIGHTLY
@needs_mpi
@pytest.mark.parametrize("arguments", [(), pytest.param(("--straggler", "2=3", "--load-balance"),
                                                        marks=NIGHTLY)])
def test_equal_ranks_are_not_reported(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Also with load balancing, where the step times of a slow rank are no measure."""
    proc = mpirun(4, *EMULATED, "--strategy", "allreduce", "--steps", "130", *arguments,
                  "--summary", str(tmp_path / "summary"))
    assert proc.returncode == 0, proc.stderr
    assert slow_rank_lines(proc.stderr) == []
    assert json.loads((tmp_path / "summary").read_text())["slow_ranks"] == []


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=NIGHTLY)])
def test_slow_rank_of_ddp_is_reported_once(passes: int) -> None:
    """Without waiting for gradients, which takes longest on the fast ranks; a requeue is refused outside of Slurm."""
    proc = torchrun(4, DDP_SCRIPT, "2", str(passes), environ={"SLURMDL_ON_SLOW": "exclude"})
    assert proc.returncode == 0, proc.stderr
    results = [line.partition(": ")[2] for line in proc.stdout.splitlines() if line.startswith("rank ")]
    assert len(results) == 4
    assert len(set(results)) == 1
    found, refused = slow_rank_lines(proc.stderr)
    assert found.startswith("slurmdl: train: rank 2 on "), found
    assert "since step 1 (" in found
    assert "and the run continues: slurmdl requeue: no job" in refused


@NIGHTLY
def test_equal_ranks_of_ddp_are_not_reported() -> None:
    proc = torchrun(4, DDP_SCRIPT, "-1", "1")
    assert proc.returncode == 0, proc.stderr
    assert not [line for line in proc.stderr.splitlines() if line.startswith("slurmdl:")]


def test_watching_another_model_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    watch_slow_ranks(torch.nn.Linear(1, 1))
    assert capsys.readouterr().err == "slurmdl: train: slow ranks are not watched: a Linear is not measured; " \
                                      "expected a DistributedDataParallel\n"


@NIGHTLY
@needs_mpi
@pytest.mark.parametrize("words", [("--checkpoint-dir", "kept"), pytest.param((), marks=NIGHTLY)])
def test_run_continues_if_its_job_cannot_be_requeued(words: tuple[str, ...], tmp_path: Path) -> None:
    """Without a job there is nothing to requeue, and without checkpoints nothing to resume from."""
    path = [str(tmp_path / word) if word == "kept" else word for word in words]
    proc = mpirun(2, *EMULATED, "--strategy", "gossip", "--steps", "300", "--straggler", "1=3", *path,
                  "--summary", str(tmp_path / "summary"), environ={"SLURMDL_ON_SLOW": "exclude"})
    assert proc.returncode == 0, proc.stderr
    found, refused = slow_rank_lines(proc.stderr)
    assert found.startswith("slurmdl: train: rank 1 on "), found
    assert "and the run continues: " + ("slurmdl requeue: no job" if words else "it has no checkpoints") in refused
    assert json.loads((tmp_path / "summary").read_text())["steps"] == 300


#: the trainer, with a job that can be requeued when it is asked, but not any more when it has stopped
REFUSED = """
import runpy, sys
from concurrent.futures import Future
from slurmdl.errors import UnavailableError
from slurmdl.train import slow_ranks
from slurmdl.train.library import shutdown

def start_requeue(reasons, dry_run):
    assert dry_run
    future = Future()
    future.set_result("")
    return future

def refuse(reasons):
    raise UnavailableError("scontrol requeue: refused")

slow_ranks.start_requeue, shutdown.requeue_without_nodes = start_requeue, refuse
runpy.run_module("slurmdl.train", run_name="__main__", alter_sys=True)
"""


@NIGHTLY
@needs_mpi
@pytest.mark.parametrize("strategy", ["ps", pytest.param("gossip", marks=NIGHTLY)])
def test_run_continues_if_the_requeue_is_refused_after_the_checkpoint(strategy: str, tmp_path: Path) -> None:
    """Rank 0 is a server, rank 1 finds the slow rank; all have stopped for a checkpoint when Slurm refuses."""
    proc = mpirun(3, "-c", REFUSED, *EMULATED[2:], "--strategy", strategy, "--steps", "200", "--straggler", "2=3",
                  "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "0",
                  "--summary", str(tmp_path / "summary"), environ={"SLURMDL_ON_SLOW": "exclude"})
    assert proc.returncode == 0, proc.stderr
    found, stops, refused = slow_rank_lines(proc.stderr)
    assert "rank 2 on" in found
    step = re.search(r"checkpoint of step (\d+) in \S+; requeues the job without", stops)
    assert step, stops
    assert "and the run continues: scontrol requeue: refused" in refused
    assert [path.name for path in (tmp_path / "kept").glob("step-*")] == [f"step-{int(step[1]):08}"]
    assert json.loads((tmp_path / "summary").read_text())["steps"] == 200
