"""A sandbox for the demo: other users' jobs, runs of the demo's jobs, a log of the details and a progress line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.demo.jobs import PLACED, Job, Outcome
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle

#: time limit of a job, and attempts: under srun, Open MPI 4.1.4 sometimes hangs or crashes in MPI_Init on a busy
#: machine (https://github.com/open-mpi/ompi/issues/12495)
JOB_TIMEOUT_S, STARTS = 90.0, 3


class DemoCluster:
    """A running sandbox; `log` gets commands, explanations and the output of jobs."""

    def __init__(self, sandbox: lifecycle.Sandbox, log: IO[str]) -> None:
        self.sandbox, self.log = sandbox, log
        self.folder = sandbox.shared / "demo"
        self.start = time.monotonic()
        self.call(["mkdir", "-p", str(self.folder)], directory=str(sandbox.shared))

    def occupy(self, nodes: Sequence[str]) -> None:
        """Give exactly these nodes to other jobs."""
        self.call(["scancel", "--name=other"])
        self.wait_for(lambda: set(self.sandbox.node_states().values()) == {"idle"}, "idle nodes")
        self.call(["sbatch", "-J", "other", "-o", "/dev/null", "-N", str(len(nodes)), "-w", ",".join(nodes),
                   "--exclusive", "--wrap", "sleep 86400"])
        self.wait_for(lambda: self.call(["squeue", "-h", "-t", "R", "-o", "%j"], logged=False).split() == ["other"],
                      "the jobs of other users")

    def nodes_of_plain_slurm(self, ranks: int) -> list[str]:
        """The nodes that Slurm would give to a job now, by `sbatch --test-only`."""
        text = self.call(["sbatch", "--test-only", f"-N{ranks}", "--wrap=:"], with_stderr=True)
        match = re.search(r" on nodes (\S+)", text)
        if not match:
            raise SandboxError(f"sbatch --test-only: unexpected output {text!r}")
        return self.call(["scontrol", "show", "hostnames", match[1]]).split()

    def run(self, job: Job, variant: str, outcome: Outcome) -> None:
        """Submit a job one way, wait until it ends, and add its measurements."""
        name = job.file_name(variant)
        script = self.folder / f"{name}.sh"
        script.write_text(job.script(variant))
        for suffix in (".json", ".steps", ".log"):  # of an earlier repeat
            script.with_suffix(suffix).unlink(missing_ok=True)
        if variant == PLACED and not outcome.seconds:
            self.call(["slurmdl", "place", "--explain", str(script)])
        for attempt in range(STARTS):
            try:
                summary, seconds, sent_bytes = self._submit(job, variant, script)
                break
            except SandboxError as error:
                if attempt + 1 == STARTS:
                    raise
                self.call(["squeue", "-o", "%i %j %T %r %N"])  # for the log
                self.call(["scancel", f"--name={name}"])
                print(f"  retry: {error}", file=sys.stderr, flush=True)
        outcome.seconds.append(seconds)
        outcome.inter_zone_bytes.append(sent_bytes)
        outcome.rank_nodes = [place["node"] for place in summary["rank_map"]]
        outcome.zones = len({self.zone(node) for node in outcome.rank_nodes})
        outcome.accuracy = summary.get("test_accuracy")

    def _submit(self, job: Job, variant: str, script: Path) -> tuple[dict[str, Any], float, float]:
        """Run a job once; return its summary, seconds per step, and bytes between zones."""
        before = self.sandbox.inter_zone_bytes()
        submit = ["slurmdl", "sbatch"] if job.is_placed(variant) else ["sbatch"]
        number = self.call([*submit, str(script)]).split()[-1]
        try:
            self.wait_for(lambda: not self.call(["squeue", "-h", "-j", number], logged=False).strip(),
                          f"{job.key}, {variant}", JOB_TIMEOUT_S)
        finally:
            output = self._read_output(script)
            self.write_log(f"output of job {number} ({job.key}, {variant})", output)
        try:
            summary = json.loads(script.with_suffix(".json").read_text())
            steps = [json.loads(line) for line in script.with_suffix(".steps").read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise SandboxError(f"job {number} ({job.key}, {variant}) failed: {' '.join(output.split())[-400:]}"
                               ) from error
        seconds = job.step_seconds([step["seconds"] for step in steps])
        return summary, seconds, self.sandbox.inter_zone_bytes() - before

    def _read_output(self, script: Path) -> str:
        output = script.with_suffix(".log")
        return output.read_text() if output.exists() else ""

    def zone(self, node: str) -> str:
        topology = self.sandbox.spec.topology
        return str(topology.zones[topology.leaf[topology.node_index[node]]])

    def version(self) -> str:
        """Slurm's name and release."""
        return self.call(["sbatch", "--version"]).strip()

    def wait_for(self, is_done: Callable[[], bool], condition: str, timeout_s: float = 20.0) -> None:
        """Wait with a progress line on a terminal; SandboxError after the timeout."""
        begin = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now > begin + timeout_s:
                raise SandboxError(f"{condition}: not done within {timeout_s:g} s")
            if sys.stdout.isatty():
                print(f"\r  [{now - self.start:3.0f} s] waiting for: {condition}\x1b[K", end="", flush=True)
            time.sleep(0.2)
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)

    def write_log(self, title: str, text: str) -> None:
        self.log.write(f"--- {title}\n" + "".join(f"  {line}\n" for line in text.splitlines()))
        self.log.flush()

    def call(self, argv: Sequence[str], *, directory: str | None = None, with_stderr: bool = False,
             logged: bool = True) -> str:
        """Run a command on the login host as the ordinary user; return its stdout, or both streams."""
        line = self.sandbox.command(argv, directory=directory or str(self.folder))
        done = subprocess.run(line, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=False)
        if logged:
            self.write_log(f"$ {' '.join(argv)}", done.stdout + done.stderr)
        if done.returncode:
            raise SandboxError(f"{' '.join(argv[:3])}: exit status {done.returncode}: "
                               f"{' '.join(done.stderr.split())[-300:]}")
        return done.stdout + done.stderr if with_stderr else done.stdout


def open_log(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", encoding="utf-8")
