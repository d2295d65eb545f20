"""Preempted, requeued and timed-out training jobs on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import SOON, read_log, wait_for_pattern, wait_until

#: job script; steps are faster after a restart, to shorten the test
JOB = """\
#SBATCH -N3 --ntasks-per-node=1 --requeue --open-mode=append -o log {more}
pace={pace}
[ "$SLURM_RESTART_COUNT" ] && pace=0.005
slurmdl srun python -m slurmdl.train --strategy {strategy} --steps 150 --emulate-compute $pace {keep} \\
    --summary summary
echo status $?
"""
KEEP = "--checkpoint-dir kept --checkpoint-every 10"


@pytest.fixture(scope="module")
def cluster(new_sandbox):
    """A cluster that restarts requeued jobs at once instead of after two minutes."""
    return new_sandbox(slurm_conf_lines=SOON)


def submit_training(cluster: Any, strategy: str, pace: float, keep: str = KEEP, more: str = "") -> tuple[int, Path]:
    """Submit a training job; return its job ID and its directory."""
    script = cluster.script(JOB.format(strategy=strategy, pace=pace, keep=keep, more=more))
    return cluster.sbatch(script, program="sbatch"), script.parent


def wait_for_checkpoint(folder: Path) -> None:
    wait_until(lambda: list(folder.glob("kept/*/manifest.json")), lambda: read_log(folder / "log"), 60)


def read_outcome(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary").read_text())
    return {name: summary[name] for name in ("parameters_crc32", "test_accuracy", "steps", "exchanges")}


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "ps"])
@pytest.mark.parametrize("method", ["signal", "requeue"])
def test_requeued_job_ends_as_uninterrupted_job(cluster, strategy, method):
    uninterrupted, reference_folder = submit_training(cluster, strategy, 0.005, keep="")
    cluster.output(uninterrupted, timeout=120)
    job, folder = submit_training(cluster, strategy, 0.1)
    wait_for_checkpoint(folder)
    argv = ["scancel", "--signal=USR1", str(job)] if method == "signal" else ["scontrol", "requeue", str(job)]
    assert cluster.run(argv).returncode == 0
    text = cluster.output(job, timeout=180)
    if method == "signal":  # after scontrol requeue, Slurm may kill the job before it prints a message
        assert "stopped on request: checkpoint of step" in text
        assert f"job {job} is requeued" in text
    assert text.count("resumed after step") == 1, text
    assert text.count("status 0") == 1, text
    assert "status 77" not in text
    assert read_outcome(folder) == read_outcome(reference_folder)


@pytest.mark.nightly
def test_time_limit_stops_and_requeues(cluster):
    """Slurm sends SIGTERM KillWait = 5 s before SIGKILL."""
    job, folder = submit_training(cluster, "allreduce", 0.8, more="--time=1")
    wait_for_pattern(folder / "log", "resumed after step", 240)
    record = cluster.wait(job, timeout=120)
    assert record["JobState"] == "COMPLETED", (folder / "log").read_text()
    assert read_outcome(folder)["steps"] == 150


def test_cancelled_job_writes_checkpoint_and_is_not_requeued(cluster):
    job, folder = submit_training(cluster, "gossip", 0.1, more="-N2")
    wait_for_checkpoint(folder)
    assert cluster.run(["scancel", str(job)]).returncode == 0
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    assert "is requeued" not in (folder / "log").read_text()
    assert list(folder.glob("kept/*/manifest.json"))


@pytest.mark.nightly
def test_job_without_requeue_exits_with_status_77(cluster):
    job, folder = submit_training(cluster, "gossip", 0.1, more="--no-requeue")
    wait_for_checkpoint(folder)
    assert cluster.run(["scancel", "--signal=TERM", str(job)]).returncode == 0
    text = cluster.output(job, timeout=60)
    assert f"job {job} is not requeued: requeueing is not permitted (sbatch --requeue)" in text
    assert "status 77" in text
