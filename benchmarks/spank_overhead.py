"""Overhead of the SPANK plugin: task launch time and memory of slurmd.

Two sandboxes of one node run at once, one with the plugin and one without; steps of one task alternate between them.
A launch takes tens of milliseconds and varies far more than the permitted overhead. The metric is therefore the
median difference of adjacent steps. Each value is shown next to the same value between two halves of the steps
without the plugin. In a third sandbox the plugin measures the time of its callbacks in srun and in slurmstepd
(spank/tests/timing.c). The negative control is that plugin with a sleep.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from benchmarks import results, sandbox_faults
from benchmarks.results import Row, make_row
from benchmarks.suite import run_repeated, start
from slurmdl.errors import SandboxError, UsageError
from slurmdl.sandbox import lifecycle as sandbox_cluster
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

STEPS, WARM_UP, BLOCKS, CONTROLS = 1000, 50, 20, 100
#: maximum overhead of a task launch in seconds
TARGET = 1e-3
#: maximum extra growth of slurmd's memory with the plugin in KiB: rounding of one arena of the allocator
GROWTH = 132
#: sleep of the control in each task in microseconds
SLEEP = 5000
#: additional environment variables, more than users commonly have
VARIABLES = 150
BUILD = Path(__file__).parents[1] / "build/spank"

_TASK = "echo $(date +%s%N) ${SLURMDL_ROLE--} ${MASTER_ADDR--} ${SLURMDL_SPANK_NS-}"
#: runs a step for each line of options inside an allocation; prints its start, duration (both ns), status and output.
#: With --overlap and --mem=0 no step waits for the cleanup of the previous step.
_DRIVER = """
import os, subprocess, sys, time
os.environ["SLURMDL_RANKMAP_JOB"] = os.environ["SLURM_JOB_ID"]
for line in sys.stdin:
    start_time, start = time.time_ns(), time.perf_counter_ns()
    done = subprocess.run(["srun", "-n1", "--overlap", "--mem=0", *line.split(), "sh", "-c", sys.argv[1]],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(start_time, time.perf_counter_ns() - start, done.returncode, " ".join(done.stdout.split()), flush=True)
"""


@dataclass(frozen=True)
class Step:
    """Times of one step in seconds.

    `launch` and `wall` run from srun's start to the task's start and to srun's end; `client` and `remote` are those
    of the plugin's callbacks in srun and slurmstepd, 0 if not measured.
    """

    launch: float
    wall: float
    client: float
    remote: float


class Steps:
    """A sandbox of one node with an allocation for steps."""

    def __init__(self, name: str, plugstack: str) -> None:
        self.sandbox: Sandbox = sandbox_cluster.sandbox_up(SandboxSpec(
            f"{name}-{os.getpid()}", round_robin_topology(1, 1), plugstack=plugstack, bind_mounts=(str(BUILD),)))
        self._role = "worker" if plugstack else "-"
        foreign = {key: value for key, value in os.environ.items() if not key.startswith("SLURMDL_")}
        self._child = subprocess.Popen(
            self.sandbox.command(["salloc", "-Q", "-N1", "-n1", "python3", "-c", _DRIVER, _TASK],
                                 directory=str(self.sandbox.shared)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**foreign, **{f"SOME_VARIABLE_{i}": "some/path:" * 5 for i in range(VARIABLES)},
                 "SLURMDL_OPT_STRATEGY": "gossip", "SLURMDL_RANKMAP_NODES": "n1"})

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._child.communicate(timeout=10)
        self._child.kill()
        sandbox_cluster.sandbox_down(self.sandbox.spec.name)

    def step(self, *options: str) -> Step:
        """Run one step; SandboxError if it fails or its task has the wrong environment."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(" ".join(options) + "\n")
        self._child.stdin.flush()
        start, wall, status, *fields = self._child.stdout.readline().split() or ("0", "0", "salloc failed")
        expected = [self._role, "n1" if options else "-"]
        if status != "0" or fields[1:3] != expected:
            raise SandboxError(f"step: exit status {status}: {' '.join(fields)[-300:]}; expected {expected}")
        client, remote = map(float, fields[3:] or (0, 0))
        return Step((int(fields[0]) - int(start)) * 1e-9, float(wall) * 1e-9, client * 1e-9, remote * 1e-9)

    def memory(self) -> float:
        """Return the resident memory of slurmd in KiB."""
        status = Path(f"/proc/{sandbox_faults.daemon_pid(self.sandbox, 'n1')}/status").read_text()
        return float(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    def plugstack(self, text: str) -> None:
        """Change the plugins of the following steps."""
        (self.sandbox.root / "slurm/plugstack.conf").write_text(text)


def run(repeats: int = STEPS, results_file: str | None = None) -> None:
    """Measure `repeats` steps of each kind; print the rows and write them to `results_file`."""
    if repeats < 2 * BLOCKS:
        raise UsageError(f"--repeats={repeats}: expected a number of at least {2 * BLOCKS}")
    plugin, timed_plugin = BUILD / "slurmdl.so", BUILD / "timing.so"
    missing = [str(path) for path in (plugin, timed_plugin) if not path.exists()]
    if missing:
        raise SandboxError(f"{missing[0]}: missing; run `make plugin` and `make -C spank timing`")
    rows = []
    with Steps("bare", "") as bare, Steps("plugged", f"optional {plugin}\n") as plugged, \
            Steps("timed", f"optional {timed_plugin}\n") as timed:
        done = subprocess.run(bare.sandbox.command(["sbatch", "--version"]), capture_output=True, text=True,
                              check=True)
        for row in measure(bare, plugged, timed, timed_plugin, repeats):
            rows.append(row)
            print(f"{ {None: '', True: 'met', False: 'MISSED'}[row.met]:7}{row.value:10.4g} {row.unit:4} {row.metric}"
                  + (f", baseline {row.baseline:.4g}" if row.baseline is not None else "")
                  + (f"; {row.target}" if row.target else ""), flush=True)
    if results_file:
        results.write(results_file, rows, seed=0, versions={"slurm": done.stdout.strip()},
                      command=f"python -m benchmarks.spank_overhead --repeats {repeats} --results {results_file}")
    else:
        print(results.verdict(rows))


def measure(bare: Steps, plugged: Steps, timed: Steps, timed_plugin: Path, repeats: int) -> Iterator[Row]:
    """Yield all rows from `repeats` steps of each kind."""
    for _ in range(WARM_UP):
        for sandbox in (bare, plugged, timed):
            sandbox.step()
    before = (bare.memory(), plugged.memory())
    without_plugin: list[Step] = []
    with_plugin: list[Step] = []
    timed_steps, mapped_steps = [], []
    for i in range(repeats):
        # a step may be slowed by the previous one, so the order alternates
        for sandbox in (bare, plugged) if i % 2 else (plugged, bare):
            (without_plugin if sandbox is bare else with_plugin).append(sandbox.step())
    after = (bare.memory(), plugged.memory())
    for _ in range(repeats // 2):
        timed_steps.append(timed.step())
        mapped_steps.append(timed.step("--dl-rank-map"))
    timed.plugstack(f"optional {timed_plugin} {SLEEP}\n")
    slow = [(bare.step(), timed.step()) for _ in range(CONTROLS)]

    for label, attribute in (("srun's start to the task's start", "launch"), ("srun's start to its end", "wall")):
        plain_seconds, plugin_seconds = ([getattr(step, attribute) for step in steps]
                                         for steps in (without_plugin, with_plugin))
        yield make_row(f"{label}, without the plugin", _medians(plain_seconds), "s")
        yield _evaluate(f"{label}, added by the plugin, median", _medians(_pairs(plugin_seconds, plain_seconds)),
                        float(np.median(plain_seconds)))
        # two of each four steps without the plugin go to each half, at alternating positions in their pairs
        half_a, half_b = ([value for i, value in enumerate(plain_seconds) if i % 4 // 2 == half] for half in (0, 1))
        pairs = min(len(half_a), len(half_b))
        yield make_row(f"{label}, median difference between two halves of the steps without the plugin",
                       _medians(_pairs(half_a[:pairs], half_b[:pairs])), "s")
        high = [float(np.percentile(values, 99)) for values in (plugin_seconds, plain_seconds, half_a, half_b)]
        yield make_row(f"{label}, added to the 99th percentile (baseline: difference between two halves of the "
                       "steps without the plugin)",
                       [high[0] - high[1]], "s", baseline=abs(high[2] - high[3]))
    for label, steps in (("", timed_steps), (", with --dl-rank-map", mapped_steps)):
        for program, seconds in (("srun", [step.client for step in steps]),
                                 ("slurmstepd", [step.remote for step in steps]),
                                 ("srun and slurmstepd", [step.client + step.remote for step in steps])):
            for share, name in ((50, "median"), (99, "99th percentile")):
                percentile = [float(np.percentile(seconds, share))]
                metric = f"callbacks in {program} for a task, {name} of {len(seconds)}{label}"
                yield _evaluate(metric, percentile) if " and " in program else make_row(metric, percentile, "s")
    for i, label in enumerate(("without", "with")):
        yield make_row(f"slurmd's memory {label} the plugin after {repeats} steps", [after[i]], "KiB",
                       baseline=before[i])
    grown = [new - old for new, old in zip(after, before, strict=True)]
    yield make_row(f"growth of slurmd's memory over {repeats} steps", [grown[1]], "KiB", baseline=grown[0],
                   target=f"at most {GROWTH} KiB above the growth without the plugin",
                   met=grown[1] <= grown[0] + GROWTH)
    added_launch = _medians(_pairs([step.launch for _, step in slow], [step.launch for step, _ in slow]), 5)
    yield make_row(f"control, a sleep of {SLEEP / 1e6:g} s: srun's start to the task's start, added",
                   added_launch, "s", target=f"above {TARGET:g} s", met=float(np.median(added_launch)) > TARGET)
    callback_seconds = [step.client + step.remote for _, step in slow]
    yield make_row(f"control, a sleep of {SLEEP / 1e6:g} s: callbacks in srun and slurmstepd for a task",
                   _medians(callback_seconds, 5), "s", target=f"above {TARGET:g} s",
                   met=float(np.median(callback_seconds)) > TARGET)


def _evaluate(metric: str, seconds: Sequence[float], baseline: float | None = None) -> Row:
    return make_row(metric, seconds, "s", baseline=baseline, target=f"below {TARGET:g} s",
                    met=float(np.median(seconds)) < TARGET)


def _medians(values: Sequence[float], blocks: int = BLOCKS) -> list[float]:
    """Return the medians of consecutive blocks."""
    return [float(np.median(block)) for block in np.array_split(np.array(values), blocks) if len(block)]


def _pairs(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return paired differences, each the mean of two adjacent pairs, since the order alternates."""
    added = np.subtract(values, reference)[:len(values) // 2 * 2]
    return [float(value) for value in added.reshape(-1, 2).mean(1)]


def main(argv: list[str]) -> None:
    run_repeated("spank_overhead",
                 "Overhead of the SPANK plugin in task launches, on sandboxes (needs root and the plugin).",
                 run, STEPS, argv)


if __name__ == "__main__":
    start(main)
