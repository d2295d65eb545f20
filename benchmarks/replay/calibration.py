"""The same 500 jobs through a real slurmctld with 1,000 virtual nodes, and through the simulation.

The jobs are generated and compressed: the mean run time is MEAN_RUN_S seconds, limits are whole minutes, as in Slurm.
Slurm runs with EASY backfill (`controller.SCHEDULER_LINES`). Its delay (`measure_timing`) is a parameter of the
simulation here, and only here; rows without it are not judged.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Event

import numpy as np

from benchmarks.replay.controller import Controller, start_controller
from benchmarks.results import Row, make_row
from slurmdl.errors import SandboxError
from slurmdl.history.replay import ReplaySettings, random_nodes
from slurmdl.history.scheduler import Communication, Machine, Schedule, SchedulerTiming, Simulation
from slurmdl.history.traces import JobTrace, generate_lublin_trace
from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.slurm import hostlist
from slurmdl.topology.source import block_topology, tree_topology
from slurmdl.topology.topology import Topology

JOBS, NODES, LOAD, MEAN_RUN_S = 500, 1000, 1.0, 14.0
POLL_S = 0.1
MAX_ERROR = 0.1
_TIMEOUT_S = 2400.0
_SCRIPT = "#!/bin/sh\n"


@dataclass(frozen=True)
class Observed:
    """What the controller did; arrays of shape (jobs,), times in s since the first submission."""

    submit_s: FloatArray
    start_s: FloatArray
    zones: IntArray
    utilization: float


def topologies() -> dict[str, Topology]:
    """Return 1,000 nodes as a tree of three levels and as blocks."""
    return {"tree": tree_topology((1, 5, 50, NODES)),
            "block": block_topology((50, NODES), (20, 80, 320))}


def rows(seed: int) -> Iterator[Row]:
    """Yield the errors of both topologies, whose controllers run at the same time; one that this machine cannot run
    is skipped with a message."""
    stop = Event()
    with ThreadPoolExecutor() as executor:
        try:
            runs = {kind: executor.submit(_run_controller, kind, topology, seed, stop)
                    for kind, topology in topologies().items()}
            wait(runs.values())
        finally:
            stop.set()  # after an interrupt the threads end their controllers
    for kind, run in runs.items():
        try:
            yield from compare(*run.result())
        except SandboxError as error:
            print(f"calibration: {kind} skipped: {error}", file=sys.stderr, flush=True)


def _run_controller(kind: str, topology: Topology, seed: int,
                    stop: Event) -> tuple[str, Observed, JobTrace, Machine, SchedulerTiming]:
    controller = start_controller(topology)
    try:
        machine = ReplaySettings(topology, ("slurm",)).machine()
        trace = compressed_trace(machine, seed)
        print(f"calibration: {kind}: Slurm {controller.release}, {len(trace)} jobs in {trace.submit_s[-1]:.0f} s, "
              "and as long as the last ones take", file=sys.stderr, flush=True)
        observed = submit_trace(controller, topology, trace, stop)
        timing = measure_timing(observed, trace, machine)
        print(f"calibration: {kind}: delay of the controller {timing.start_s:.2f} s", file=sys.stderr, flush=True)
        return f"{kind}, Slurm {controller.release}", observed, trace, machine, timing
    finally:
        controller.close()


def compressed_trace(machine: Machine, seed: int) -> JobTrace:
    """Generated jobs with a mean run time of MEAN_RUN_S and limits in whole minutes."""
    trace = generate_lublin_trace(JOBS, NODES, LOAD, seed)
    factor = MEAN_RUN_S / float(trace.run_s.mean())
    run = np.maximum(1.0, np.round(trace.run_s * factor))
    limit = np.ceil(np.maximum(run, trace.limit_s * factor) / 60) * 60
    trace = replace(trace, run_s=run, limit_s=limit, submit_s=np.round(trace.submit_s * factor, 1))
    kept = trace.selected(~machine.never_starts(trace))
    # rounding changed the load
    return kept.scaled_to_load(LOAD, NODES)


def measure_timing(observed: Observed, trace: JobTrace, machine: Machine) -> SchedulerTiming:
    """The controller's delay: the median wait of the jobs that need not wait in the simulation without delays."""
    schedule = _simulate(_as_submitted(trace, observed), machine, SchedulerTiming())
    at_once = schedule.start_s - (observed.submit_s - observed.submit_s[0]) < 1e-6
    return SchedulerTiming(backfill_interval_s=1.0,
                           start_s=float(np.median((observed.start_s - observed.submit_s)[at_once])))


def _as_submitted(trace: JobTrace, observed: Observed) -> JobTrace:
    return replace(trace, submit_s=observed.submit_s - observed.submit_s[0])


