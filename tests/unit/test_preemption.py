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

#: timeout in seconds on a loaded machine
LONG = 600
NIGHTLY = pytest.mark.nightly
SCRIPT = str(Path(__file__).with_name("checkpoint_script.py"))


def told(text: str) -> list[str]:
    """Lines of slurmdl itself."""
    return [line for line in text.splitlines() if line.startswith("slurmdl:")]


def ended(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("worker"))


@needs_mpi
@pytest.mark.parametrize("strategy", ["allreduce", "ps", *(pytest.param(name, marks=NIGHTLY)
                                                            for name in ("gossip", "local-sgd"))])
def test_signal_on_any_rank_stops_all_and_same_command_resumes(strategy: str, tmp_path: Path) -> None:
    """Bitwise: with dropout, random samples, a scheduler created after wrap(), within an epoch."""
    environ = {"SLURMDL_TRAIN_STRATEGY": strategy, "SLURMDL_TRAIN_CHECKPOINT_EVERY": "0"}
    unbroken = mpirun(3, SCRIPT, environ=environ, timeout=LONG)
    assert unbroken.returncode == 0, unbroken.stderr
    environ["SLURMDL_TRAIN_CHECKPOINT_DIR"] = str(tmp_path / "kept")
    stopped = mpirun(3, SCRIPT, "2@7", "0@8", environ=environ, timeout=LONG)
    assert stopped.returncode == 77, stopped.stderr
    assert ended(stopped.stdout) == []
    line, = told(stopped.stderr)
    assert line.startswith("slurmdl: train: stopped on request: checkpoint of step "), line
    assert line.endswith(f"in {tmp_path / 'kept'}; the same command resumes from it"), line
    resumed = mpirun(3, SCRIPT, environ=environ, timeout=LONG)
    assert resumed.returncode == 0, resumed.stderr
    assert ended(resumed.stdout) == ended(unbroken.stdout)
    assert len(ended(resumed.stdout)) == (2 if strategy == "ps" else 3)


@needs_mpi
@pytest.mark.parametrize("arguments", [
    ("--strategy", "gossip", "--async"),
    *(pytest.param(words, marks=NIGHTLY) for words in (
        ("--strategy", "ps", "--async"), ("--strategy", "gossip", "--shared-memory"),
        ("--strategy", "ps", "--max-staleness", "2"), ("--strategy", "gossip", "--shared-memory", "--async"),
        ("--strategy", "adaptive-gossip", "--comm-pattern", "base-2", "--compression", "int4", "--trigger-warmup",
         "5")))],
    ids=lambda words: "".join(words[1:]).replace("--", "-"))
def test_trainer_stops_and_resumes(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """One rank is signaled while it computes or waits; the others wait for a straggler."""
    words = ("-m", "slurmdl.train", *arguments, "--steps", "80", "--model", "mlp:16", "--emulate-compute", "0.02",
             "--straggler", "1=2", "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "30",
             "--summary", str(tmp_path / "summary"))
    once = f"[ $R = 2 ] && [ ! -e {tmp_path}/kept/step-00000030 ] && (until ls {tmp_path}/kept/*/manifest.json; " \
           "do sleep 0.05; done; kill -TERM $$) >/dev/null 2>&1 &"
    stopped = mpirun(3, *words, per_rank=once, timeout=LONG)
    assert stopped.returncode == 77, stopped.stderr
    resumed = mpirun(3, *words, timeout=LONG)
    assert resumed.returncode == 0, resumed.stderr
    first, = told(resumed.stderr)
    assert first.startswith("slurmdl: train: resumed after step "), first
    assert json.loads((tmp_path / "summary").read_text())["steps"] == 80
    assert len(list((tmp_path / "kept").glob("step-*/manifest.json"))) <= 2


def test_run_resumes_after_kill_at_any_moment(tmp_path: Path) -> None:
    """With a checkpoint in each step, most kills occur within one."""
    words = ["-m", "slurmdl.train", "--virtual-ranks", "2", "--strategy", "gossip", "--steps", "60", "--model",
             "mlp:64"]
    keeps = [*words, "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "1"]
    unbroken = python(*words, "--summary", str(tmp_path / "unbroken"), timeout=LONG)
    assert unbroken.returncode == 0, unbroken.stderr
    draw = random.Random(5)
    steps = 0
    for _ in range(3):
        run = subprocess.Popen([sys.executable, *keeps], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True)
        wanted = steps + draw.randrange(3, 9)
        while not list((tmp_path / "kept").glob(f"step-{wanted:08d}")):
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.002)
        time.sleep(0.01 * draw.random())
        run.send_signal(signal.SIGKILL)
        said = run.communicate()[1]
        assert not steps or "resumed after step" in said
        steps = wanted
    done = python(*keeps, "--summary", str(tmp_path / "summary"), timeout=LONG)
    assert done.returncode == 0, done.stderr
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("unbroken", "summary"))
    assert {name: one[name] for name in ("parameters_crc32", "bytes_sent", "steps", "test_accuracy")} == {
        name: other[name] for name in ("parameters_crc32", "bytes_sent", "steps", "test_accuracy")}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_full_disk_keeps_older_checkpoints_and_training_continues(tmp_path: Path) -> None:
    """A checkpoint takes some 320 KB here, and the disk holds two."""
    words = f"{sys.executable} -m slurmdl.train --virtual-ranks 2 --strategy gossip --model mlp:256 " \
            f"--checkpoint-every 10 --checkpoint-dir {tmp_path}/disk --steps"
    script = f"mkdir {tmp_path}/disk; mount -t tmpfs -o size=800k tmpfs {tmp_path}/disk || exit 99; {words} 40 " \
             f"&& ls {tmp_path}/disk && {words} 45"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=LONG,
                          check=False)
    if done.returncode == 99:
        pytest.skip(f"no mount: {done.stderr}")
    assert done.returncode == 0, done.stderr
    said = told(done.stderr)
    for line, step in zip(said, (30, 40), strict=False):
        assert line.startswith(f"slurmdl: train: no checkpoint of step {step}: rank "), line
        assert line.endswith("No space left on device; the newest is of step 20"), line
    assert "resumed after step 20" in said[2], said
    assert [line for line in done.stdout.splitlines() if line.startswith("step-")] == ["step-00000010",
                                                                                       "step-00000020"]
