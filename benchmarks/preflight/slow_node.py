"""Step times of a training during which a node becomes slow: with a warning only, and with a requeue without it.

A job of two nodes trains on a sandbox with a real Slurm and a spare node: on two cores, each rank has one. In the
first third of the steps one node, drawn by the seed, gets a CPU quota of a quarter of a core. Control: the job that
may leave slow nodes, and no node becomes slow.

Published: Greyhound (Wu et al., USENIX ATC 2025) mitigates 58.9 % of the slowdown by fail-slow nodes. Guard (Liu et
al., arXiv 2605.17879) reduces the variation of the step time from run to run from 20 % to 1 %.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev

from benchmarks import cloud_nodes
from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs, wait
from benchmarks.results import Row, make_row
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, RANKS, SEEDS, QUICK_SEEDS, STEPS = 3, 2, 7, 1, 240
#: samples of each rank per step
BATCH_SIZE = 8192
#: cores of a node, and of a slow one
CORES, SLOW_CORES = 1.0, 0.25
GOAL_RATIO = 1.05
#: Slurm's delay of a requeued job, and time limit of a job, in seconds
REQUEUE_DELAY_S, JOB_TIMEOUT_S = 5, 300.0
_JOB = """\
#!/bin/sh
#SBATCH -N {ranks} --ntasks-per-node=1 --requeue --open-mode=append -t 10 -o {folder}/log
export XDG_STATE_HOME={folder}/state OMP_NUM_THREADS=1
echo "start at $(date +%s.%N) on $(scontrol show hostnames | tr '\\n' ' ')"
slurmdl srun --dl-on-slow={on_slow} python -m slurmdl.train --strategy allreduce --model mlp:256,256 \\
    --data synthetic:1x8x8:10:49152 --batch-size {batch_size} --steps {steps} --seed {seed} --log-every 1 \\
    --checkpoint-dir {folder}/kept --checkpoint-every {steps} --metrics {folder}/steps
echo "status $? at $(date +%s.%N)"
"""


@dataclass(frozen=True)
class Case:
    """What a training does about slow nodes, and whether one becomes slow."""

    on_slow: str
    has_slow_node: bool


CLEAN, WARN, EXCLUDE, CONTROL = "clean", "warn", "exclude", "control"
CASES = {CLEAN: Case("warn", False), WARN: Case("warn", True), EXCLUDE: Case("exclude", True),
         CONTROL: Case("exclude", False)}


@dataclass(frozen=True)
class Outcome:
    """One training.

    Attributes:
        steps: step -> its time in s, of the first worker.
        seconds: from the first start of the job to its end, in s.
        starts: nodes of each start.
        slow_node, slow_since: the node that became slow, and the last step before that; "" and 0 without one.
        resumed_after: step of the checkpoint from which the job resumed; 0 if it did not.
    """

    steps: Mapping[int, float]
    seconds: float
    starts: Sequence[Sequence[str]]
    slow_node: str = ""
    slow_since: int = 0
    resumed_after: int = 0

    @property
    def has_left_the_node(self) -> bool:
        return self.slow_node in self.starts[0] and self.slow_node not in self.starts[-1]

    @property
    def step_seconds(self) -> float:
        """Mean step time of the last quarter of the steps; a quota makes single steps uneven."""
        return fmean(seconds for step, seconds in self.steps.items() if step > 3 * STEPS // 4)

    @property
    def seconds_in_steps(self) -> float:
        return sum(self.steps.values())


def run_training(jobs: Jobs, case: Case, seed: int) -> Outcome:
    """Train once; SandboxError if the job does not complete."""
    sandbox, source = jobs.sandbox, random.Random(f"slow node {seed}")
    folder = jobs.folder / f"{case.on_slow}-{case.has_slow_node}-{seed}"
    jobs.call(["mkdir", "-p", str(folder)])
    script, log = folder / "job.sh", folder / "log"
    script.write_text(_JOB.format(ranks=RANKS, folder=folder, on_slow=case.on_slow, batch_size=BATCH_SIZE,
                                  steps=STEPS, seed=seed))
    wait(lambda: set(sandbox.node_states().values()) == {"idle"}, "idle nodes", JOB_TIMEOUT_S, 0.5)
    job = int(jobs.call(["sbatch", "--parsable", str(script)]))
    slow_node, slow_since = "", source.randrange(STEPS // 6, STEPS // 3)
    try:
        if case.has_slow_node:
            wait(lambda: f"step {slow_since} of" in _read(log), f"step {slow_since} of job {job}", JOB_TIMEOUT_S)
            slow_node = source.choice(_starts(_read(log))[0])
            sandbox.limit_cpu(slow_node, SLOW_CORES)
        wait(lambda: not cloud_nodes.job_state(sandbox, job)[0], f"the end of job {job}", JOB_TIMEOUT_S, 0.5)
    finally:
        if slow_node:
            sandbox.limit_cpu(slow_node, CORES)
    text = _read(log)
    end = re.search(r"^status 0 at ([\d.]+)$", text, re.M)
    if not end:
        raise SandboxError(f"job {job} does not complete: {' '.join(text.split())[-400:]}")
    begin, resumed = re.search(r"^start at ([\d.]+)", text, re.M), re.search(r"resumed after step (\d+)", text)
    assert begin
    steps = map(json.loads, (folder / "steps").read_text().splitlines())
    return Outcome({step["step"]: step["seconds"] for step in steps}, float(end[1]) - float(begin[1]), _starts(text),
                   slow_node, slow_since if slow_node else 0, int(resumed[1]) if resumed else 0)


def _read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def _starts(text: str) -> list[list[str]]:
    return [nodes.split() for nodes in re.findall(r"^start at \S+ on (.*)$", text, re.M)]


def start_sandbox() -> lifecycle.Sandbox:
    """A sandbox in one zone: the ranks of a second start sum in the same order."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(
        f"slow-{os.getpid()}", round_robin_topology(NODES, 1),
        slurm_conf_lines=(*SETTINGS, f"AuthInfo=cred_expire={REQUEUE_DELAY_S}")))
    for node in sandbox.spec.node_hosts:
        sandbox.limit_cpu(node, CORES)
    return sandbox


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rows of all cases: step times, their variation, and the slowdown that a requeue avoids."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in CASES}
    sandbox = start_sandbox()
    try:
        jobs = Jobs(sandbox)
        for each in range(seed, seed + (QUICK_SEEDS if quick else SEEDS)):
            for name, case in CASES.items():
                outcome = run_training(jobs, case, each)
                outcomes[name].append(outcome)
                print(f"{name}, seed {each}: {_describe(outcome)}", file=sys.stderr, flush=True)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield from _step_rows(outcomes)
    yield from _slowdown_rows(outcomes)