def _submit(controller: Controller, nodes: int, limit_min: int) -> int:
    return int(controller.run(["sbatch", "--parsable", "--no-requeue", "--output=/dev/null", "--exclusive",
                               f"-N{nodes}", f"-t{limit_min}"], stdin=_SCRIPT).split(";")[0])


def submit_trace(controller: Controller, topology: Topology, trace: JobTrace, stop: Event) -> Observed:
    """Submit the jobs at their times, cancel each one after its run time, and record the starts.

    Raises SandboxError if it takes too long, or if `stop` is set.
    """
    number: dict[int, int] = {}
    submit, start = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    zones = np.zeros(len(trace), np.int64)
    ending: list[tuple[float, int, int]] = []
    begin, next_job, running = time.monotonic(), 0, set[int]()
    end = np.full(len(trace), np.nan)
    while next_job < len(trace) or np.isnan(end).any():
        now = time.monotonic() - begin
        if now > _TIMEOUT_S or stop.is_set():
            raise SandboxError(f"{int(np.isnan(end).sum())} jobs have not ended after {_TIMEOUT_S:g} s")
        while next_job < len(trace) and trace.submit_s[next_job] <= now:
            job_id = _submit(controller, int(trace.nodes[next_job]), int(trace.limit_s[next_job] // 60))
            submit[next_job] = time.monotonic() - begin
            number[job_id] = next_job
            next_job += 1
        text = controller.run(["squeue", "-h", "-t", "CF,R", "-o", "%i %N"])
        seen_s = time.monotonic() - begin
        for started_id, nodes in (line.split() for line in text.splitlines()):
            job = number[int(started_id)]
            if job not in running:
                running.add(job)
                start[job] = seen_s
                zones[job] = len({topology.leaf_of(name) for name in hostlist.expand_hostlist(nodes)})
                ending.append((seen_s + float(trace.run_s[job]), int(started_id), job))
        due = [entry for entry in ending if entry[0] <= time.monotonic() - begin]
        if due:
            controller.run(["scancel", *(str(due_id) for _, due_id, _ in due)])
            for entry in due:
                end[entry[2]] = time.monotonic() - begin
            ending = [entry for entry in ending if entry not in due]
        time.sleep(POLL_S)
    # node-seconds until the last submission, as the simulation counts them
    last = float(submit[-1])
    busy = float((trace.nodes * (np.minimum(end, last) - np.minimum(start, last))).sum())
    return Observed(submit, start, zones, busy / (last * NODES))


def compare(name: str, observed: Observed, trace: JobTrace, machine: Machine,
            timing: SchedulerTiming) -> Iterator[Row]:
    """Yield the errors of the simulation, with and without the controller's delay; control: random nodes."""
    real_wait, real_zones = float((observed.start_s - observed.submit_s).mean()), float(observed.zones.mean())
    trace = _as_submitted(trace, observed)
    for label, used in (("", timing), (", without the controller's delay", SchedulerTiming())):
        schedule = _simulate(trace, machine, used)
        wait_s = float((schedule.start_s - trace.submit_s).mean())
        for metric, value, real, unit in (("mean wait", wait_s, real_wait, "s"),
                                          ("utilisation", schedule.utilization, observed.utilization, "share"),
                                          ("leaf zones per job", float(schedule.zones.mean()), real_zones, "zones")):
            error = abs(value / real - 1)
            judged = not label
            yield make_row(f"{name}: {metric} of the simulation{label} (baseline: slurmctld), error {error:.1%}",
                           [value], unit, baseline=real, target=f"within {MAX_ERROR:.0%}" if judged else "",
                           met=error <= MAX_ERROR if judged else None)
        if not label:
            same = Counter((schedule.zones == observed.zones).tolist())[True] / len(trace)
            yield make_row(f"{name}: jobs with as many leaf zones as by slurmctld", [same], "share")
    control = _simulate(trace, machine, timing, seed=1)
    ratio = float(control.zones.mean()) / real_zones
    yield make_row(f"control: {name}: leaf zones per job of random nodes over those of slurmctld", [ratio], "times",
                   baseline=1.0, target=f"off by more than {MAX_ERROR:.0%}", met=abs(ratio - 1) > MAX_ERROR)


def _simulate(trace: JobTrace, machine: Machine, timing: SchedulerTiming, seed: int = 0) -> Schedule:
    none = np.zeros(len(trace), bool)
    choice = random_nodes(machine.rule, seed) if seed else machine.rule.choose
    return Simulation(trace, machine, choice, none, none, Communication(0.0, 0.0, True), timing).run()
