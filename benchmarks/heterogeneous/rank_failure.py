"""Recovery time after a rank is killed: real ranks, messages and SIGKILL, with Open MPI 5's ULFM.

The metric is the longest time between two good steps of a rank after the kill. It includes failure detection, the
agreement of the surviving ranks, the average of their models, and the step itself. A good step ends with an exchange.
Computation is emulated by sleep, so that ranks can outnumber cores. The negative control is a rank that is stopped
instead of killed: no rank may treat it as failed, so all wait for it.

Strategies that cannot continue without a rank restart the job from a checkpoint. This is measured with jobs on a
sandbox, from the kill to the end of the first step after the restart. Slurm's own delay of a requeued job is shown
next to it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import cloud_nodes
from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs, wait
from benchmarks.open_mpi import ulfm_environ
from benchmarks.results import Row, make_row
from benchmarks.sandbox_mpi import ROOT
from slurmdl.errors import SandboxError, SlurmdlError
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

#: ranks, parameters, emulated computation of a step in seconds, steps, and the step before the kill
RANKS, PARAMETERS, COMPUTE_S, STEPS, KILL_STEP = 6, 1_000_000, 0.02, 160, 120
REPEATS, MAX_GAP_S = 5, 1.0
#: requeued jobs, steps between checkpoints, Slurm's delay of a requeued job and the time limit of a job in seconds
REQUEUES, CHECKPOINT_EVERY, REQUEUE_DELAY_S, JOB_TIMEOUT_S = 3, 20, 5, 120.0
#: seconds for which the control's rank is stopped
PAUSE_S = 2.0
#: case -> configuration, and the killed rank; servers are the first ranks
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "gossip": ({"strategy": "gossip", "comm_pattern": "one-peer-exponential"}, 1),
    "gossip in int8": ({"strategy": "gossip", "comm_pattern": "one-peer-exponential", "compression": "int8"}, 1),
    "gossip in shared memory": ({"strategy": "gossip", "shared_memory": True}, 1),
    "asynchronous gossip": ({"strategy": "gossip", "asynchronous": True}, 1),
    "PS, a worker": ({"strategy": "ps", "ps": 2}, 3),
    "PS, a server": ({"strategy": "ps", "ps": 2}, 0)}


def rows(seed: int) -> Iterator[Row]:
    """Yield the seconds without a good step after a rank is killed, for each case, and after it is stopped."""
    for name, (method, rank) in CASES.items():
        measured = [measure_gap(method, rank, seed + repeat, kill=True) for repeat in range(REPEATS)]
        gaps = [gap for gap, _, _ in measured]
        yield make_row(f"{name}: longest time between good steps after a rank is killed", gaps, "s",
                       baseline=statistics.median(before for _, before, _ in measured),
                       target=f"below {MAX_GAP_S:g}", met=max(gaps) < MAX_GAP_S)
        yield make_row(f"{name}: lost exchanges of a rank", [float(lost) for _, _, lost in measured], "")
    yield from requeues(seed)
    control_gaps = [measure_gap(CASES["gossip"][0], 1, seed + repeat, kill=False)[0] for repeat in range(REPEATS)]
    yield make_row(f"gossip: the same when the rank is stopped for {PAUSE_S:g} s (control)", control_gaps, "s",
                   target=f"at least {PAUSE_S:g}, because a stopped rank has not failed",
                   met=min(control_gaps) >= PAUSE_S)


def requeues(seed: int) -> Iterator[Row]:
    """Yield the seconds from the kill of a rank to the next step of the requeued job, and the repeated steps."""
    settings = (*SETTINGS, f"AuthInfo=cred_expire={REQUEUE_DELAY_S}")
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"lost-{os.getpid()}", round_robin_topology(3, 1),
                                               slurm_conf_lines=settings))
    try:
        restarts = [measure_restart(Jobs(sandbox), seed + repeat) for repeat in range(REQUEUES)]
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield make_row("allreduce with checkpoints, a rank is killed: seconds to the next step after the requeue",
                   [seconds for seconds, _, _ in restarts], "s", baseline=REQUEUE_DELAY_S,
                   target=f"Slurm delays a requeued job by {REQUEUE_DELAY_S} s here (cred_expire; 120 s by default)")
    yield make_row("the same: repeated steps", [float(lost) for _, lost, _ in restarts], "steps",
                   baseline=CHECKPOINT_EVERY, target=f"at most the {CHECKPOINT_EVERY} between two checkpoints",
                   met=max(lost for _, lost, _ in restarts) <= CHECKPOINT_EVERY)
    yield make_row("the same: starts of the job (control: one is killed, one completes)",
                   [float(starts) for _, _, starts in restarts], "", target="2",
                   met=all(starts == 2 for _, _, starts in restarts))


def measure_restart(jobs: Jobs, seed: int) -> tuple[float, int, int]:
    """Return the seconds without a step, the number of repeated steps, and the number of starts of one job.

    Raises:
        SandboxError: the job does not complete.
    """
    folder = jobs.folder / f"kept-{seed}"
    jobs.call(["mkdir", "-p", str(folder)])
    script, log = folder / "job.sh", folder / "log"
    script.write_text(
        f"#!/bin/sh\n#SBATCH -N 3 --ntasks-per-node=1 --requeue --open-mode=append -t 5 -o {log}\n"
        f"srun --mpi=pmix -K python -m slurmdl.train --strategy allreduce --emulate-compute {COMPUTE_S}:{PARAMETERS} "
        f"--steps {STEPS} --log-every 1 --checkpoint-dir {folder}/kept --checkpoint-every {CHECKPOINT_EVERY} "
        f"--seed {seed} || scontrol requeue $SLURM_JOB_ID\n")
    number = int(jobs.call(["sbatch", "--parsable", str(script)]))

    def steps() -> list[list[int]]:
        """Return the steps of each start."""
        text = log.read_text() if log.exists() else ""
        return [[int(step) for step in re.findall(r"^step (\d+) of ", part, re.M)]
                for part in text.split("if a rank fails:")[1:]]

    target = KILL_STEP + 7 * seed % CHECKPOINT_EVERY  # between two checkpoints
    wait(lambda: any(completed and completed[-1] >= target for completed in steps()),
         f"job {number}: step {target}", JOB_TIMEOUT_S, 0.01)
    node = cloud_nodes.wait_for_nodes(jobs.sandbox, number)[1]
    subprocess.run(jobs.sandbox.command(["pkill", "-KILL", "-f", "slurmdl.train"], node), check=True)
    failure_time, before = time.monotonic(), steps()[0][-1]
    wait(lambda: len(steps()) > 1 and bool(steps()[1]), f"job {number}: a step of its second start",
         JOB_TIMEOUT_S, 0.01)
    seconds, first = time.monotonic() - failure_time, steps()[1][0]
    wait(lambda: not cloud_nodes.job_state(jobs.sandbox, number)[0], f"the end of job {number}", JOB_TIMEOUT_S)
    completed = steps()
    if completed[-1][-1] != STEPS:
        raise SandboxError(f"job {number}: ended after step {completed[-1][-1]} of {STEPS}")
    return seconds, before - first + 1, len(completed)


def measure_gap(method: dict[str, Any], rank: int, seed: int, kill: bool) -> tuple[float, float, int]:
    """Return the longest time without a good step after the failure, the median before it, and the lost exchanges.

    Lost exchanges of a rank are the cancelled one and those before the step from which all ranks continue; the
    maximum over the ranks counts.

    Raises:
        SlurmdlError: the other ranks do not continue.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = json.dumps({"method": method, "rank": rank, "seed": seed, "kill": kill})
        done = subprocess.run(
            ["mpirun", "--with-ft", "ulfm", "--oversubscribe", "-n", str(RANKS), sys.executable, "-m",
             "benchmarks.heterogeneous.rank_failure", folder, work],
            env={**os.environ, **ulfm_environ(), "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=400, check=False)
        reports = [json.loads(file.read_text()) for file in Path(folder).glob("report-*")]
    failure_time = next((report["struck"] for report in reports if report["struck"]), None)
    num_survivors = RANKS - method.get("ps", 0) - (kill and rank >= method.get("ps", 0))
    if (done.returncode or failure_time is None or len(reports) != num_survivors
            or any(len(report["lost"]) != kill for report in reports)):
        raise SlurmdlError(f"{method}, rank {rank}: exit status {done.returncode}, {len(reports)} of {num_survivors} "
                           f"workers ended: {' '.join(done.stderr.split())[-300:]}")
    after, before = [], []
    for report in reports:
        good_ends = [end for end, exchanged in report["ends"] if exchanged]
        after += [second - first for first, second in pairwise(good_ends) if second > failure_time]
        before += [second - first for first, second in pairwise(good_ends) if second <= failure_time]
    return max(after), statistics.median(before), max(report["missed"] for report in reports)


def main() -> None:
    """Train as one rank; the last worker kills or stops another rank. See `measure_gap`."""
    import torch

    from slurmdl.train import init
    from slurmdl.train.strategy_config import StrategyConfig
    from slurmdl.train.trainer.workloads import SyntheticWorkload

    folder, work = Path(sys.argv[1]), json.loads(sys.argv[2])
    run = init(StrategyConfig(**work["method"]), seed=work["seed"])
    (folder / f"pid-{run.rank}").write_text(str(os.getpid()))
    run.world.transport.barrier()
    task = SyntheticWorkload(PARAMETERS, lambda samples: COMPUTE_S, time.sleep, work["seed"])
    # the gradients are constant; a low learning rate keeps the parameters small
    model, opt = run.wrap(task.module, torch.optim.SGD(task.module.parameters(), lr=1e-4))
    failure_time, ends, missed = None, [], 0
    for step in range(STEPS):
        if step == KILL_STEP and run.rank == RANKS - 1:
            failure_time = _kill_or_stop(int((folder / f"pid-{work['rank']}").read_text()), work["kill"])
        exchanges = run.recovery.exchange_counts[0]
        opt.zero_grad()
        model().backward()
        opt.step()
        # an asynchronous rank continues if a push is skipped
        ends.append((time.monotonic(), run.world.config.asynchronous or run.recovery.exchange_counts[0] > exchanges))
        if run.recovery.failed_ranks and not missed:
            missed = max(1, run.recovery.failed_ranks[0]["step"] - step)
    run.finish()
    (folder / f"report-{run.rank}").write_text(json.dumps(
        {"struck": failure_time, "ends": ends, "lost": run.recovery.failed_ranks, "missed": missed}))


def _kill_or_stop(pid: int, kill: bool) -> float:
    """Kill or stop a process; return the time."""
    os.kill(pid, signal.SIGKILL if kill else signal.SIGSTOP)
    if not kill:
        threading.Timer(PAUSE_S, os.kill, (pid, signal.SIGCONT)).start()
    return time.monotonic()


if __name__ == "__main__":
    main()
