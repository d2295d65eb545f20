"""Ranks as processes, over MPI and torch.distributed: how scripts and the trainer end, and what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import free_port, mpirun, needs_mpi, preloaded, python, torchrun
from strategy_harness import global_batches

from slurmdl.plan import Plan, encode_plan
from slurmdl.train.library.sampling import GlobalBatches

DIRECTORY = Path(__file__).parent
SCRIPT = str(DIRECTORY / "library_programs.py")
TRAIN = ("-m", "slurmdl.train", "--steps", "30", "--model", "mlp:16", "--batch-size", "8")
NIGHTLY = pytest.mark.nightly
#: nodes of their own, on two leaves in turn, as in the environment of Slurm's tasks
ON_NODES = ("export SLURMD_NODENAME=n$R SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node "
            "SLURM_TOPOLOGY_ADDR=core.leaf$(echo AB | cut -c$((R % 2 + 1))).n$R")
ON_ONE_NODE = "export SLURMD_NODENAME=n"
PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10


def plan_of(strategy: str, *nodes: str) -> dict[str, str]:
    roles = ("ps" if strategy == "ps" else "worker", *["worker"] * (len(nodes) - 1))
    return {"SLURMDL_PLAN": encode_plan(Plan(strategy, nodes, roles, {}))}


def slurmdl_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("slurmdl:")]


@dataclass
class Case:
    """A program of library_programs.py, or with `-` the trainer, on some ranks.

    Attributes:
        starts: "mpi", "torch" or "both".
        status: exit status, None for any but 0. torchrun has 1 for all failures.
        messages: what the lines of slurmdl contain, in order, after `slurmdl: ` if they begin with it.
        output: of the workers' lines of a run that ends well, and how many there are.
    """

    starts: str
    ranks: int
    words: str
    status: int | None = 0
    messages: tuple[str, ...] = ()
    output: tuple[str, int] = ("worker", 2)
    environ: dict[str, str] = field(default_factory=dict)
    per_rank: str = ON_ONE_NODE
    nightly: bool = False


ENDED = "slurmdl: train: rank 1 on n: rank 0 continues, but this one has ended after 2 steps"
NOT_FINITE = "slurmdl: rank 1 on n: step 1: the gradient of weight has infinite or NaN entries"
TWICE = "slurmdl: wrap(): DistributedDataParallel averages the gradients of this model, too"
OPEN, SAME = "the script ended without run.finish()", "all workers train with the same samples"
PS = {"SLURMDL_TRAIN_STRATEGY": "ps", "SLURMDL_TRAIN_PS": "1"}
TEN_SECONDS = {"SLURMDL_TRAIN_TIMEOUT": "10"}  # longer than the ranks start apart on a busy machine
STALLED = ("slurmdl: train: rank 0 on n: waited ", )
CASES = [
    # a fault of one worker ends all ranks
    Case("torch", 2, "fault early", 76, (ENDED,)),
    Case("mpi", 2, "fault early", 76, (ENDED.replace("on n:", "on n1:"),), per_rank=ON_NODES),
    Case("mpi", 2, "fault exit", 76, (ENDED.replace("on n:", "on n1:"),), per_rank=ON_NODES, nightly=True),
    Case("torch", 2, "fault nan", 76, (NOT_FINITE,)), Case("mpi", 2, "fault nan", 76, (NOT_FINITE,), nightly=True),
    Case("both", 2, "fault model", 76, ("slurmdl: rank 1 on n has parameter weight (3, 4) float32 trained where rank "
         "0 has parameter weight (2, 4) float32 trained: all ranks need the same",), nightly=True),
    Case("mpi", 3, "fault early", 76, ("continues, but this one has ended after 2 steps",)),  # in shared memory
    Case("torch", 2, "fault ddp", 76, (f"{TWICE}; expected",)), Case("torch", 2, "fault ddp-late", 76, (TWICE,)),
    Case("torch", 2, "fault ddp-inside", 76, (TWICE,), nightly=True),
    Case("torch", 2, "fault metrics", 76, (
        "slurmdl: train: rank 1 on n: torch.distributed.all_reduce() waits for rank 0 on n, a parameter server, "
        "which does not run the script; expected run.all_gather_object()",), environ=PS),
    Case("torch", 2, "fault destroyed", None, (
        "destroy_process_group() was called before the end of the run; expected run.finish() first",)),
    # ends of a script
    Case("both", 2, "fault alone"), Case("torch", 2, "fault own-group"), Case("both", 3, "fault gather", environ=PS),
    Case("mpi", 2, "fault open", output=("worker", 0)),
    Case("torch", 2, "fault open", 0, (OPEN,), ("worker", 0), {"SLURMDL_TRAIN_STRATEGY": "gossip"}),
    Case("mpi", 2, "fault open", 0, (OPEN,), ("worker", 0), {"SLURMDL_TRAIN_STRATEGY": "gossip"}, nightly=True),
    # also in test_train_overflow.py, on virtual ranks
    *(Case("mpi", 3, "fault float16", output=("worker", 2 if strategy == "ps" else 3), nightly=True,
           environ={"SLURMDL_TRAIN_STRATEGY": strategy}) for strategy in ("allreduce", "gossip", "ps", "local-sgd")),
    Case("torch", 2, "fault destroy"), Case("torch", 3, "fault destroy", environ=PS),
    Case("mpi", 2, "two_runs finish", 0, (SAME, SAME), ("worker", 0)),
    Case("both", 2, "two_runs open", 0, (OPEN, SAME, OPEN, SAME), ("worker", 0)),
    Case("mpi", 2, "loaders", output=("equal", 2), environ={"SLURMDL_TRAIN_TIMEOUT": "60"}),
    Case("torch", 2, "loaders", output=("equal", 2), environ={"SLURMDL_TRAIN_TIMEOUT": "60"}, nightly=True),
    # passes and replicas; on virtual ranks in test_train_replicas.py
    Case("mpi", 2, "passes halves", output=("after 12 exchanges", 2), nightly=True),
    Case("mpi", 2, "passes checkpoints", output=("after 6 exchanges", 2), nightly=True),
    Case("mpi", 2, "passes unequal", 76, ("slurmdl: train: rank 1 on n1: step 2: rank 0 makes more backward passes "
         "before opt.step() than this rank; expected the same number on all ranks",), per_rank=ON_NODES),
    Case("mpi", 2, "passes differs", 76, ("slurmdl: step 4: parameter 1.bias is not the same on all ranks: rank 0 on "
         "n0 differs from rank 1 on n1; expected ",), per_rank=ON_NODES, nightly=True),
    # waits; the others wait for rank 1, in a ring also for each other
    *(Case(start, 3, f"stall {kind} 40", 76, STALLED, environ={**TEN_SECONDS, "SLURMDL_TRAIN_STRATEGY": strategy},
           nightly=late) for start, kind, strategy, late in (
        ("mpi", "stop", "ps", False), ("torch", "sleep", "allreduce", False), ("torch", "sleep", "ps", True),
        ("torch", "sleep", "local-sgd", True), ("torch", "stop", "gossip", True), ("mpi", "sleep", "allreduce", True),
        ("mpi", "sleep", "gossip", True), ("mpi", "sleep", "local-sgd", True))),
    Case("both", 3, "stall call", 76, (", and all ranks wait for each other; expected the same calls on all ranks "
         "(--timeout 10)",), environ=TEN_SECONDS, nightly=True),
    Case("torch", 3, "stall late", output=("done", 3), environ={"SLURMDL_TRAIN_TIMEOUT": "20"}),
    Case("mpi", 3, "stall late", output=("done", 3), environ={"SLURMDL_TRAIN_TIMEOUT": "20"}, nightly=True),
    Case("torch", 3, "stall late", output=("done", 3), environ={"SLURMDL_TRAIN_TIMEOUT": "0"}, nightly=True),
    # only the watchdog limits waits, not the process groups, whose limits are shorter here
    *(Case("torch", 2, f"long_run {kind}", environ={"SLURMDL_TRAIN_TIMEOUT": "100"})
      for kind in ("library", "outer")),
    # errors of the trainer on all ranks, and of one
    Case("mpi", 2, "- --strategy gosip", 64, (
        "invalid value 'gosip'; expected gossip, adaptive-gossip, allreduce, ps, local-sgd",)),
    Case("mpi", 2, "- --strategy ps --ps 2", 64, ("2 parameter servers in 2 ranks",)),
    Case("mpi", 2, "- --strategy gossip --comm-pattern ring", 64, ("strategy gossip has random-matching, one-peer",),
         nightly=True),
    Case("mpi", 2, "- --batch-size 800", 64, ("only 718 samples",), nightly=True),
    Case("mpi", 2, "-", 64, ("rank 1 has --lr 0.2 but rank 0 has 0.1",), per_rank='set -- "$@" --lr 0.$((R + 1))'),
    Case("torch", 2, "- --strategy gossip --shared-memory", 64, ("expected --backend mpi",)),
    Case("mpi", 2, "- --metrics /nowhere/metrics", 76, ("rank 0 on n: /nowhere/metrics: No such file or directory",)),
    *(Case("mpi", 2, f"- --summary {path}", 76, (f"rank 0 on n: --summary {path}: cannot be written ({reason}",),
           nightly=True) for path, reason in (("/nowhere/summary", "No such file"), ("/etc", "Is a directory)"))),
    Case("mpi", 2, "- --lr 1e30 --steps 1000", 76, ("has infinite or NaN entries; expected finite ones",),
         nightly=True),
    *(Case("mpi", 2, "- --steps 2", 0, (reason,), ("0 n0 (leafA worker), 1 n1 (leafB worker)", 1), environ, ON_NODES,
           nightly=True) for environ, reason in (
        (plan_of("ps", "n0", "n9"), "rank 1 runs on n1, planned n9"),
        ({"SLURMDL_PLAN": "nonsense"}, "SLURMDL_PLAN is not a plan"))),
    *(Case("torch", 3, f"- --steps 300 {words}", output=("test accuracy", 1), nightly=late) for words, late in (
        ("--strategy gossip --async", False), ("--strategy ps --async", True),
        ("--strategy gossip --async --load-balance", True)))]


def each_start(cases: list[Case]) -> list[Any]:
    return [pytest.param({"mpi": mpirun, "torch": torchrun}[start], case, id=f"{start}-{case.words}", marks=[
        *[needs_mpi] * (start == "mpi"), *[NIGHTLY] * case.nightly])
        for case in cases for start in (("mpi", "torch") if case.starts == "both" else (case.starts,))]


@pytest.mark.parametrize(("start", "case"), each_start(CASES))
def test_end_and_messages(start: Callable[..., Any], case: Case) -> None:
    program, *words = case.words.split()
    proc = start(case.ranks, *((*TRAIN, *words) if program == "-" else (SCRIPT, program, *words)),
                 environ=case.environ, per_rank=case.per_rank, timeout=100)
    if case.status and start is mpirun:
        assert proc.returncode == case.status
    assert bool(proc.returncode) == (case.status != 0), proc.stderr
    lines = slurmdl_lines(proc.stderr)
    assert len(lines) == len(case.messages), proc.stderr
    for line, message in zip(lines, case.messages, strict=True):
        assert line.startswith(message) if message.startswith("slurmdl:") else message in line, line
    assert "Traceback" not in proc.stderr and "outside run.wrap()" not in proc.stderr
    if case.status != 0:
        assert "worker:" not in proc.stdout and "worker 0" not in proc.stdout
        assert case.messages != STALLED or lines[0].endswith(
            " for rank 1 on n, which is stopped, or does not wait for other ranks (--timeout 10)")
        return
    word, count = case.output
    assert proc.stdout.count(word) == count, proc.stdout
    models = {line.partition(": ")[2] for line in proc.stdout.splitlines() if line.startswith("worker")}
    assert len(models) == bool(count and program != "-"), "one model on all workers"
    if program in ("fault", "two_runs"):
        assert proc.stderr.count("consensus") == (2 if program == "two_runs" else 1), "the summary of each run"
    if word == "test accuracy":
        assert float(proc.stdout.partition(word)[2].split()[0].rstrip("%")) > 80


def test_process_group_of_spawned_processes_is_used() -> None:
    """Without a launcher's variables, each would be a world of one rank over MPI."""
    proc = python(SCRIPT, "spawn", str(free_port()))
    assert proc.stdout.splitlines() == ["worker: one of 2"] * 2, proc.stderr


