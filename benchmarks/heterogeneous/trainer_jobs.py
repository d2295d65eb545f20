"""Jobs of the built-in trainer on a sandbox, submitted as a user, one at a time."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cloud_nodes, sandbox_mpi
from benchmarks import results as benchmark_results
from slurmdl.bench.host_meters import CpuIdleMeter
from slurmdl.errors import SandboxError
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.slurm import hostlist

#: the controller considers a new job at once, without a delay to collect more
SETTINGS = cloud_nodes.SLURM_CONF_LINES[:1]
#: time limit of a job in seconds
_JOB_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Result:
    """Measurements of a job.

    Attributes:
        summary: output of `slurmdl train --summary`.
        seconds: step times of the first worker.
        idle: idle share of the machine's CPUs from the first line of the log on.
    """

    summary: dict[str, Any]
    seconds: tuple[float, ...]
    idle: float


class Jobs:
    """Jobs on a running sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.folder = sandbox.shared / "jobs"
        self.call(["mkdir", "-p", str(self.folder)])

    def call(self, argv: Sequence[str]) -> str:
        """See sandbox_mpi.call."""
        return sandbox_mpi.call(self.sandbox, argv)

    def occupy(self, nodes: Sequence[str]) -> int:
        """Start another job on these nodes; return its number once it runs."""
        return self._sleep(["-N", str(len(nodes)), "--exclusive", "-w", hostlist.fold_hostlist(sorted(nodes))])[0]

    def assigned_nodes(self, nodes: int, tasks_per_node: int) -> tuple[str, ...]:
        """Return the nodes that Slurm assigns to a job of `nodes` nodes, in its order."""
        number, names = self._sleep(["-N", str(nodes), f"--ntasks-per-node={tasks_per_node}"])
        self.cancel(number)
        return names

    def _sleep(self, options: Sequence[str]) -> tuple[int, tuple[str, ...]]:
        number = int(self.call(["sbatch", "--parsable", "--no-requeue", "-o/dev/null", *options,
                                "--wrap", "sleep 3600"]))
        return number, cloud_nodes.wait_for_nodes(self.sandbox, number)

    def cancel(self, number: int) -> None:
        """Cancel a job and wait until its nodes are free."""
        _, nodes = cloud_nodes.job_state(self.sandbox, number)
        self.call(["scancel", str(number)])
        wait(lambda: all(self.sandbox.node_states()[node] == "idle" for node in hostlist.expand_hostlist(nodes)),
             f"the end of job {number}", _JOB_TIMEOUT_S)

    def train(self, nodes: int, tasks_per_node: int, options: str, *, lines: str = "",
              start: str = "exec srun --mpi=pmix -K", submit: Sequence[str] = ("sbatch",)) -> Result:
        """Train with `tasks_per_node` tasks on each of `nodes` nodes, and wait until the job ends.

        Args:
            options: options of `slurmdl train`.
            lines: lines of the job script before the step.
            start: command that starts the step.
            submit: command that submits the job script.

        Raises:
            SandboxError: all attempts fail.
        """
        script, log, summary, steps = (self.folder / f"train.{suffix}" for suffix in ("sh", "log", "json", "steps"))
        script.write_text(
            f"#!/bin/sh\n#SBATCH -N {nodes} --ntasks-per-node={tasks_per_node} --no-requeue -t 10 -o {log}\n{lines}"
            f"{start} python -m slurmdl.train {options} --summary {summary} --metrics {steps}\n")
        log_tail = ""
        for _ in range(sandbox_mpi.STARTS):
            for file in (log, summary, steps):
                file.unlink(missing_ok=True)
            idle = self._wait_and_measure_idle(int(self.call([*submit, "--parsable", str(script)])), log)
            if summary.exists():
                return Result(json.loads(summary.read_text()),
                              tuple(json.loads(line)["seconds"] for line in steps.read_text().splitlines()), idle)
            log_tail = " ".join(log.read_text().split())[-400:] if log.exists() else "no output"
            print(f"retry: {log_tail}", file=sys.stderr, flush=True)
        raise SandboxError(f"slurmdl train {options}: no summary: {log_tail}")

    def _wait_and_measure_idle(self, number: int, log: Path) -> float:
        """Wait until a job ends; return `Result.idle`."""
        def ended() -> bool:
            return not cloud_nodes.job_state(self.sandbox, number)[0]

        # the first line of the log shows the nodes of the ranks
        wait(lambda: ended() or (log.exists() and os.path.getsize(log) > 0), f"the start of job {number}",
             _JOB_TIMEOUT_S)
        cpu_idle = CpuIdleMeter()
        wait(ended, f"the end of job {number}", _JOB_TIMEOUT_S)
        return cpu_idle.idle_share()


def wait(is_done: Callable[[], bool], condition: str, timeout_s: float, interval_s: float = 0.1) -> None:
    """Poll every `interval_s` seconds until is_done() is true.

    Raises:
        SandboxError: is_done() is not true within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise SandboxError(f"{condition}: not reached within {timeout_s:g} s")
        time.sleep(interval_s)


def cpu_bound_note(results: Sequence[Result]) -> str:
    """See results.cpu_bound_note."""
    return benchmark_results.cpu_bound_note([result.idle for result in results])
