"""Failures of a rank or node during training on a real Slurm, with each launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from jobs import SOON, read_log, trainer_nodes, wait_for_pattern

ROOT = Path(__file__).resolve().parents[2]
OPEN_MPI = ROOT / "build/openmpi"

needs_ulfm = pytest.mark.skipif(not (OPEN_MPI / "bin/mpirun").exists(),
                                reason=f"no Open MPI 5 in {OPEN_MPI} (make openmpi)")

#: job script with a rank per node; the steps are slow, so that a failure can be injected during the training
JOB = """\
#SBATCH -N{nodes} --ntasks-per-node=1 --no-kill --no-requeue
{variables}
slurmdl srun {launcher} python -m slurmdl.train --strategy {strategy} --emulate-compute 0.02:20000 --steps {steps} \\
    --log-every 10 --summary summary.json
echo "status $?"
"""
#: settings of Open MPI 5 from the wheel, which does not read the configuration of the sandbox
OPEN_MPI_5 = f"""\
export PATH={OPEN_MPI}/bin:$PATH MPI4PY_LIBMPI={OPEN_MPI}/lib/libmpi.so.40
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl_tcp_if_include=eth0 PRTE_MCA_prte_if_include=eth0"""
#: job script with checkpoints, from which a restarted job resumes
CHECKPOINT_JOB = """\
#SBATCH -N3 --ntasks-per-node=1 --no-kill --requeue --open-mode=append
{variables}
slurmdl srun {launcher} python -m slurmdl.train --strategy allreduce --emulate-compute 0.05:20000 --steps 80 \\
    --log-every 10 --checkpoint-dir kept --checkpoint-every 20 --summary summary.json