@needs_mpi
@pytest.mark.parametrize("strategy", ["gossip", *(pytest.param(name, marks=NIGHTLY) for name in ("ps", "allreduce"))])
def test_strategy_is_set_by_environment(strategy: str, tmp_path: Path) -> None:
    """All workers end with the same model; a server exits in wrap() with status 0.

    The ranks of MPI are accepted in spite of torch's variables.
    """
    ranks, steps = 3 if strategy == "ps" else 2, 10
    proc = mpirun(ranks, SCRIPT, "fault", "none", per_rank="export RANK=$R", environ={
        "SLURMDL_TRAIN_STRATEGY": strategy, "WORLD_SIZE": str(ranks), "SLURMDL_TRAIN_TRACE_DIR": str(tmp_path),
        "SLURMDL_TRAIN_COMM_PATTERN": "hierarchical" if strategy == "allreduce" else ""})
    assert proc.returncode == 0, proc.stderr
    workers = [line for line in proc.stdout.splitlines() if line.startswith("worker")]
    assert len(workers) == 2 and len({line.split(":")[1] for line in workers}) == 1
    assert f"{steps} steps" in workers[0]
    assert f"strategy {strategy}" in " ".join(proc.stderr.split())
    for rank in range(ranks):
        events = json.loads((tmp_path / f"rank-{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        names = [event["name"] for event in events if event["ph"] == "X"]
        assert names.count("backward") == (0 if strategy == "ps" and rank == 0 else steps)
        assert "comm op" in names


@needs_mpi
def test_overlapped_reduction_equals_one_process() -> None:
    """With several buckets, starting from rank 0's model."""
    proc = mpirun(2, SCRIPT, "fault", "buckets")
    assert proc.returncode == 0, proc.stderr
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(40, 4) * torch.arange(40)[:, None] / 40
    for index in global_batches(GlobalBatches(40, 2, 2, True, 1), 0):
        opt.zero_grad()
        model(data[index]).square().mean().backward()
        opt.step()
    workers = [line for line in proc.stdout.splitlines() if line.startswith("worker")]
    assert len(workers) == 2
    for line in workers:
        assert json.loads(line.partition("steps, ")[2]) == pytest.approx(
            model.weight.detach().flatten().tolist(), abs=1e-6)


@needs_mpi
@pytest.mark.parametrize("launcher, environ, culprit", [
    (["-m", "torch.distributed.run", "--nproc-per-node=2"], {}, "torchrun started 2 processes"),
    ([], {"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
    # inherited from an MPI launcher that started torchrun: MPI would treat both processes as the same rank
    ([], {"PMI_RANK": "0", "PMI_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
          "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
    pytest.param(["-m", "torch.distributed.run", "--nproc-per-node=2"], {"PMI_RANK": "0", "PMI_SIZE": "1"},
                 "torchrun", marks=NIGHTLY)])
def test_mpi_needs_an_mpi_launcher(launcher: list[str], environ: dict[str, str], culprit: str) -> None:
    proc = python(*launcher, SCRIPT, "fault", "none", environ={"SLURMDL_TRAIN_BACKEND": "mpi", **environ})
    assert proc.returncode != 0
    [message] = slurmdl_lines(proc.stderr)
    assert message.startswith(f"slurmdl: {culprit}") and "--backend torch" in message
    assert "`srun --mpi=pmix python SCRIPT` or `mpirun -n " in message
    assert "worker" not in proc.stdout


@needs_mpi
@pytest.mark.parametrize(("strategy", "ranks"), [("allreduce", 2), pytest.param("ps", 3, marks=NIGHTLY)])
def test_uncaught_exception_ends_all_ranks(strategy: str, ranks: int) -> None:
    proc = mpirun(ranks, SCRIPT, "fault", "exception", environ={"SLURMDL_TRAIN_STRATEGY": strategy})
    assert proc.returncode == 1
    assert "KeyError: \"of the user's own\"" in proc.stderr
    assert proc.stderr.count("Traceback") == 1


@needs_mpi
@NIGHTLY  # also in tests/cluster/test_user_scripts.py, in a job
def test_example_learns() -> None:
    proc = mpirun(2, str(DIRECTORY.parents[1] / "examples" / "wrap_script.py"))
    assert proc.returncode == 0, proc.stderr
    assert float(proc.stdout.split()[-1].rstrip("%")) > 88
    assert "seconds/step" in proc.stderr


def test_import_of_library_loads_neither_torch_nor_mpi() -> None:
    proc = python("-c", "import sys, slurmdl.train; print('numpy' in sys.modules); slurmdl.train.init; "
                        "print('torch' in sys.modules, 'mpi4py' in sys.modules)", loaded=False)
    assert proc.stdout.split() == ["False"] * 3, proc.stderr


@needs_mpi
@pytest.mark.parametrize("options", [
    "--strategy allreduce", *(pytest.param(words, marks=NIGHTLY) for words in (
        "--strategy ps --ps 2", "--strategy adaptive-gossip --comm-budget 10% --compression int8",
        "--strategy allreduce --compression fp16", "--strategy gossip",
        "--strategy gossip --comm-pattern one-peer-exponential",
        "--strategy local-sgd --period 8 --compression int4", "--strategy allreduce --load-balance"))])
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


@NIGHTLY
@pytest.mark.parametrize("start", [pytest.param(mpirun, marks=needs_mpi), torchrun])
def test_waiting_for_a_slow_rank_is_no_communication(start: Callable[..., Any], tmp_path: Path) -> None:
    """Rank 1 computes five times as long as rank 0."""
    proc = start(2, *TRAIN, "--strategy", "allreduce", "--emulate-compute", "0.02", "--straggler", "1=5",
                 "--summary", str(tmp_path / "summary"))
    assert proc.returncode == 0, proc.stderr
    phases = json.loads((tmp_path / "summary").read_text())["phases"]
    assert phases["peer_wait"] > phases["communication"], phases


def start_tasks(size: int, *words: str) -> list[subprocess.Popen[str]]:
    """Tasks of srun --mpi=none on this host."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environ = clean | {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
                       "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    return [subprocess.Popen([*preloaded(), *TRAIN, *words], env={**environ, "SLURM_PROCID": str(rank)}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(size)]


def read_until(rank: subprocess.Popen[str], words: str) -> None:
    assert rank.stdout
    while words not in rank.stdout.readline():
        assert rank.poll() is None


def test_tasks_of_srun_find_each_other_without_mpi() -> None:
    first, other = start_tasks(2)
    output, errors = first.communicate(timeout=60)
    other.communicate(timeout=60)
    assert first.returncode == other.returncode == 0, errors
    assert "ranks: 0 " in output and ", 1 " in output


@pytest.mark.parametrize(("options", "size", "logging_rank"), [("allreduce", 2, 0), ("ps --async", 3, 1)])
def test_killed_rank_ends_the_others(options: str, size: int, logging_rank: int) -> None:
    """Without a launcher that ends them: each says which rank is lost.

    It is probably killed during its computation. An asynchronous server then waits for a message of any worker, and
    the other worker for the server.
    """
    ranks = start_tasks(size, "--strategy", *options.split(), "--steps", "100000", "--emulate-compute", "0.2",
                        "--log-every", "5")
    read_until(ranks[logging_rank], "step 5")
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
    read_until(launcher, "step 20 ")
    launcher.send_signal(signal.SIGUSR1)
    output, errors = launcher.communicate(timeout=60)  # until the ranks have closed the pipes, too
    assert launcher.returncode == -signal.SIGUSR1
    assert "test accuracy" not in output
    assert len(list(folder.glob("*/manifest.json"))) == has_checkpoints
    assert ("stopped on request: checkpoint of step" in errors) == has_checkpoints


@NIGHTLY  # also in test_preemption.py, over MPI
@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_run_resumes_from_the_checkpoint_of_a_signal(strategy: str, tmp_path: Path) -> None:
    """A signal at one rank stops all; the same command resumes, and ends with the model of an undisturbed run."""
    words = ("--strategy", strategy, "--steps", "120", "--emulate-compute", "0.02:2000", "--log-every", "10",
             "--summary", str(tmp_path / "summary"))
    undisturbed = torchrun(2, *TRAIN, *words)
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = json.loads((tmp_path / "summary").read_text())["parameters_crc32"]
    ranks = start_tasks(2, *words, "--checkpoint-dir", str(tmp_path / "kept"))
    read_until(ranks[0], "step 20 ")
    ranks[1].send_signal(signal.SIGUSR1)
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [77, 77], outputs
    resumed = torchrun(2, *TRAIN, *words, "--checkpoint-dir", str(tmp_path / "kept"))
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step" in resumed.stdout + resumed.stderr
    assert json.loads((tmp_path / "summary").read_text())["parameters_crc32"] == expected


@needs_mpi
@pytest.mark.parametrize("strategy", ["allreduce", *(pytest.param(name, marks=NIGHTLY) for name in ("gossip", "ps"))])
def test_training_on_digits(strategy: str, tmp_path: Path) -> None:
    ranks, steps = (3, 40) if strategy == "allreduce" else (4, 80)
    default = strategy == "allreduce"  # with a plan for other nodes, which is ignored
    words, environ = ((), plan_of("ps", "n0", "n9", "n2")) if default else (("--strategy", strategy), {})
    proc = mpirun(ranks, *TRAIN[:2], *words, "--steps", str(steps), "--model", "mlp:64", "--log-every", "20",
                  "--metrics", str(tmp_path / "metrics"), "--summary", str(tmp_path / "summary"), per_rank=ON_NODES,
                  environ=environ)
    assert proc.returncode == 0, proc.stderr
    assert ["rank 1 runs on n1, planned n9" in line for line in slurmdl_lines(proc.stderr)] == [True] * default
    summary = json.loads((tmp_path / "summary").read_text())
    first = "ps" if strategy == "ps" else "worker"
    places = [f"0 n0 (leafA {first})", "1 n1 (leafB worker)", "2 n2 (leafA worker)", "3 n3 (leafB worker)"][:ranks]
    assert proc.stdout.splitlines()[0] == f"ranks: {', '.join(places)}"
    assert f"step {steps} of {steps}: loss" in proc.stdout
    assert summary["test_accuracy"] >= 0.9
    assert [summary[name] for name in ("strategy", "num_nodes", "num_zones", "steps", "parameters")] == [
        strategy, ranks, 2, steps, PARAMETERS]
    assert summary["rank_map"][1] == {"rank": 1, "node": "n1", "zone": "leafB", "role": "worker"}

    sent, vector = summary["bytes_sent"], 4 * PARAMETERS
    assert sent["intra_node"] == 0
    if strategy == "allreduce":
        # the two ranks of a zone exchange halves twice within the zone, and once with the other zone
        assert (sent["intra_zone"], sent["inter_zone"]) == (2 * vector * steps, 2 * vector * steps)
        assert summary["consensus_distance"] == 0
    if strategy == "gossip":  # the final average passes the ring once
        assert sent["intra_zone"] + sent["inter_zone"] == 4 * vector * steps + 6 * vector
        assert 0 < sent["intra_zone"] < sent["inter_zone"]
        assert 0 < summary["consensus_distance"] < 1
        assert summary["spectral_gap"] == pytest.approx(1 - 3 ** -0.5)
        assert "spectral gap 0.423" in " ".join(proc.stdout.split())
    if strategy == "ps":  # one of three workers shares the server's leaf
        pushed_and_pulled = (2 * vector * steps, 4 * vector * steps)
        assert (sent["intra_zone"], sent["inter_zone"]) > pushed_and_pulled  # plus message headers
        assert (sent["intra_zone"], sent["inter_zone"]) == pytest.approx(pushed_and_pulled, rel=2e-3)

    records = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert records[-1]["loss"] < records[0]["loss"]
    for record in records:
        assert record["compute_seconds"] > 0
        assert record["compute_seconds"] + record["exposed_comm_seconds"] == pytest.approx(record["seconds"])


@needs_mpi
@pytest.mark.parametrize(("plan", "steps", "facts"), [
    # a parameter server that is not the first rank, and one of two workers in its zone
    (Plan("ps", ("n0", "n1", "n2"), ("worker", "ps", "worker"), {
        f"n{i}": ("top", "left" if i < 2 else "right") for i in range(3)}), 40, {"strategy": "ps", "num_servers": 1}),
    # also in tests/cluster/test_train.py, with real counters. The zones differ in size: 2 N (Z - 1) cross them in
    # each step, with a flat ring 2 N (Z - 1) 3 / 2
    pytest.param(Plan("allreduce", ("n0", "n1", "n2", "n3"), ("worker",) * 4, {
        f"n{i}": ("top", "left" if i < 3 else "right") for i in range(4)}, comm_pattern="hierarchical"), 3,
        {"strategy": "allreduce", "comm_pattern": "hierarchical", "consensus_distance": 0}, marks=NIGHTLY)])
def test_plan_sets_strategy_roles_and_zones(plan: Plan, steps: int, facts: dict[str, Any], tmp_path: Path) -> None:
    ranks = len(plan.nodes)
    proc = mpirun(ranks, *TRAIN[:2], "--steps", str(steps), "--model", "mlp:64", "--summary",
                  str(tmp_path / "summary"), environ={"SLURMDL_PLAN": encode_plan(plan)}, per_rank=ON_NODES)
    assert proc.returncode == 0, proc.stderr
    assert proc.stdout.splitlines()[0] == "ranks: " + ", ".join(
        f"{rank} {node} ({plan.zones[node][1]} {role})" for rank, (node, role) in enumerate(
            zip(plan.nodes, plan.roles, strict=True)))
    assert slurmdl_lines(proc.stderr) == [f"slurmdl: {ranks} of {ranks} ranks on their planned nodes"]
    summary = json.loads((tmp_path / "summary").read_text())
    assert {**summary, **facts} == summary and summary["num_zones"] == 2
    sent, vectors = summary["bytes_sent"], 4 * PARAMETERS * steps
    if plan.strategy == "ps":  # plus message headers
        assert summary["test_accuracy"] >= 0.9 and sent["intra_node"] == 0
        assert all(2 * vectors < sent[level] < 2.004 * vectors for level in ("intra_zone", "inter_zone"))
    else:
        assert sent == {"intra_node": 0, "intra_zone": 4 * vectors, "inter_zone": 2 * vectors}
        assert "allreduce, hierarchical" in proc.stdout


@needs_mpi
def test_single_mpi_rank_in_several_slurm_tasks_is_rejected() -> None:
    mpi = (*TRAIN, "--backend", "mpi")
    proc = python(*mpi, environ={"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})
    assert proc.returncode == 76
    hint, refusal = slurmdl_lines(proc.stderr)
    assert "4 tasks without PMIx" in hint
    assert "MPI has 1 rank where Slurm has 4 tasks" in refusal and "--mpi=pmix" in refusal
    quiet = python(*mpi, environ={"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"})
    assert (quiet.returncode, quiet.stderr) == (76, "")


@needs_mpi
@pytest.mark.parametrize("environ, word", [({}, "sent"), ({"OMPI_MCA_btl_tcp_eager_limit": "65536"}, "waits")])
def test_open_mpi_sends_chunks_eagerly_over_tcp(environ: dict[str, str], word: str) -> None:
    proc = mpirun(2, "-c", """
import time
import numpy as np
from slurmdl.train.transports.transport import CHUNK_BYTES
from slurmdl.train.world import init_mpi
transport, chunk, word = init_mpi(), np.ones(CHUNK_BYTES, np.uint8), np.zeros(1, np.uint8)
if transport.rank == 0:
    request, end = transport.isend(1, chunk, 1), time.monotonic() + 3
    while not (sent := transport.testall([request])) and time.monotonic() < end:
        time.sleep(0.001)
    print("sent" if sent else "waits")
    transport.waitall([request, transport.isend(1, word, 2)])
else:
    transport.waitall([transport.irecv(0, word, 2)])
    transport.waitall([transport.irecv(0, chunk, 1)])
""", environ=environ)
    assert (proc.returncode, proc.stdout) == (0, word + "\n"), proc.stderr


@needs_mpi
def test_single_rank_trains() -> None:
    proc = python(*TRAIN)
    assert proc.returncode == 0, proc.stderr
    assert "accuracy" in proc.stdout


@needs_mpi
def test_different_data_are_rejected(tmp_path: Path) -> None:
    """The second rank's scikit-learn has other digits."""
    folder = tmp_path / "sklearn" / "datasets" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    table = np.random.default_rng(1).integers(0, 10, (1797, 65))
    np.savetxt(folder / "digits.csv.gz", table, delimiter=",", fmt="%d")
    proc = mpirun(2, *TRAIN, per_rank=f"{ON_NODES}; if [ $R = 1 ]; then export PYTHONPATH={tmp_path}; fi")
    assert proc.returncode == 76
    [line] = slurmdl_lines(proc.stderr)
    start, middle, end = line.split("data digits ")
    assert start == "slurmdl: rank 1 on n1 has " and middle.endswith(" where rank 0 has ")
    assert end.endswith(": all ranks need the same model, optimizer and data")
