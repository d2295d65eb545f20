"""Preemption: stopped and killed runs over MPI resume with the result of an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi import mpirun, needs_mpi, python

from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train

#: timeout in seconds on a loaded machine
LONG = 600
NIGHTLY = pytest.mark.nightly
SCRIPT = (str(Path(__file__).with_name("library_programs.py")), "noisy")


def slurmdl_lines(text: str) -> list[str]:
    """Return the lines that slurmdl prints."""
    return [line for line in text.splitlines() if line.startswith("slurmdl:")]


def worker_lines(text: str) -> list[str]:
    """Return the sorted result lines of the workers."""
    return sorted(line for line in text.splitlines() if line.startswith("worker"))


@needs_mpi
@pytest.mark.parametrize("strategy", ["allreduce", *(pytest.param(name, marks=NIGHTLY)
                                                      for name in ("gossip", "local-sgd", "ps"))])
def test_signal_on_any_rank_stops_all_and_same_command_resumes(strategy: str, tmp_path: Path) -> None:
    """Bitwise: with dropout, random samples, a scheduler created after wrap(), within an epoch."""
    environ = {"SLURMDL_TRAIN_STRATEGY": strategy, "SLURMDL_TRAIN_CHECKPOINT_EVERY": "0"}
    ranks = 3 if strategy == "ps" else 2
    uninterrupted = mpirun(ranks, *SCRIPT, environ=environ, timeout=LONG)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    environ["SLURMDL_TRAIN_CHECKPOINT_DIR"] = str(tmp_path / "kept")
    stopped = mpirun(ranks, *SCRIPT, f"{ranks - 1}@7", "0@8", environ=environ, timeout=LONG)
    assert stopped.returncode == 77, stopped.stderr
    assert worker_lines(stopped.stdout) == []
    line, = slurmdl_lines(stopped.stderr)
    assert line.startswith("slurmdl: train: stopped on request: checkpoint of step "), line
    assert line.endswith(f"in {tmp_path / 'kept'}; the same command resumes from it"), line
    resumed = mpirun(ranks, *SCRIPT, environ=environ, timeout=LONG)
    assert resumed.returncode == 0, resumed.stderr
    assert worker_lines(resumed.stdout) == worker_lines(uninterrupted.stdout)
    assert len(worker_lines(resumed.stdout)) == 2


@needs_mpi
@pytest.mark.parametrize("arguments", [
    *(pytest.param(words, marks=NIGHTLY) for words in (
        ("--strategy", "gossip", "--async"),
        ("--strategy", "ps", "--async"), ("--strategy", "gossip", "--shared-memory"),
        ("--strategy", "gossip", "--shared-memory", "--async"),
        ("--strategy", "adaptive-gossip", "--comm-pattern", "base-2", "--compression", "int4")))],
    ids=lambda words: "".join(words[1:]).replace("--", "-"))
def test_trainer_stops_and_resumes(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """One rank is signaled while it computes or waits; the others wait for a straggler."""
    words = ("-m", "slurmdl.train", *arguments, "--steps", "80", "--model", "mlp:16", "--emulate-compute", "0.02",
             "--straggler", "1=2", "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "30",
             "--summary", str(tmp_path / "summary"))
    send_sigterm = f"[ $R = 2 ] && [ ! -e {tmp_path}/kept/step-00000030 ] && " \
                   f"(until ls {tmp_path}/kept/*/manifest.json; do sleep 0.05; done; kill -TERM $$) >/dev/null 2>&1 &"
    stopped = mpirun(3, *words, per_rank=send_sigterm, timeout=LONG)
    assert stopped.returncode == 77, stopped.stderr
    resumed = mpirun(3, *words, timeout=LONG)
    assert resumed.returncode == 0, resumed.stderr
    first, = slurmdl_lines(resumed.stderr)
    assert first.startswith("slurmdl: train: resumed after step "), first
    assert json.loads((tmp_path / "summary").read_text())["steps"] == 80
    assert len(list((tmp_path / "kept").glob("step-*/manifest.json"))) <= 2


@needs_mpi
def test_checkpoint_is_due_after_a_faster_rank_has_ended(tmp_path: Path) -> None:
    """The ranks do not wait for each other; the one that has ended must still reply."""
    proc = mpirun(2, "-m", "slurmdl.train", "--strategy", "gossip", "--shared-memory", "--async", "--steps", "4",
                  "--model", "mlp:16", "--emulate-compute", "0.02", "--straggler", "0=40",
                  "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "2")
    assert proc.returncode == 0, proc.stderr


def test_run_resumes_after_kill_at_any_moment(tmp_path: Path) -> None:
    """With a checkpoint in each step, most kills occur during a checkpoint."""
    words = ["--virtual-ranks", "2", "--strategy", "gossip", "--steps", "40", "--model", "mlp:64"]
    checkpointed = ["-m", "slurmdl.train", *words, "--checkpoint-dir", str(tmp_path / "kept"),
                    "--checkpoint-every", "1"]
    expected = train(parse_train_options(words, {}))  # without interruption
    assert expected
    draw = random.Random(5)
    steps = 0
    for _ in range(2):
        run = subprocess.Popen([sys.executable, *checkpointed], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True)
        target = steps + draw.randrange(3, 9)
        while not list((tmp_path / "kept").glob(f"step-{target:08d}")):
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.002)
        time.sleep(0.01 * draw.random())
        run.send_signal(signal.SIGKILL)
        stderr = run.communicate()[1]
        assert not steps or "resumed after step" in stderr
        steps = target
    proc = python(*checkpointed, "--summary", str(tmp_path / "summary"), timeout=LONG)
    assert proc.returncode == 0, proc.stderr
    resumed = json.loads((tmp_path / "summary").read_text())
    assert {name: expected[name] for name in ("parameters_crc32", "bytes_sent", "steps", "test_accuracy")} == {
        name: resumed[name] for name in ("parameters_crc32", "bytes_sent", "steps", "test_accuracy")}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_full_disk_keeps_older_checkpoints_and_training_continues(tmp_path: Path) -> None:
    """A checkpoint takes about 320 KB in this test, and the disk has space for two."""
    words = f"{sys.executable} -m slurmdl.train --virtual-ranks 2 --strategy gossip --model mlp:256 " \
            f"--checkpoint-every 10 --checkpoint-dir {tmp_path}/disk --steps"
    script = f"mkdir {tmp_path}/disk; mount -t tmpfs -o size=800k tmpfs {tmp_path}/disk || exit 99; {words} 40 " \
             f"&& ls {tmp_path}/disk && {words} 45"
    proc = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=LONG,
                          check=False)
    if proc.returncode == 99:
        pytest.skip(f"no mount: {proc.stderr}")
    assert proc.returncode == 0, proc.stderr
    messages = slurmdl_lines(proc.stderr)
    for line, step in zip(messages, (30, 40), strict=False):
        assert line.startswith(f"slurmdl: train: no checkpoint of step {step}: rank "), line
        assert line.endswith("No space left on device; the newest is of step 20"), line
    assert "resumed after step 20" in messages[2], messages
    assert [line for line in proc.stdout.splitlines() if line.startswith("step-")] == ["step-00000010",
                                                                                       "step-00000020"]