status=$?
echo "status $status"
{after}
"""
LAUNCHERS = {"srun": ("", ""), "mpirun 4": ("--step-starter=mpirun", ""),
             "mpirun 5": ("--step-starter=mpirun", OPEN_MPI_5)}
STEPS = 400


class Training:
    """A running training job."""

    def __init__(self, cluster, script: Path) -> None:
        self.cluster, self.folder = cluster, script.parent
        self.job = cluster.sbatch(script)
        self.output = self.folder / f"slurm-{self.job}.out"
        self.wait_for("step 10 of")
        #: node of each rank
        self.nodes = trainer_nodes(self.text())

    @classmethod
    def start(cls, cluster, launcher_name: str, strategy: str, nodes: int = 4) -> Training:
        launcher, variables = LAUNCHERS[launcher_name]
        text = JOB.format(nodes=nodes, launcher=launcher, variables=variables, strategy=strategy, steps=STEPS)
        return cls(cluster, cluster.script(text))

    def text(self) -> str:
        return read_log(self.output)

    def wait_for(self, text: str, seconds: float = 90) -> float:
        return wait_for_pattern(self.output, re.escape(text), seconds)

    def process(self, node: str) -> int:
        """Return the process ID of the trainer on a node, in the PID namespace of the test."""
        for entry in Path("/proc").iterdir():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                is_on_node = os.path.samefile(entry / "ns/pid", f"/proc/{self.cluster.sandbox.pids[node]}/ns/pid")
            except (OSError, NotADirectoryError):
                continue
            if is_on_node and b"slurmdl.train" in argv and b"python" in argv[0]:
                return int(entry.name)
        raise AssertionError(f"no trainer on {node}")

    def summary(self) -> dict | None:
        file = self.folder / "summary.json"
        return json.loads(file.read_text()) if file.exists() else None


@needs_ulfm
def test_gossip_continues_without_killed_rank(cluster_with):
    training = Training.start(cluster_with(nodes=3), "mpirun 5", "gossip", nodes=3)
    assert "if a rank fails: the others continue (ULFM)" in training.text()
    os.kill(training.process(training.nodes[2]), signal.SIGKILL)
    training.wait_for(f"slurmdl: train: ULFM: continues without rank 2 on {training.nodes[2]}, from step ", 20)
    training.cluster.wait(training.job)
    assert "status 0" in training.text()
    summary = training.summary()
    assert summary["steps"] == STEPS
    assert [(lost["rank"], lost["node"]) for lost in summary["failed_ranks"]] == [(2, training.nodes[2])]


@needs_ulfm
@pytest.mark.nightly
def test_rank_stopped_for_20_s_is_not_failed(new_sandbox):
    training = Training.start(new_sandbox(nodes=4), "mpirun 5", "gossip")
    process = training.process(training.nodes[2])
    os.kill(process, signal.SIGSTOP)
    time.sleep(20)
    os.kill(process, signal.SIGCONT)
    training.cluster.wait(training.job)
    assert "continues without" not in training.text()
    assert "status 0" in training.text()
    assert training.summary()["failed_ranks"] == []


@needs_ulfm
def test_allreduce_ends_all_ranks_at_once(cluster_with):
    training = Training.start(cluster_with(nodes=3), "mpirun 5", "allreduce", nodes=3)
    assert "if a rank fails: all ranks end (allreduce needs all ranks)" in training.text()
    os.kill(training.process(training.nodes[1]), signal.SIGKILL)
    training.wait_for("status 76", 20)
    messages = [line for line in training.text().splitlines() if "allreduce needs all ranks" in line]
    assert any(f"rank 1 on {training.nodes[1]} failed" in line for line in messages)
    assert training.summary() is None


@pytest.mark.parametrize("launcher_name", ["srun", pytest.param("mpirun 4", marks=pytest.mark.nightly)])
def test_killed_rank_without_ulfm_ends_all(cluster_with, launcher_name):
    training = Training.start(cluster_with(nodes=3), launcher_name, "gossip", nodes=2)
    assert "if a rank fails: all ranks end (no ULFM in Open MPI" in training.text()
    os.kill(training.process(training.nodes[1]), signal.SIGKILL)
    training.wait_for("status ", 30)
    assert "status 0" not in training.text()
    assert training.summary() is None


@pytest.mark.nightly
@pytest.mark.parametrize(("launcher_name", "nodes"), [
    ("srun", 3), pytest.param("mpirun 5", 4, marks=needs_ulfm), pytest.param("mpirun 5", 3, marks=needs_ulfm)])
def test_job_with_checkpoints_restarts_after_killed_rank(new_sandbox, launcher_name, nodes):
    """A surviving rank requeues the job without the node of the killed one, if enough other nodes are left.

    If Slurm kills all ranks, the script requeues the job.
    """
    cluster = new_sandbox(nodes=nodes, slurm_conf_lines=SOON)
    launcher, variables = LAUNCHERS[launcher_name]
    after = '[ "$status" = 0 ] || scontrol requeue "$SLURM_JOB_ID"' if launcher_name == "srun" else ""
    script = cluster.script(CHECKPOINT_JOB.format(launcher=launcher, variables=variables, after=after))
    training = Training(cluster, script)
    training.wait_for("step 40 of")
    os.kill(training.process(training.nodes[1]), signal.SIGKILL)
    training.wait_for("resumed after step ", 60)
    training.wait_for("status 0", 60)
    record = training.cluster.wait(training.job)
    text = training.text()
    assert record["ExcNodeList"] == (training.nodes[1] if nodes == 4 else "(null)")
    assert (f"may start on {training.nodes[1]} again" in text) == (launcher_name != "srun" and nodes == 3), text
    # the rank is killed during the checkpoint of step 40 or just after it
    assert int(text.partition("resumed after step ")[2].split()[0]) in (20, 40)
    assert ("since a checkpoint needs all ranks" in text) == (launcher_name != "srun"), text
    assert training.summary()["steps"] == 80


@pytest.mark.nightly
@pytest.mark.parametrize("launcher_name", ["srun", "mpirun 4", pytest.param("mpirun 5", marks=needs_ulfm)])
def test_failed_node_ends_all_ranks(new_sandbox, launcher_name):
    """Up to Open MPI 5.0 all daemons end if one fails, and mpirun exits with 0; srun ends its step."""
    training = Training.start(new_sandbox(nodes=4), launcher_name, "gossip")
    # not the node of the batch script
    host = training.cluster.job(training.job)["BatchHost"]
    training.cluster.power_off(next(node for node in training.nodes if node != host))
    training.wait_for("status ", 60)
    assert ("status 76" in training.text()) == (launcher_name == "mpirun 5")
    assert "status 0" not in training.text()
    assert training.summary() is None


@pytest.mark.nightly
def test_plain_srun_ends_all_ranks_only_with_kill_on_bad_exit(new_sandbox):
    """Slurm 22.05 does not end a step with --mpi=pmix after a killed rank; `slurmdl srun` sets --kill-on-bad-exit."""
    cluster = new_sandbox(nodes=2)
    program = "python -m slurmdl.train --strategy gossip --emulate-compute 0.02:20000 --steps 400 --log-every 10"
    for option, ends in (("", False), ("-K", True)):
        script = cluster.script(
            f"#SBATCH -N2 --ntasks-per-node=1\nsrun --mpi=pmix {option} {program}\necho status $?\n")
        training = Training(cluster, script)
        assert "srun ends them only with --kill-on-bad-exit" in training.text()
        os.kill(training.process(training.nodes[1]), signal.SIGKILL)
        training.wait_for("task 1: Killed", 20)
        time.sleep(8)
        assert ("status " in training.text()) == ends
        cluster.cancel_all()
