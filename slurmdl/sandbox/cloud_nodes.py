"""Jobs on a sandbox whose nodes are a cloud: a real slurmctld chooses for them, and nothing runs.

A job there stays in CONFIGURING with its nodes until it is cancelled. It is the way to ask Slurm itself what it
would choose, on clusters of any size.
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

#: nothing waits for more jobs before the controller looks at a new one (3 s by default, slurm.conf(5)), and a
#: backfill pass and a look at the nodes that power down come every second
SLURM_CONF_LINES = ("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1",
            "SlurmctldParameters=power_save_interval=1")
_JOB_SCRIPT = "#!/bin/sh\n"


def submit_job(box: Sandbox, options: Sequence[str]) -> int:
    """Submit a job as the ordinary user; returns its number. SandboxError quotes sbatch where it refuses it."""
    done = subprocess.run(box.command(["sbatch", "--parsable", "--no-requeue", "--output=/dev/null", *options],
                                      directory=str(box.shared)),
                          input=_JOB_SCRIPT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise SandboxError(f"sbatch: {' '.join(done.stderr.split())[-300:]}")
    return int(done.stdout.split(";")[0])


def wait_for_nodes(box: Sandbox, job: int, timeout: float = 20.0) -> tuple[str, ...]:
    """The nodes of a job once it has some, in Slurm's order.

    Raises
    ------
    SandboxError : it still waits after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        state, names = job_state(box, job)
        if state not in ("PD", ""):
            return tuple(hostlist.expand_hostlist(names))
        if time.monotonic() > deadline:
            raise SandboxError(f"job {job} has no nodes after {timeout:g} s (state {state or 'unknown'})")
        time.sleep(0.05)


def job_state(box: Sandbox, job: int) -> tuple[str, str]:
    """State of a job in squeue's short form ("" where it is gone), and its nodes as a hostlist."""
    words = namespaces.run_on_host(box.pids[LOGIN], ["squeue", "-h", "-j", str(job), "-o", "%t %N"]).split()
    return (words[0], words[1] if len(words) > 1 else "") if words else ("", "")


def power_down_job(box: Sandbox, job: int, nodes: Sequence[str]) -> None:
    """End a job that may not be requeued; the nodes that it has can be chosen again some seconds later.

    Powering its nodes down ends it. To cancel it first would set them free for a moment, and the job that gets them
    in it would be ended, too.
    """
    if nodes:
        namespaces.run_on_host(box.pids[LOGIN], ["scontrol", "update", f"NodeName={hostlist.fold_hostlist(nodes)}",
                                    "State=POWER_DOWN_FORCE"])
    else:
        namespaces.run_on_host(box.pids[LOGIN], ["scancel", str(job)])


def wait_for_idle_nodes(box: Sandbox, nodes: Sequence[str], timeout: float = 20.0) -> None:
    """Return when all these nodes can be chosen again; SandboxError names one that cannot."""
    deadline = time.monotonic() + timeout
    while True:
        states = box.node_states()
        late = [node for node in nodes if states.get(node) != "idle~"]
        if not late:
            return
        if time.monotonic() > deadline:
            raise SandboxError(f"{late[0]} is {states.get(late[0])} after {timeout:g} s")
        time.sleep(0.1)
