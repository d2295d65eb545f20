"""An island is lost in the middle of a run: the other one continues, with real ranks, messages and SIGKILL (ULFM).

Loss of the survivors, who keep half of the data, beside that of the undisturbed run, which has all ranks to its end
(control). Eight ranks share the machine's cores, so only the loss and the time without a step are compared.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.islands.disturbances import METHODS
from benchmarks.islands.virtual_training import RANKS, TRAINING
from benchmarks.open_mpi import ulfm_environ
from benchmarks.results import Row, make_row
from benchmarks.sandbox_mpi import ROOT
from slurmdl.errors import SlurmdlError

STEPS, KILL_STEP, LOG_EVERY, TIMEOUT_S = 128, 64, 8, 600.0
#: allreduce cannot continue without a rank
SURVIVING = tuple(method for method in METHODS if "allreduce" not in method)
#: place of rank $R, and its process ID in a file of directory $0
PER_RANK = ('R=$OMPI_COMM_WORLD_RANK; echo $$ > "$0/pid-$R"; export SLURMD_NODENAME=n$R '
            'SLURM_TOPOLOGY_ADDR=z$((R / 4)).n$R SLURM_TOPOLOGY_ADDR_PATTERN=switch.node; exec "$@"')


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield the loss with and without the failure, and the longest step after it."""
    seeds = range(seed, seed + (1 if quick else 5))
    for method in SURVIVING:
        whole, lost = ([train_ranks(METHODS[method], each, kill) for each in seeds] for kill in (False, True))
        losses = [run["test_loss"] for run in whole]
        yield make_row(f"{method}, no rank fails: test loss after {STEPS} steps (control)", losses, "nats")
        yield make_row(f"{method}, zone B is lost after {KILL_STEP} steps: test loss after {STEPS} steps",
                       [run["test_loss"] for run in lost], "nats", baseline=statistics.median(losses),
                       target="all survivors end", met=all(run["survivors"] == RANKS // 2 for run in lost))
        yield make_row(f"{method}, zone B is lost: longest step after it", [run["longest_s"] for run in lost], "s",
                       baseline=statistics.median(run["longest_s"] for run in whole))


def train_ranks(options: tuple[str, ...], seed: int, kill: bool) -> dict[str, Any]:
    """Train; with `kill` the ranks of the second zone are killed after KILL_STEP steps.

    Returns {"test_loss": of the survivors' averaged model, "longest_s": longest step after KILL_STEP, "survivors"}.
    Raises SlurmdlError if the others do not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics, summary = Path(folder, "metrics"), Path(folder, "summary")
        command = ["mpirun", "--with-ft", "ulfm", "--oversubscribe", "-n", str(RANKS), "sh", "-c", PER_RANK, folder,
                   sys.executable, "-m", "slurmdl.train", *options, *TRAINING, "--steps", str(STEPS), "--log-every",
                   str(LOG_EVERY), "--seed", str(seed), "--metrics", str(metrics), "--summary", str(summary)]
        with open(Path(folder, "stderr"), "w+", encoding="utf-8") as errors, subprocess.Popen(
                command, env={**os.environ, **ulfm_environ(), "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
                stderr=errors) as proc:
            try:
                if kill:
                    _wait_for_step(proc, metrics)
                    for rank in range(RANKS // 2, RANKS):
                        os.kill(int(Path(folder, f"pid-{rank}").read_text()), signal.SIGKILL)
                proc.wait(TIMEOUT_S)
            finally:
                proc.terminate()
            errors.seek(0)
            if not summary.exists():
                raise SlurmdlError(f"{' '.join(options)}: {' '.join(errors.read().split())[-300:]}")
        result = json.loads(summary.read_text())
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    lost = {entry["rank"] for entry in result["failed_ranks"]}
    return {"test_loss": result["test_loss"], "survivors": RANKS - len(lost),
            "longest_s": max(record["seconds"] for record in records if record["step"] > KILL_STEP)}


def _wait_for_step(proc: subprocess.Popen[bytes], metrics: Path) -> None:
    """Wait until the first rank has logged KILL_STEP steps; SlurmdlError if the run ends before."""
    deadline = time.monotonic() + TIMEOUT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < KILL_STEP:
        if proc.poll() is not None or time.monotonic() > deadline:
            raise SlurmdlError(f"no step {KILL_STEP} before the end of the run")
        time.sleep(0.1)
