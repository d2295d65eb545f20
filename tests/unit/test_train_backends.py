"""The backend torch: the same models as over MPI, bit for bit, and one message per fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi import free_port, mpirun, needs_mpi, preloaded, python, torchrun

from slurmdl.errors import InvalidOptionsError
from slurmdl.train import world
from slurmdl.train.transports import torch_distributed

SCRIPT = str(Path(__file__).parent / "library_script.py")
TRAIN = ("-m", "slurmdl.train", "--steps", "30", "--model", "mlp:16", "--batch-size", "8")


def slurmdl_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("slurmdl: ")]


@needs_mpi
@pytest.mark.parametrize("options", [
    "--strategy allreduce",
    pytest.param("--strategy ps --ps 2", marks=pytest.mark.nightly),
    pytest.param("--strategy adaptive-gossip --comm-budget 10% --compression int8", marks=pytest.mark.nightly),
    pytest.param("--strategy allreduce --compression fp16", marks=pytest.mark.nightly),
    pytest.param("--strategy gossip", marks=pytest.mark.nightly),
    pytest.param("--strategy gossip --comm-pattern one-peer-exponential", marks=pytest.mark.nightly),
    pytest.param("--strategy local-sgd --period 8 --compression int4", marks=pytest.mark.nightly),
    pytest.param("--strategy allreduce --load-balance", marks=pytest.mark.nightly)])
def test_models_are_those_of_mpi(options: str, tmp_path: Path) -> None:
    """Each rank has a node of its own: over MPI, the ranks of a node would add gradients in another order."""
    ranks = 3 if "allreduce" in options else 4  # of which two may be servers
    train = (*TRAIN, *options.split(), "--summary")
    procs = [start(ranks, *train, str(tmp_path / name), per_rank="export SLURMD_NODENAME=n$R")
             for start, name in ((mpirun, "mpi"), (torchrun, "torch"))]
    assert [proc.returncode for proc in procs] == [0, 0], [proc.stderr for proc in procs]
    over_mpi, over_torch = (json.loads((tmp_path / name).read_text()) for name in ("mpi", "torch"))
    if "--load-balance" not in options:  # by measured speeds
        assert over_torch["parameters_crc32"] == over_mpi["parameters_crc32"]
        assert over_torch["bytes_sent"] == over_mpi["bytes_sent"]
    assert over_torch["world_size"] == ranks and over_torch["steps"] == 30


@pytest.mark.nightly
@needs_mpi
def test_waiting_for_a_slow_rank_is_no_communication(tmp_path: Path) -> None:
    """Rank 1 computes five times as long as rank 0."""
    train = (*TRAIN, "--strategy", "allreduce", "--emulate-compute", "0.02", "--straggler", "1=5", "--summary")
    for proc, summary in ((mpirun(2, *train, str(tmp_path / "mpi")), "mpi"),
                          (torchrun(2, *train, str(tmp_path / "torch")), "torch")):
        assert proc.returncode == 0, proc.stderr
        phases = json.loads((tmp_path / summary).read_text())["phases"]
        assert phases["peer_wait"] > phases["communication"], phases


@pytest.mark.parametrize("options", [
    "--strategy gossip --async",
    pytest.param("--strategy ps --async", marks=pytest.mark.nightly),
    pytest.param("--strategy gossip --async --load-balance", marks=pytest.mark.nightly)])
def test_asynchronous_strategies_train(options: str) -> None:
    proc = torchrun(3, *TRAIN, "--steps", "300", *options.split())
    assert proc.returncode == 0, proc.stderr
    assert not slurmdl_lines(proc.stderr)
    accuracy = next(line for line in proc.stdout.splitlines() if line.startswith("test accuracy"))
    assert float(accuracy.split()[-1].rstrip("%")) > 80


def test_process_group_of_the_script_may_be_for_gpus_only() -> None:
    proc = torchrun(2, SCRIPT, "own-group")
    assert proc.returncode == 0, proc.stderr
    models = {line.partition(": ")[2] for line in proc.stdout.splitlines() if line.startswith("worker ")}
    assert len(models) == 1 and proc.stdout.count("worker ") == 2, proc.stdout


def test_process_group_of_spawned_processes_is_used() -> None:
    """Without a launcher's variables, each would be a world of one rank over MPI."""
    proc = python(str(Path(__file__).parent / "spawn_script.py"), str(free_port()))
    assert sorted(proc.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], proc.stderr


