"""Concurrent submitters: collisions of their choices, wait times, and completion time of the queue.

Submissions choose nodes independently, so concurrent submitters can choose the same nodes. The controller is real,
its nodes are cloud nodes, and time is scaled: jobs of seconds represent jobs of hours.

- one snapshot: 20 jobs placed on the same snapshot of a half-full cluster, each with its own seed as in a submission,
  and without seeds as negative control.
- burst: 20 concurrent submissions on such a cluster, with sbatch, with `slurmdl sbatch`, and as negative control with
  node lists that are never released.
- trace: 200 jobs over time, every second one placed, compared with the same trace with sbatch alone. Submitters,
  controller and the driver of the jobs share this machine. A choice takes 0.1 s of CPU time, which delays all jobs
  here, but not on a cluster. So the baseline is sbatch under the same load, with each choice computed and discarded.
  This baseline runs before and after; the difference between the two is noise.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks import cloud_nodes
from benchmarks.results import Row, make_row
from slurmdl.cluster import reader
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, SandboxError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.sandbox import lifecycle as sandbox_cluster
from slurmdl.sandbox import namespaces
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.sandbox.spec import LOGIN, SandboxSpec
from slurmdl.simulate import compare
from slurmdl.slurm import hostlist
from slurmdl.topology.source import tree_topology
from slurmdl.topology.topology import Topology

CPUS = 4
LEAVES, NODES = 10, 200
SUBMITTERS, BURST_SIZES, BURST_BUSY = 20, (1, 8), 0.5
#: seconds after which a waiting job of a burst counts as never started
MAX_BURST_WAIT_S = 15.0
JOBS, SIZES, DURATIONS, ARRIVALS = 200, (1, 40), (1.0, 10.0), 70.0
#: time limit of a trace in seconds
TRACE_TIMEOUT_S = 240.0
#: tolerance factor of comparisons with sbatch, and extra seconds for the wait of one job: the scheduler runs once a
#: second
SLACK, SCHEDULER_PASS_S = 1.05, 1.0
#: number of snapshots, bursts and traces, each with its own seed
SNAPSHOTS, BURSTS, TRACES = 10, 2, 2
VARIANTS = ("sbatch", "slurmdl", "control")
#: variants of a trace, in running order
TRACE_VARIANTS = ("sbatch", "choice discarded", "slurmdl", "choice discarded")


@dataclass(frozen=True)
class Job:
    """One job of a trace: arrival and duration in seconds, number of nodes, and whether slurmdl places it."""

    arrival: float
    duration: float
    nodes: int
    strategy: str
    placed: bool

    def argv(self, variant: str, name: str) -> list[str]:
        """Return the command that submits the job."""
        options = ["-J", name, "-o", "/dev/null", "-t", "5", f"-N{self.nodes}", f"-n{self.nodes}", "--exclusive",
                   "--no-requeue", "--wrap=true"]
        if variant == "sbatch" or not self.placed:
            return ["sbatch", *options]
        strategy = f"--dl-strategy={self.strategy}"
        if variant == "choice discarded":
            both = 'slurmdl place "$@" >/dev/null 2>&1; shift; exec sbatch "$@"'
            return ["sh", "-c", both, "sh", strategy, *options]
        bind = ["--dl-node-binding=nodelist"] if variant == "control" else []
        return ["slurmdl", "sbatch", *bind, strategy, *options]


def trace(jobs: int, sizes: tuple[int, int], arrivals: float, seed: int, every: int = 1) -> list[Job]:
    """Draw jobs of log-uniform sizes and durations that arrive within `arrivals` s; each `every`-th is placed."""
    generator = np.random.default_rng(seed)
    arrival = np.sort(generator.uniform(0, arrivals, jobs))
    nodes = np.exp(generator.uniform(np.log(sizes[0]), np.log(sizes[1] + 1), jobs)).astype(int)
    duration = np.exp(generator.uniform(np.log(DURATIONS[0]), np.log(DURATIONS[1]), jobs))
    strategy = np.where(nodes > 1, generator.choice(["allreduce", "gossip", "ps"], jobs), "gossip")
    return [Job(*values, i % every == 0) for i, values in enumerate(zip(
        arrival.tolist(), duration.tolist(), nodes.tolist(), strategy.tolist(), strict=True))]


@dataclass(frozen=True)
class Run:
    """Result of a trace.

    Attributes:
        waits: seconds from submission to start of each job; inf if it never started.
        submissions: seconds from arrival to submission of each job; long on a machine with few cores.
        nodes: nodes of each job.
        completion: seconds until the last job ends.
        lost: number of jobs that the controller ended early.
    """

    waits: tuple[float, ...]
    submissions: tuple[float, ...]
    nodes: tuple[tuple[str, ...], ...]
    completion: float
    lost: int


def run_trace(sandbox: Sandbox, jobs: Sequence[Job], variant: str, max_wait_s: float = TRACE_TIMEOUT_S) -> Run:
    """Submit the jobs on arrival, end each after its duration, and wait for all.

    A job that has not started within `max_wait_s` seconds after its submission is cancelled.
    """
    start = time.monotonic()
    queued: dict[int, float] = {}
    starts: dict[int, float] = {}
    nodes_by_job: dict[int, tuple[str, ...]] = {}
    children: list[subprocess.Popen[bytes]] = []
    done: set[int] = set()
    lost: set[int] = set()
    try:
        while len(done) < len(jobs):
            now = time.monotonic() - start
            while len(children) < len(jobs) and jobs[len(children)].arrival <= now:
                line = sandbox.command(jobs[len(children)].argv(variant, str(len(children))),
                                       directory=str(sandbox.shared))
                children.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                                 stderr=subprocess.DEVNULL))
            listed = set()
            # name, number, state and nodes of each job
            for name, number, state, *nodes in map(str.split, namespaces.run_on_host(
                    sandbox.pids[LOGIN], ["squeue", "-h", "-o", "%j %A %t %N"]).splitlines()):
                if not name.isdigit() or int(name) in done:
                    continue
                job, now = int(name), time.monotonic() - start
                listed.add(job)
                queued.setdefault(job, now)
                if state == "CF" and job not in starts:
                    starts[job], nodes_by_job[job] = now, tuple(hostlist.expand_hostlist(nodes[0]))
                is_late = now - queued[job] > max_wait_s and job not in starts
                if is_late or (job in starts and now - starts[job] >= jobs[job].duration):
                    cloud_nodes.power_down_job(sandbox, int(number), nodes_by_job.get(job, ()))
                    done.add(job)
            lost |= set(starts) - listed - done
            done |= lost
            if time.monotonic() - start > TRACE_TIMEOUT_S:
                raise SandboxError(
                    f"trace: {len(jobs) - len(done)} jobs did not complete within {TRACE_TIMEOUT_S:g} s")
            time.sleep(0.1)
        completion = time.monotonic() - start
    finally:
        for child in children:
            if child.wait(timeout=60):
                raise SandboxError("trace: sbatch rejected a job")
    cloud_nodes.wait_for_idle_nodes(sandbox, sorted(set(itertools.chain.from_iterable(nodes_by_job.values()))))
    return Run(tuple(starts.get(i, np.inf) - queued[i] for i in range(len(jobs))),
               tuple(queued[i] - job.arrival for i, job in enumerate(jobs)),
               tuple(nodes_by_job.get(i, ()) for i in range(len(jobs))), completion, len(lost))


def rows(seed: int = 0) -> Iterator[Row]:
    """Yield the rows of snapshots, bursts and traces; print one line if there is no cluster."""
    spec = SandboxSpec(f"submitters-{os.getpid()}", tree_topology((1, LEAVES, NODES)), cpus=CPUS,
                       cloud_nodes=True, zone_features=False, slurm_conf_lines=cloud_nodes.SLURM_CONF_LINES)
    try:
        sandbox = sandbox_cluster.sandbox_up(spec)
    except SandboxError as error:
        print(f"concurrent submitters: skipped: {error}", file=sys.stderr, flush=True)
        return
    try:
        yield from _traces(sandbox, [trace(JOBS, SIZES, ARRIVALS, seed + i, every=2) for i in range(TRACES)])
        busy = compare.occupied_nodes(spec.topology, BURST_BUSY, seed)
        others = [spec.topology.nodes[i] for i in np.flatnonzero(busy)]
        cloud_nodes.wait_for_nodes(sandbox, cloud_nodes.submit_job(
            sandbox, ["-N", str(len(others)), "--exclusive", "-w", hostlist.fold_hostlist(others)]))
        bursts = [trace(SUBMITTERS, BURST_SIZES, 0.0, seed + i) for i in range(max(SNAPSHOTS, BURSTS))]
        yield from _snapshots(sandbox, bursts[:SNAPSHOTS])
        yield from _bursts(sandbox, bursts[:BURSTS])
    finally:
        sandbox_cluster.sandbox_down(spec.name)


@dataclass
class Collisions:
    """Collisions of each burst on one snapshot.

    `pairs` counts pairs of choices that share a node, `colliding` choices that share a node with an earlier one.
    """

    pairs: list[float] = field(default_factory=list)
    colliding: list[float] = field(default_factory=list)


def collisions(bursts: Sequence[Sequence[Job]], cluster: ClusterSnapshot,
               topology: Topology) -> tuple[Collisions, Collisions]:
    """Count collisions with a seed for each submission, and without seeds."""
    counts = Collisions(), Collisions()
    for number, jobs in enumerate(bursts):
        seeds = np.random.default_rng(number).integers(1, 2**32, len(jobs)).tolist()
        for counter, submission_seeds in zip(counts, (seeds, [0] * len(jobs)), strict=True):
            chosen = [_choose_nodes(job, job_seed, cluster, topology)
                      for job, job_seed in zip(jobs, submission_seeds, strict=True)]
            shares_node = [[bool(nodes & earlier) for earlier in chosen[:i]] for i, nodes in enumerate(chosen)]
            counter.pairs.append(float(sum(map(sum, shares_node))))
            counter.colliding.append(float(sum(map(any, shares_node))))
    return counts


def _choose_nodes(job: Job, seed: int, cluster: ClusterSnapshot, topology: Topology) -> set[str]:
    request = JobRequest(DlOptions(strategy=job.strategy, ps=int(job.strategy == "ps")), (job.nodes, job.nodes),
                         exclusive=True, seed=seed)
    try:
        return set(place_job(request, cluster, topology, LinkScores()).nodes)
    except PlacementError:
        return set()


def _snapshots(sandbox: Sandbox, bursts: Sequence[Sequence[Job]]) -> Iterator[Row]:
    text = namespaces.run_on_host(sandbox.pids[LOGIN], ["scontrol", "-o", "-d"],
                                  stdin="show nodes\nshow partitions\n")
    seeded, plain = collisions(bursts, reader.parse_snapshot(text), sandbox.spec.topology)
    count = len(bursts[0])
    yield make_row(f"one snapshot: pairs of {count} choices that share a node", seeded.pairs, "pairs",
                   baseline=float(np.median(plain.pairs)))
    yield make_row(f"control: one snapshot: pairs of {count} choices that share a node, without seeds",
                   plain.pairs, "pairs", baseline=float(np.median(seeded.pairs)),
                   target="above those with seeds",
                   met=float(np.median(plain.pairs)) > float(np.median(seeded.pairs)))
    # not a control: if jobs request most of the free nodes, almost every choice shares a node with an earlier one
    yield make_row(f"one snapshot: of {count} choices, number that share a node with an earlier one (baseline: "
                   "without seeds)", seeded.colliding, "jobs", baseline=float(np.median(plain.colliding)))


def _bursts(sandbox: Sandbox, bursts: Sequence[Sequence[Job]]) -> Iterator[Row]:
    runs_by_variant: dict[str, list[Run]] = {variant: [] for variant in VARIANTS}
    for number, jobs in enumerate(bursts):
        for variant in VARIANTS:
            print(f"concurrent submitters: burst {number + 1} of {len(bursts)}, {variant}", file=sys.stderr,
                  flush=True)
            runs_by_variant[variant].append(run_trace(sandbox, jobs, variant, MAX_BURST_WAIT_S))
    waits = {variant: [[min(wait, MAX_BURST_WAIT_S) for wait in run.waits] for run in runs] for variant,
             runs in runs_by_variant.items()}
    not_started = sum(wait == np.inf for run in runs_by_variant["slurmdl"] for wait in run.waits)
    yield make_row("burst: jobs that never start, slurmdl", [not_started], "jobs", target="none", met=not not_started)
    for name, metric_of in (("median", np.median), ("longest", np.max)):
        plain, placed, control = ([float(metric_of(run)) for run in waits[variant]] for variant in VARIANTS)
        max_wait = SLACK * float(np.median(plain)) + SCHEDULER_PASS_S
        yield make_row(f"burst: {name} wait, slurmdl", placed, "s", baseline=float(np.median(plain)),
                       target=f"at most {max_wait:.3g} s: sbatch's wait plus {SLACK - 1:.0%} and one pass of the "
                       "scheduler",
                       met=float(np.median(placed)) <= max_wait)
    yield make_row("control: burst: longest wait with node lists that are never released", control, "s",
                   baseline=float(np.median(placed)), target="above slurmdl",
                   met=float(np.median(control)) > float(np.median(placed)))


@dataclass(frozen=True)
class _TraceRuns:
    """One trace, run with each of TRACE_VARIANTS."""

    jobs: Sequence[Job]
    plain: Run
    before: Run
    placed: Run
    after: Run


def _traces(sandbox: Sandbox, traces: Sequence[Sequence[Job]]) -> Iterator[Row]:
    runs_by_trace = []
    for number, jobs in enumerate(traces):
        runs = []
        for variant in TRACE_VARIANTS:
            print(f"concurrent submitters: trace {number + 1} of {len(traces)}, {variant}", file=sys.stderr,
                  flush=True)
            runs.append(run_trace(sandbox, jobs, variant))
        runs_by_trace.append(_TraceRuns(jobs, *runs))
    yield from _comparison_rows(f"trace of {len(traces[0])} jobs: completion of the queue", runs_by_trace,
                                lambda run, _: run.completion, "s", 0.0)
    yield make_row("trace: jobs that the controller ended early",
                   [sum(run.lost for trace in runs_by_trace
                        for run in (trace.plain, trace.before, trace.placed, trace.after))], "jobs")
    for owner, placed in (("placed jobs", True), ("other users' jobs", False)):
        yield from _user_rows(sandbox.spec.topology, owner, placed, runs_by_trace)


def _user_rows(topology: Topology, owner: str, placed: bool, runs_by_trace: Sequence[_TraceRuns]) -> Iterator[Row]:
    def select(values: Sequence[float], jobs: Sequence[Job]) -> list[float]:
        return [value for value, job in zip(values, jobs, strict=True) if job.placed is placed]

    def leaves(run: Run, jobs: Sequence[Job]) -> float:
        return float(np.mean(select([_leaves(topology, nodes) for nodes in run.nodes], jobs)))

    yield from _comparison_rows(f"trace: median seconds to submit {owner}", runs_by_trace,
                                lambda run, jobs: float(np.median(select(run.submissions, jobs))), "s")
    yield from _comparison_rows(f"trace: mean wait of {owner}", runs_by_trace,
                                lambda run, jobs: float(np.mean(select(run.waits, jobs))), "s", 0.0)
    yield from _comparison_rows(f"trace: median wait of {owner}", runs_by_trace,
                                lambda run, jobs: float(np.median(select(run.waits, jobs))), "s", SCHEDULER_PASS_S)
    yield from _comparison_rows(f"trace: longest wait of {owner}", runs_by_trace,
                                lambda run, jobs: max(select(run.waits, jobs)), "s", SCHEDULER_PASS_S)
    yield from _comparison_rows(f"trace: mean leaves of {owner}", runs_by_trace, leaves, "leaves")


def _comparison_rows(metric: str, runs_by_trace: Sequence[_TraceRuns],
                     metric_of: Callable[[Run, Sequence[Job]], float], unit: str,
                     allowance: float | None = None) -> Iterator[Row]:
    """Yield a metric with slurmdl, relative to sbatch under the same load, and with sbatch alone.

    The target is SLACK times the baseline plus `allowance`; no target if `allowance` is None.
    """
    placed = [metric_of(trace.placed, trace.jobs) for trace in runs_by_trace]
    pairs = [(metric_of(trace.before, trace.jobs), metric_of(trace.after, trace.jobs)) for trace in runs_by_trace]
    loaded = float(np.median(pairs))
    yield make_row(f"{metric}, sbatch alone", [metric_of(trace.plain, trace.jobs) for trace in runs_by_trace], unit,
                   baseline=loaded)
    if allowance is None:
        yield make_row(f"{metric}, slurmdl", placed, unit, baseline=loaded)
        return
    max_value, noise = SLACK * loaded + allowance, max(abs(first - second) for first, second in pairs)
    yield make_row(f"{metric}, slurmdl", placed, unit, baseline=loaded, met=float(np.median(placed)) <= max_value,
                   target=f"at most {max_value:.4g} {unit} (sbatch twice: up to {noise:.3g} {unit} apart)")


def _leaves(topology: Topology, nodes: Sequence[str]) -> int:
    return len({topology.leaf_of(node) for node in nodes})
