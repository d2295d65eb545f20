"""Faults injected into a node of a sandbox, and what `slurmdl preflight` makes of them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks import sandbox_faults
from benchmarks.results import Row, make_row
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle, namespaces
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, SEEDS, QUICK_SEEDS = 8, 20, 10
#: budget of a preflight; its duration is another second or two for the last step
BUDGET_S = 10
#: of the two cores of the machine a node has at most a quarter of a core while all nodes run the CPU check
CPU_SHARE = 0.1
GOAL_FOUND, GOAL_FALSE, GOAL_SECONDS = 0.99, 0.01, 10.0
_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
_BUSY_JOB = "busy"
#: sets the clock of the tasks of a node with this file an hour ahead
_TASK_PROLOG = ("#!/bin/sh\n[ ! -e /tmp/clock-fault ] || "
                f"printf 'export LD_PRELOAD={_FAKETIME}\\nexport FAKETIME=+1h\\n'\n")

Fault = Callable[[lifecycle.Sandbox, str], AbstractContextManager[None]]


@contextmanager
def slow_cpus(sandbox: lifecycle.Sandbox, node: str) -> Iterator[None]:
    sandbox.limit_cpu(node, CPU_SHARE)
    try:
        yield
    finally:
        sandbox.limit_cpu(node, 0)


def _shaped(**shape: float) -> Fault:
    @contextmanager
    def fault(sandbox: lifecycle.Sandbox, node: str) -> Iterator[None]:
        sandbox.shape_link(node, **shape)
        try:
            yield
        finally:
            sandbox.shape_link(node, rate=sandbox.spec.node_rate, delay=0.0, loss=0.0)

    return fault


@contextmanager
def stopped_slurmd(sandbox: lifecycle.Sandbox, node: str) -> Iterator[None]:
    pid = sandbox_faults.daemon_pid(sandbox, node)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def full_memory(sandbox: lifecycle.Sandbox, node: str) -> Iterator[None]:
    """All processes of the node are in a control group with 150 MB of memory left."""
    group = Path("/sys/fs/cgroup/memory") / f"slurmdl-bench-{sandbox.spec.name}.{node}"
    namespace = os.readlink(f"/proc/{sandbox.pids[node]}/ns/pid")
    group.mkdir()
    try:
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and os.readlink(process / "ns/pid") == namespace:
                    (group / "cgroup.procs").write_text(process.name)
            except OSError:
                continue  # it has ended
        usage = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(usage + 150 * 10**6))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


@contextmanager
def full_disk(sandbox: lifecycle.Sandbox, node: str) -> Iterator[None]:
    """A file system of 50 MB is mounted on the node's /tmp."""
    namespaces.run_on_host(sandbox.pids[node], ["mount", "-t", "tmpfs", "-o", "size=50m,mode=1777", "tmpfs", "/tmp"])
    try:
        yield
    finally:
        namespaces.run_on_host(sandbox.pids[node], ["umount", "--lazy", "/tmp"])


@contextmanager
def wrong_clock(sandbox: lifecycle.Sandbox, node: str) -> Iterator[None]:
    namespaces.run_on_host(sandbox.pids[node], ["touch", "/tmp/clock-fault"])
    try:
        yield
    finally:
        namespaces.run_on_host(sandbox.pids[node], ["rm", "/tmp/clock-fault"])


#: the fault whose job ends on the node only minutes later, when the controller asks for it again
STOPPED = "stopped slurmd"
FAULTS: dict[str, Fault] = {
    f"CPU quota of {CPU_SHARE} of a core": slow_cpus,
    "link at a tenth": _shaped(rate=1e8),
    "2 % loss, 10 ms delay": _shaped(delay=0.01, loss=0.02),
    STOPPED: stopped_slurmd,
    "memory filled": full_memory,
    "full disk": full_disk,
    "clock an hour ahead": wrong_clock,
}


@contextmanager
def busy_nodes(sandbox: lifecycle.Sandbox) -> Iterator[None]:
    """Other jobs compute on one CPU of every second node."""
    names = ",".join(sandbox.spec.node_hosts[::2])
    count = len(sandbox.spec.node_hosts[::2])
    options = [f"--job-name={_BUSY_JOB}", "-n", str(count), "-N", str(count), "-w", names]
    job = subprocess.Popen(sandbox.command(["srun", *options, sys.executable, "-c", "while True: pass"]))
    time.sleep(3)
    try:
        yield
    finally:
        # else its tasks may run on beside the next preflight's, and all CPUs of a node are taken
        subprocess.run(sandbox.command(["scancel", "--name", _BUSY_JOB]), check=True)
        job.wait(60)


