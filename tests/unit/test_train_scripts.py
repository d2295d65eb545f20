"""User scripts over MPI: success and failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi import mpirun, needs_mpi, python, torchrun
from strategy_harness import global_batches

from slurmdl.train.library.sampling import GlobalBatches

SCRIPT = str(Path(__file__).with_name("library_script.py"))
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "wrap_script.py")
pytestmark = needs_mpi


def slurmdl_lines(text: str) -> list[str]:
    """Return the lines that slurmdl prints."""
    return [line for line in text.splitlines() if line.startswith("slurmdl:")]


@pytest.mark.parametrize("strategy", ["gossip", *(pytest.param(name, marks=pytest.mark.nightly)
                                                  for name in ("ps", "allreduce"))])
def test_strategy_is_set_by_environment(strategy: str, tmp_path: Path) -> None:
    """All workers end with the same model; a server exits in wrap() with status 0.

    The ranks of MPI are accepted in spite of torch's variables.
    """
    ranks, steps = 3 if strategy == "ps" else 2, 10
    proc = mpirun(ranks, SCRIPT, "none", per_rank="export RANK=$R",
                  environ={"SLURMDL_TRAIN_STRATEGY": strategy, "SLURMDL_TRAIN_COMM_PATTERN": "hierarchical" if
                                              strategy == "allreduce" else "",
                           "SLURMDL_TRAIN_TRACE_DIR": str(tmp_path), "WORLD_SIZE": str(ranks)})
    assert proc.returncode == 0, proc.stderr
    workers = sorted(line for line in proc.stdout.splitlines() if line.startswith("worker"))
    assert len(workers) == 2
    assert len({line.split(":")[1] for line in workers}) == 1
    assert f"{steps} steps" in workers[0]
    assert f"strategy {strategy}" in " ".join(proc.stderr.split())
    for rank in range(ranks):
        events = json.loads((tmp_path / f"rank-{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        names = [event["name"] for event in events if event["ph"] == "X"]
        assert names.count("backward") == (0 if strategy == "ps" and rank == 0 else steps)
        assert "comm op" in names


def test_overlapped_reduction_equals_one_process() -> None:
    """With several buckets, starting from rank 0's model."""
    proc = mpirun(2, SCRIPT, "buckets")
    assert proc.returncode == 0, proc.stderr
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(40, 4) * torch.arange(40)[:, None] / 40
    batches = GlobalBatches(40, 2, 2, True, 1)
    for index in global_batches(batches, 0):
        opt.zero_grad()
        model(data[index]).square().mean().backward()
        opt.step()
    workers = [line for line in proc.stdout.splitlines() if line.startswith("worker")]
    assert len(workers) == 2
    for line in workers:
        assert json.loads(line.partition("steps, ")[2]) == pytest.approx(model.weight.detach().flatten().tolist(),
                                                                         abs=1e-6)


@pytest.mark.parametrize("start", [mpirun, torchrun])
def test_worker_may_make_a_backward_pass_alone_after_the_run(start: Callable[..., Any]) -> None:
    proc = start(2, SCRIPT, "alone", timeout=60)
    assert proc.returncode == 0, proc.stderr
    assert proc.stdout.count("worker ") == 2


@pytest.mark.parametrize(("start", "strategy", "warns"), [
    (mpirun, "allreduce", False), (torchrun, "gossip", True),
    pytest.param(mpirun, "gossip", True, marks=pytest.mark.nightly)])
def test_run_is_closed_at_exit(start: Callable[..., Any], strategy: str, warns: bool) -> None:
    """With gossip the script has missed the mean of the models."""
    proc = start(2, SCRIPT, "open", environ={"SLURMDL_TRAIN_STRATEGY": strategy})
    assert (proc.returncode, proc.stdout) == (0, ""), proc.stderr
    assert proc.stderr.count("consensus") == 1
    messages = slurmdl_lines(proc.stderr)
    assert len(messages) == warns
    assert all("the script ended without run.finish()" in message for message in messages)


@pytest.mark.parametrize(("strategy", "ranks"), [("allreduce", 2), ("ps", 3)])
def test_script_may_end_the_process_group_after_the_run(strategy: str, ranks: int) -> None:
    proc = torchrun(ranks, SCRIPT, "destroy", environ={"SLURMDL_TRAIN_STRATEGY": strategy}, timeout=60)
    assert proc.returncode == 0, proc.stderr
    assert proc.stdout.count("worker ") == 2
    assert proc.stderr.count("consensus") == 1


def test_process_group_that_ends_before_the_run_is_named() -> None:
    proc = torchrun(2, SCRIPT, "destroyed")
    assert proc.returncode != 0
    [message] = slurmdl_lines(proc.stderr)
    assert "destroy_process_group() was called before the end of the run; expected run.finish() first" in message


@pytest.mark.parametrize(("start", "end"), [(mpirun, "finish"), (mpirun, "open"), (torchrun, "open")])
def test_two_runs_of_a_script_are_separate(start: Callable[..., Any], end: str) -> None:
    """Asynchronous ranks receive from any other one, whatever arrives first."""
    proc = start(2, str(Path(SCRIPT).with_name("two_runs_script.py")), end, timeout=60)
    assert proc.returncode == 0, proc.stderr
    assert proc.stderr.count("consensus") == 2
    assert "outside run.wrap()" not in proc.stderr