@pytest.mark.parametrize("fault, words", [
    ("ddp", "slurmdl: wrap(): DistributedDataParallel averages the gradients of this model, too; expected"),
    pytest.param("ddp-inside", "slurmdl: wrap(): DistributedDataParallel averages the gradients of this model, too",
                 marks=pytest.mark.nightly),
    ("ddp-late", "slurmdl: wrap(): DistributedDataParallel averages the gradients of this model, too"),
    ("early", "slurmdl: train: rank 1 on n: rank 0 continues, but this one has ended after 2 steps"),
    ("nan", "slurmdl: rank 1 on n: step 1: the gradient of weight has infinite or NaN entries"),
    pytest.param("model", "slurmdl: rank 1 on n has parameter weight (3, 4)", marks=pytest.mark.nightly)])
def test_fault_of_one_worker_ends_all_ranks(fault: str, words: str) -> None:
    proc = torchrun(2, SCRIPT, fault, environ={"SLURMD_NODENAME": "n"})
    assert proc.returncode != 0
    messages = slurmdl_lines(proc.stderr)
    assert len(messages) == 1, proc.stderr
    assert messages[0].startswith(words)
    assert "worker" not in proc.stdout


def test_collective_of_the_script_that_waits_for_a_parameter_server_ends_all_ranks() -> None:
    environ = {"SLURMD_NODENAME": "n", "SLURMDL_TRAIN_STRATEGY": "ps", "SLURMDL_TRAIN_PS": "1"}
    proc = torchrun(2, SCRIPT, "metrics", environ=environ)
    assert proc.returncode != 0
    [message] = slurmdl_lines(proc.stderr)
    assert message.startswith("slurmdl: train: rank 1 on n: torch.distributed.all_reduce() waits for rank 0 on n, a "
                              "parameter server, which does not run the script; expected run.all_gather_object()")


@pytest.mark.parametrize("launcher", [torchrun, pytest.param(mpirun, marks=needs_mpi)])
def test_workers_gather_objects_while_servers_serve(launcher: Callable[..., Any]) -> None:
    proc = launcher(3, SCRIPT, "gather", environ={"SLURMDL_TRAIN_STRATEGY": "ps", "SLURMDL_TRAIN_PS": "1"})
    assert proc.returncode == 0, proc.stderr
    assert proc.stdout.count("10 steps") == 2, proc.stdout


def test_tasks_of_srun_find_each_other_without_mpi() -> None:
    """The variables of srun --mpi=none; both tasks are on this host."""
    environ = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
               "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    other = subprocess.Popen([*preloaded(), *TRAIN], env=clean | environ | {"SLURM_PROCID": "1"})
    proc = python(*TRAIN, environ={**environ, "SLURM_PROCID": "0"})
    assert other.wait(60) == proc.returncode == 0, proc.stderr
    assert "ranks: 0 " in proc.stdout and ", 1 " in proc.stdout


