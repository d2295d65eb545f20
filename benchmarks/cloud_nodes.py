"""Jobs on a sandbox of cloud nodes: a real slurmctld chooses nodes, and nothing runs.

A job stays in CONFIGURING with its nodes until it is canceled: an oracle for Slurm's choice, at any cluster size.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from slurmdl.errors import SandboxError
from slurmdl.sandbox import namespaces
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.sandbox.spec import LOGIN
from slurmdl.slurm import hostlist

#: the controller considers a new job at once (default: after 3 s, slurm.conf(5)); backfill and power-down passes run
#: every second
SLURM_CONF_LINES = ("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1",
                    "SlurmctldParameters=power_save_interval=1")
_JOB_SCRIPT = "#!/bin/sh\n"


def submit_job(sandbox: Sandbox, options: Sequence[str]) -> int:
    """Submit a job as the ordinary user and return its ID; SandboxError quotes sbatch's rejection."""
    command = sandbox.command(["sbatch", "--parsable", "--no-requeue", "--output=/dev/null", *options],
                              directory=str(sandbox.shared))
    result = subprocess.run(command, input=_JOB_SCRIPT, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode:
        raise SandboxError(f"sbatch: {' '.join(result.stderr.split())[-300:]}")
    return int(result.stdout.split(";")[0])


def wait_for_nodes(sandbox: Sandbox, job: int, timeout: float = 20.0) -> tuple[str, ...]:
    """Wait until a job has nodes and return them in Slurm's order; SandboxError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        state, names = job_state(sandbox, job)
        if state not in ("PD", ""):
            return tuple(hostlist.expand_hostlist(names))
        if time.monotonic() > deadline:
            raise SandboxError(f"job {job} has no nodes after {timeout:g} s (state {state or 'unknown'})")
        time.sleep(0.05)


def job_state(sandbox: Sandbox, job: int) -> tuple[str, str]:
    """Return the state of a job in squeue's short form ("" if it ended), and its nodes as a hostlist."""
    fields = namespaces.run_on_host(sandbox.pids[LOGIN], ["squeue", "-h", "-j", str(job), "-o", "%t %N"]).split()
    return (fields[0], fields[1] if len(fields) > 1 else "") if fields else ("", "")


def power_down_job(sandbox: Sandbox, job: int, nodes: Sequence[str]) -> None:
    """End a job that may not be requeued; its nodes are available again after some seconds.

    Powering down its nodes ends it. Canceling it first would free them for a moment, and end the job that gets
    them.
    """
    if nodes:
        namespaces.run_on_host(sandbox.pids[LOGIN], ["scontrol", "update", "State=POWER_DOWN_FORCE",
                                                     f"NodeName={hostlist.fold_hostlist(nodes)}"])
    else:
        namespaces.run_on_host(sandbox.pids[LOGIN], ["scancel", str(job)])


def wait_for_idle_nodes(sandbox: Sandbox, nodes: Sequence[str], timeout: float = 20.0) -> None:
    """Wait until all nodes are available again; SandboxError names one that is not."""
    deadline = time.monotonic() + timeout
    while True:
        states = sandbox.node_states()
        unavailable = [node for node in nodes if states.get(node) != "idle~"]
        if not unavailable:
            return
        if time.monotonic() > deadline:
            raise SandboxError(f"{unavailable[0]} is {states.get(unavailable[0])} after {timeout:g} s")
        time.sleep(0.1)