@dataclass(frozen=True)
class Outcome:
    """One preflight: the nodes that it called bad, why, and its duration without the start of the job."""

    bad: Mapping[str, str]
    seconds: float


def run_preflight(sandbox: lifecycle.Sandbox) -> Outcome:
    report = sandbox.shared / "report.jsonl"
    report.unlink(missing_ok=True)
    argv = ["salloc", "--quiet", f"-N{NODES}", f"-n{NODES}", "slurmdl", "preflight", f"--budget={BUDGET_S}s",
            "--output", str(report)]
    _wait_for_nodes(sandbox)
    done = subprocess.run(sandbox.command(argv, directory=str(sandbox.shared)), capture_output=True, text=True,
                          check=False, timeout=300)
    if not report.exists():
        raise SandboxError(f"preflight: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    reports = map(json.loads, report.read_text().splitlines())
    seconds = re.search(r"nodes bad, ([\d.]+) s$", done.stdout)
    if not seconds:
        raise SandboxError(f"preflight: its output ends with {done.stdout[-80:]!r}")
    return Outcome({entry["node"]: "; ".join(entry["faults"]) for entry in reports if entry["bad"]},
                   float(seconds[1]))


def _wait_for_nodes(sandbox: lifecycle.Sandbox) -> None:
    """Wait until no node is busy with the end of an earlier job."""
    deadline = time.monotonic() + 300
    while busy := [node for node, state in sandbox.node_states().items() if state.startswith("completing")]:
        if time.monotonic() > deadline:
            raise SandboxError(f"{busy[0]}: the end of its job lasts more than 300 s")
        time.sleep(0.5)


def start_sandbox() -> lifecycle.Sandbox:
    spec = SandboxSpec(f"preflight-{os.getpid()}", round_robin_topology(NODES, 2),
                       slurm_conf_lines=("SlurmdTimeout=600", "TaskProlog=/etc/slurm/task_prolog"),
                       config_files={"task_prolog": _TASK_PROLOG})
    sandbox = lifecycle.sandbox_up(spec)
    (sandbox.root / "slurm/task_prolog").chmod(0o755)
    return sandbox


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rows of each fault: share found, with shuffled names as the control, false alarms, and seconds."""
    seeds = range(seed, seed + (QUICK_SEEDS if quick else SEEDS))
    sandbox = start_sandbox()
    try:
        nodes = sandbox.spec.node_hosts
        for name, fault in FAULTS.items():
            found, shuffled, others, seconds = [], [], [], []
            for each in seeds:
                random_nodes = random.Random(f"{name} {each}").sample(nodes, 2)
                with fault(sandbox, random_nodes[0]):
                    outcome = run_preflight(sandbox)
                print(f"{name} on {random_nodes[0]}: {outcome.bad}, {outcome.seconds:.1f} s", file=sys.stderr)
                found.append(float(random_nodes[0] in outcome.bad))
                shuffled.append(float(random_nodes[1] in outcome.bad))
                others.append(len(set(outcome.bad) - {random_nodes[0]}) / (NODES - 1))
                seconds.append(outcome.seconds)
                if name == STOPPED:
                    lifecycle.sandbox_down(sandbox.spec.name)
                    sandbox = start_sandbox()
            yield from _share_rows(name, found, shuffled, others)
            yield make_row(f"{name}: time of the preflight", seconds, "s")
        for name, load in (("clean", nullcontext), ("busy", busy_nodes)):
            outcomes = []
            for _ in seeds:
                with load(sandbox):
                    outcomes.append(run_preflight(sandbox))
                print(f"{name}: {outcomes[-1].bad}, {outcomes[-1].seconds:.1f} s", file=sys.stderr)
            alarms = sum(len(outcome.bad) for outcome in outcomes) / (NODES * len(outcomes))
            seconds = [outcome.seconds for outcome in outcomes]
            has_goal = name == "clean"
            yield make_row(f"{name} cluster: nodes called bad", [alarms], "share",
                           target=f"at most {GOAL_FALSE:.0%}" * has_goal,
                           met=alarms <= GOAL_FALSE if has_goal else None)
            yield make_row(f"{name} cluster: time of the preflight of {NODES} nodes", seconds, "s",
                           target=f"at most {GOAL_SECONDS:g} s" * has_goal,
                           met=median(seconds) <= GOAL_SECONDS if has_goal else None)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)


def _share_rows(name: str, found: list[float], shuffled: list[float], others: list[float]) -> Iterator[Row]:
    yield make_row(f"{name}: found", [mean(found)], "share", baseline=mean(shuffled),
                   target=f"at least {GOAL_FOUND:.0%} (baseline: shuffled names)", met=mean(found) >= GOAL_FOUND)
    yield make_row(f"{name}: other nodes called bad", [mean(others)], "share")