@pytest.mark.parametrize(("options", "size", "logging_rank"), [("allreduce", 2, 0), ("ps --async", 3, 1)])
def test_killed_rank_ends_the_others(options: str, size: int, logging_rank: int) -> None:
    """Without a launcher that ends them: each says which rank is lost.

    It is probably killed during its computation. An asynchronous server then waits for a message of any worker, and
    the other worker for the server.
    """
    environ = {**os.environ, "SLURM_STEP_NUM_TASKS": str(size), "MASTER_PORT": str(free_port()),
               "MASTER_ADDR": "localhost"}
    train = [*preloaded(), *TRAIN, "--strategy", *options.split(), "--steps", "100000", "--emulate-compute", "0.2",
             "--log-every", "5"]
    ranks = [subprocess.Popen(train, env={**environ, "SLURM_PROCID": str(rank)}, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for rank in range(size)]
    log = ranks[logging_rank].stdout
    assert log
    while "step 5" not in log.readline():
        assert ranks[logging_rank].poll() is None
    ranks[-1].send_signal(signal.SIGKILL)
    for rank, lost in zip(ranks[:-1], (size - 1, 0), strict=False):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 76
        [message] = slurmdl_lines(errors)
        assert f"rank {lost} has ended, or does not answer" in message
        assert "Traceback" not in errors
    ranks[-1].communicate()


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_ranks_end_with_torchrun(has_checkpoints: bool, tmp_path: Path) -> None:
    """SIGUSR1, which Slurm may send to all processes of a step, ends torchrun, and not its ranks."""
    folder = tmp_path / "kept"
    train = [*TRAIN, "--steps", "3000", "--emulate-compute", "0.01:2000", "--log-every", "10",
             *(["--checkpoint-dir", str(folder)] if has_checkpoints else [])]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *train],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout
    while "step 20 " not in launcher.stdout.readline():
        assert launcher.poll() is None
    launcher.send_signal(signal.SIGUSR1)
    output, errors = launcher.communicate(timeout=60)  # until the ranks have closed the pipes, too
    assert launcher.returncode == -signal.SIGUSR1
    assert "test accuracy" not in output
    assert len(list(folder.glob("*/manifest.json"))) == has_checkpoints
    assert ("stopped on request: checkpoint of step" in errors) == has_checkpoints


@pytest.mark.parametrize(("environ", "expected"), [
    ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)), ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}, (2, 3)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, (0, 1)),  # a batch script
    ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (1, 4)), ({}, (0, 1))])
def test_rank_and_size(environ: dict[str, str], expected: tuple[int, int]) -> None:
    assert torch_distributed.rank_and_size(environ) == expected


def test_port_differs_between_steps() -> None:
    ports = {torch_distributed.rank_zero_address({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(step)})[1]
             for step in range(20)}
    assert len(ports) > 15 and all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, "mpi"), ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpi"), ({"PMIX_RANK": "0"}, "mpi"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "torch"), ({"TORCHELASTIC_RUN_ID": "x", "PMI_RANK": "0"}, "torch"),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "torch")])
def test_offered_backend(environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_has_mpi", lambda: True)
    assert world._offered_backend(environ) == expected
    monkeypatch.setattr(world, "_has_mpi", lambda: False)
    assert world._offered_backend(environ) == "torch"


def test_unknown_backend_is_rejected() -> None:
    with pytest.raises(InvalidOptionsError, match=r"--backend 'nccl' is not one of auto, mpi, torch"):
        world.init_transport("nccl")


def test_shared_memory_needs_mpi() -> None:
    proc = torchrun(2, *TRAIN, "--strategy", "gossip", "--shared-memory")
    assert proc.returncode != 0
    [message] = slurmdl_lines(proc.stderr)
    assert "expected --backend mpi" in message


@pytest.mark.nightly  # also in test_preemption.py, over MPI
@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_run_resumes_from_the_checkpoint_of_a_signal(strategy: str, tmp_path: Path) -> None:
    """A signal at one rank stops all; the same command resumes, and ends with the model of an undisturbed run."""
    train = (*TRAIN, "--strategy", strategy, "--steps", "120", "--emulate-compute", "0.02:2000", "--log-every", "10",
             "--summary", str(tmp_path / "summary"))
    undisturbed = torchrun(2, *train)
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = json.loads((tmp_path / "summary").read_text())["parameters_crc32"]
    environ = {**os.environ, "SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": str(free_port()),
               "MASTER_ADDR": "localhost"}
    argv = [*preloaded(), *train, "--checkpoint-dir", str(tmp_path / "kept")]
    ranks = [subprocess.Popen(argv, env={**environ, "SLURM_PROCID": str(rank)}, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for rank in range(2)]
    assert ranks[0].stdout
    while "step 20 " not in ranks[0].stdout.readline():
        assert ranks[0].poll() is None
    time.sleep(0.1)
    ranks[1].send_signal(signal.SIGUSR1)
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [77, 77], outputs
    resumed = torchrun(2, *train, "--checkpoint-dir", str(tmp_path / "kept"))
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step" in resumed.stdout + resumed.stderr
    assert json.loads((tmp_path / "summary").read_text())["parameters_crc32"] == expected