@pytest.mark.parametrize("fault, status, words", [
    # on virtual ranks in test_train_library.py
    pytest.param("model", 76, "slurmdl: rank 1 on n1 has parameter weight (3, 4) float32 trained where rank 0 has "
                 "parameter weight (2, 4) float32 trained: all ranks need the same", marks=pytest.mark.nightly),
    ("early", 76, "slurmdl: train: rank 1 on n1: rank 0 continues, but this one has ended after 2 steps"),
    pytest.param("exit", 76, "slurmdl: train: rank 1 on n1: rank 0 continues, but this one has ended after 2 steps",
                 marks=pytest.mark.nightly),
    pytest.param("nan", 76, "slurmdl: rank 1 on n1: step 1: the gradient of weight has infinite or NaN entries",
                 marks=pytest.mark.nightly)])
def test_fault_of_one_worker_ends_all_ranks(fault: str, status: int, words: str) -> None:
    proc = mpirun(2, SCRIPT, fault, per_rank="export SLURMD_NODENAME=n$R")
    assert proc.returncode == status
    messages = slurmdl_lines(proc.stderr)
    assert len(messages) == 1, proc.stderr
    assert messages[0].startswith(words)
    assert "Traceback" not in proc.stderr
    assert "worker" not in proc.stdout


def test_worker_of_the_same_node_that_ends_early_is_named() -> None:
    """The ranks of a node exchange gradients in shared memory."""
    proc = mpirun(3, SCRIPT, "early", environ={"SLURMD_NODENAME": "n"})
    assert proc.returncode == 76
    [message] = slurmdl_lines(proc.stderr)
    assert "continues, but this one has ended after 2 steps" in message


@pytest.mark.parametrize("launcher, environ, culprit", [
    (["-m", "torch.distributed.run", "--nproc-per-node=2"], {}, "torchrun started 2 processes"),
    ([], {"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
    # inherited from an MPI launcher that started torchrun: MPI would treat both processes as the same rank
    ([], {"PMI_RANK": "0", "PMI_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
          "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
    pytest.param(["-m", "torch.distributed.run", "--nproc-per-node=2"], {"PMI_RANK": "0", "PMI_SIZE": "1"},
                 "torchrun", marks=pytest.mark.nightly)])
def test_mpi_needs_an_mpi_launcher(launcher: list[str], environ: dict[str, str], culprit: str) -> None:
    proc = python(*launcher, SCRIPT, "none", environ={"SLURMDL_TRAIN_BACKEND": "mpi", **environ})
    assert proc.returncode != 0
    messages = slurmdl_lines(proc.stderr)
    assert len(messages) == 1, proc.stderr
    assert messages[0].startswith(f"slurmdl: {culprit}")
    assert "--backend torch" in messages[0]
    assert "`srun --mpi=pmix python SCRIPT` or `mpirun -n " in messages[0]
    assert "worker" not in proc.stdout


@pytest.mark.nightly  # also in test_train_overflow.py, on virtual ranks
@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "ps", "local-sgd"])
def test_mixed_precision_reduces_scale_after_overflow(strategy: str) -> None:
    """float16 with autocast and GradScaler."""
    proc = mpirun(3, SCRIPT, "float16", environ={"SLURMDL_TRAIN_STRATEGY": strategy})
    assert proc.returncode == 0, proc.stderr
    workers = [line for line in proc.stdout.splitlines() if line.startswith("worker")]
    assert len(workers) == (2 if strategy == "ps" else 3)
    assert len({line.partition(":")[2] for line in workers}) == 1
    scales = [json.loads(line.partition("scale ")[2]) for line in proc.stdout.splitlines() if "scale " in line]
    assert all(1 <= scale < 2.0 ** 40 for scale in scales) and len(scales) == len(workers)
    assert not slurmdl_lines(proc.stderr)


@pytest.mark.parametrize(("strategy", "ranks"), [
    ("allreduce", 2), pytest.param("ps", 3, marks=pytest.mark.nightly)])
def test_uncaught_exception_ends_all_ranks(strategy: str, ranks: int) -> None:
    proc = mpirun(ranks, SCRIPT, "exception", environ={"SLURMDL_TRAIN_STRATEGY": strategy})
    assert proc.returncode == 1
    assert "KeyError: \"of the user's own\"" in proc.stderr
    assert proc.stderr.count("Traceback") == 1


@pytest.mark.nightly  # also in tests/cluster/test_user_scripts.py, in a job
def test_example_learns() -> None:
    proc = mpirun(2, EXAMPLE)
    assert proc.returncode == 0, proc.stderr
    assert float(proc.stdout.split()[-1].rstrip("%")) > 88
    assert "seconds/step" in proc.stderr


def test_import_of_library_loads_neither_torch_nor_mpi() -> None:
    proc = python("-c", "import sys, slurmdl.train; print('numpy' in sys.modules); slurmdl.train.init; "
                        "print('torch' in sys.modules, 'mpi4py' in sys.modules)", loaded=False)
    assert proc.stdout.split() == ["False"] * 3, proc.stderr