def _describe(outcome: Outcome) -> str:
    slow = f", {outcome.slow_node} slow after step {outcome.slow_since}" if outcome.slow_node else ""
    resumed = f", resumed after step {outcome.resumed_after}" if outcome.resumed_after else ""
    return f"{outcome.step_seconds * 1e3:.1f} ms/step, job {outcome.seconds:.1f} s, in steps " \
           f"{outcome.seconds_in_steps:.1f} s, {len(outcome.starts)} starts{slow}{resumed}"


def _step_rows(outcomes: Mapping[str, Sequence[Outcome]]) -> Iterator[Row]:
    """Rows of the step times of the last quarter, and of the variation of the step times."""
    clean = outcomes[CLEAN]
    yield make_row("clean: mean step of the last quarter", [outcome.step_seconds for outcome in clean], "s")
    goals: dict[str, tuple[str, float, float]] = {
        WARN: ("", 0.0, 0.0), EXCLUDE: (f"at most {GOAL_RATIO:g}", 0.0, GOAL_RATIO),
        CONTROL: (f"{1 / GOAL_RATIO:.2f} to {GOAL_RATIO:g}", 1 / GOAL_RATIO, GOAL_RATIO)}
    for name, (target, lowest, highest) in goals.items():
        ratios = [outcome.step_seconds / base.step_seconds
                  for outcome, base in zip(outcomes[name], clean, strict=True)]
        yield make_row(f"{name}: mean step of the last quarter, of the clean run's", ratios, "", target=target,
                       met=lowest <= median(ratios) <= highest if target else None)
    for name, runs in outcomes.items():
        yield make_row(f"{name}: variation of the step within a run (std / mean)",
                       [_variation(tuple(outcome.steps.values())) for outcome in runs], "")
    warned, left = (_variation([outcome.step_seconds for outcome in [*clean, *outcomes[name]]])
                    for name in (WARN, EXCLUDE))
    yield make_row("exclude: variation of the last quarter's step from run to run, in half of which a node is slow",
                   [left], "", baseline=warned, target="published: Guard, 0.20 to 0.01 (baseline: warn)")


def _variation(values: Sequence[float]) -> float:
    return pstdev(values) / fmean(values)


def _slowdown_rows(outcomes: Mapping[str, Sequence[Outcome]]) -> Iterator[Row]:
    """Rows of the slowdown of the whole job that leaving the node avoids, and of what leaving it costs."""
    runs = list(zip(outcomes[CLEAN], outcomes[WARN], outcomes[EXCLUDE], strict=True))
    yield make_row("exclude: share of the job's slowdown that is avoided",
                   [_share_avoided(clean.seconds, warned.seconds, left.seconds) for clean, warned, left in runs], "",
                   target="published: Greyhound, 0.589")
    yield make_row("  in the steps, without the time of the requeue", [
        _share_avoided(clean.seconds_in_steps, warned.seconds_in_steps, left.seconds_in_steps)
        for clean, warned, left in runs], "")
    yield make_row("  time of the requeue and the second start", [
        left.seconds - left.seconds_in_steps - (clean.seconds - clean.seconds_in_steps) for clean, _, left in runs],
        "s", target=f"of which Slurm's delay is {REQUEUE_DELAY_S} s here, and 120 s by default")
    yield make_row("  slow steps until the node is left",
                   [float(max(left.resumed_after - left.slow_since, 0)) for _, _, left in runs], "steps")
    has_left = [float(left.has_left_the_node) for _, _, left in runs]
    yield make_row("  slow node left", has_left, "share", target="1", met=min(has_left) == 1.0)
    requeues = [float(len(outcome.starts) - 1) for outcome in outcomes[CONTROL]]
    yield make_row("control: requeues without a slow node", requeues, "", target="0", met=max(requeues) == 0.0)


def _share_avoided(clean: float, warned: float, left: float) -> float:
    return (warned - left) / (warned - clean)
