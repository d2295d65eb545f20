"""Many submitters at once: how often their choices meet, how long they wait, and when the queue is done.

Each submission decides by itself, so that submitters who look at the same time may choose the same nodes. The
controller is real, its nodes are a cloud, and time is scaled: jobs of seconds stand for jobs of hours.

- one snapshot: 20 jobs placed on the same snapshot of a cluster that others half fill.
- burst: 20 submissions at once on such a cluster, with sbatch, with `slurmdl sbatch`, and as the negative control
  with node lists that are never taken back.
- trace: 200 jobs that come one after the other, every second one placed, beside the same trace with sbatch alone.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slurmdl.bench import load, results
from slurmdl.bench.results import Row
from slurmdl.cluster import scontrol
from slurmdl.errors import PlacementError, SandboxError
from slurmdl.network.model import LinkScores
from slurmdl.placement.place import place
from slurmdl.request import DlOptions, JobRequest
from slurmdl.sandbox import cloud, hosts
from slurmdl.sandbox import cluster as sandbox
from slurmdl.sandbox.cluster import Sandbox
from slurmdl.sandbox.spec import LOGIN, Spec
from slurmdl.topology import example, hostlist
from slurmdl.topology.model import Topology

CPUS = 4
LEAVES, NODES = 10, 200
SUBMITTERS, BURST_SIZES, BURST_BUSY = 20, (1, 8), 0.5
#: seconds that a job of a burst may wait until it counts as waiting for ever
PATIENCE = 15.0
JOBS, SIZES, DURATIONS, ARRIVALS = 200, (1, 40), (1.0, 10.0), 70.0
#: seconds for a trace as a whole
LIMIT = 240.0
#: what a comparison with sbatch forgives: passes of the scheduler come once a second, on a machine with few cores
SLACK = 1.05
WAYS = ("sbatch", "slurmdl", "control")


@dataclass(frozen=True)
class Job:
    """One job of a trace: when it comes and how long it runs (s), its nodes, and whether we place it."""

    arrival: float
    duration: float
    nodes: int
    strategy: str
    placed: bool

    def argv(self, way: str, name: str) -> list[str]:
        """The command that submits it."""
        options = ["-J", name, "-o", "/dev/null", "-t", "5", f"-N{self.nodes}", f"-n{self.nodes}", "--exclusive",
                   "--no-requeue", "--wrap=true"]
        if way == "sbatch" or not self.placed:
            return ["sbatch", *options]
        bind = ["--dl-bind=pin"] if way == "control" else []
        return ["slurmdl", "sbatch", *bind, f"--dl-strategy={self.strategy}", *options]


def trace(jobs: int, sizes: tuple[int, int], arrivals: float, seed: int, every: int = 1) -> list[Job]:
    """So many jobs of log-uniform sizes and durations that come within `arrivals` seconds; each `every`-th ours."""
    generator = np.random.default_rng(seed)
    arrival = np.sort(generator.uniform(0, arrivals, jobs))
    nodes = np.exp(generator.uniform(np.log(sizes[0]), np.log(sizes[1] + 1), jobs)).astype(int)
    duration = np.exp(generator.uniform(np.log(DURATIONS[0]), np.log(DURATIONS[1]), jobs))
    strategy = np.where(nodes > 1, generator.choice(["allreduce", "gossip", "ps"], jobs), "gossip")
    return [Job(*values, i % every == 0) for i, values in enumerate(zip(
        arrival.tolist(), duration.tolist(), nodes.tolist(), strategy.tolist(), strict=True))]


@dataclass(frozen=True)
class Run:
    """What a trace did.

    Attributes
    ----------
    waits : seconds from the queue to the start of each job, inf where it never started.
    submissions : seconds from arrival to the queue, which on a machine with few cores are many.
    nodes : of each job.
    completion : seconds to the last end.
    lost : jobs that ended before their time, which the controller did, not we.
    """

    waits: tuple[float, ...]
    submissions: tuple[float, ...]
    nodes: tuple[tuple[str, ...], ...]
    completion: float
    lost: int


def play(box: Sandbox, jobs: Sequence[Job], way: str, patience: float = LIMIT) -> Run:
    """Submit the jobs when they come, end each when it has run long enough, and wait for all.

    A job that has not started `patience` seconds after it was queued is cancelled.
    """
    began = time.monotonic()
    queued: dict[int, float] = {}
    starts: dict[int, float] = {}
    held: dict[int, tuple[str, ...]] = {}
    children: list[subprocess.Popen[bytes]] = []
    done: set[int] = set()
    lost: set[int] = set()
    try:
        while len(done) < len(jobs):
            now = time.monotonic() - began
            while len(children) < len(jobs) and jobs[len(children)].arrival <= now:
                line = box.command(jobs[len(children)].argv(way, str(len(children))), directory=str(box.shared))
                children.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                                 stderr=subprocess.DEVNULL))
            listed = set()
            # name, number, state and nodes of each job
            for name, number, state, *nodes in map(str.split, hosts.run(
                    box.pids[LOGIN], ["squeue", "-h", "-o", "%j %A %t %N"]).splitlines()):
                if not name.isdigit() or int(name) in done:
                    continue
                job, now = int(name), time.monotonic() - began
                listed.add(job)
                queued.setdefault(job, now)
                if state == "CF" and job not in starts:
                    starts[job], held[job] = now, tuple(hostlist.expand(nodes[0]))
                late = now - queued[job] > patience and job not in starts
                if late or (job in starts and now - starts[job] >= jobs[job].duration):
                    cloud.end(box, int(number), held.get(job, ()))
                    done.add(job)
            lost |= set(starts) - listed - done
            done |= lost
            if time.monotonic() - began > LIMIT:
                raise SandboxError(f"{len(jobs) - len(done)} jobs of a trace are not done after {LIMIT:g} s")
            time.sleep(0.1)
        completion = time.monotonic() - began
    finally:
        for child in children:
            if child.wait(timeout=60):
                raise SandboxError("a job of a trace was refused")
    cloud.wait_idle(box, sorted(set(itertools.chain.from_iterable(held.values()))))
    return Run(tuple(starts.get(i, np.inf) - queued[i] for i in range(len(jobs))),
               tuple(queued[i] - job.arrival for i, job in enumerate(jobs)),
               tuple(held.get(i, ()) for i in range(len(jobs))), completion, len(lost))


def rows(seed: int = 0) -> Iterator[Row]:
    """One snapshot, burst and trace. Says in one line where there is no cluster to submit to."""
    spec = Spec(f"herding-{os.getpid()}", example.tree((1, LEAVES, NODES)), cpus=CPUS, cloud=True,
                zone_features=False, settings=cloud.SETTINGS)
    try:
        box = sandbox.up(spec)
    except SandboxError as error:
        print(f"no herding measured: {error}", flush=True)
        return
    try:
        yield from _trace(box, seed)
        busy = load.busy_nodes(spec.topology, BURST_BUSY, seed)
        others = [spec.topology.nodes[i] for i in np.flatnonzero(busy)]
        cloud.nodes_of(box, cloud.submit(box, ["-N", str(len(others)), "--exclusive", "-w", hostlist.fold(others)]))
        jobs = trace(SUBMITTERS, BURST_SIZES, 0.0, seed)
        yield from _snapshot(box, jobs)
        yield from _burst(box, jobs)
    finally:
        sandbox.down(spec.name)


def _snapshot(box: Sandbox, jobs: Sequence[Job]) -> Iterator[Row]:
    """How many pairs of choices that were made on one snapshot share a node."""
    text = hosts.run(box.pids[LOGIN], ["scontrol", "-o", "-d"], stdin="show nodes\nshow partitions\n")
    cluster = scontrol.parse(text)
    chosen: list[set[str]] = []
    for job in jobs:
        request = JobRequest(DlOptions(strategy=job.strategy, ps=int(job.strategy == "ps")), (job.nodes, job.nodes),
                             exclusive=True)
        try:
            chosen.append(set(place(request, cluster, box.spec.topology, LinkScores()).nodes))
        except PlacementError:
            chosen.append(set())
    pairs = [bool(one & other) for one, other in itertools.combinations(chosen, 2)]
    yield results.row(f"one snapshot: pairs of {len(jobs)} choices that share a node", [sum(pairs)], "pairs",
                      baseline=float(len(pairs)))


def _burst(box: Sandbox, jobs: Sequence[Job]) -> Iterator[Row]:
    found = {way: play(box, jobs, way, PATIENCE) for way in WAYS}
    waits = {way: [min(wait, PATIENCE) for wait in run.waits] for way, run in found.items()}
    plain, ours, control = (max(waits[way]) for way in WAYS)
    for way in WAYS[:2]:
        yield results.row(f"burst: wait until start, {way}", waits[way], "s",
                          baseline=float(np.median(waits["sbatch"])))
    never = sum(wait == np.inf for wait in found["slurmdl"].waits)
    yield results.row("burst: jobs that never start, slurmdl", [never], "jobs", target="none", met=not never)
    yield results.row("burst: longest wait, slurmdl", [ours], "s", baseline=plain)
    yield results.row("control: burst: longest wait with node lists that stay", [control], "s", baseline=ours,
                      target="above slurmdl", met=control > ours)


def _trace(box: Sandbox, seed: int) -> Iterator[Row]:
    jobs = trace(JOBS, SIZES, ARRIVALS, seed, every=2)
    plain, ours = (play(box, jobs, way) for way in WAYS[:2])
    yield results.row(f"trace of {len(jobs)} jobs: completion of the queue, slurmdl", [ours.completion], "s",
                      baseline=plain.completion, target=f"at most {SLACK:g} of sbatch ({plain.completion:.4g} s)",
                      met=ours.completion <= SLACK * plain.completion)
    placed = [i for i, job in enumerate(jobs) if job.placed]
    yield results.row("trace: seconds to submit a placed job", [ours.submissions[i] for i in placed], "s",
                      baseline=float(np.median([plain.submissions[i] for i in placed])))
    yield results.row("trace: jobs that the controller ended", [plain.lost + ours.lost], "jobs")
    for who, mine in (("placed jobs", True), ("other users' jobs", False)):
        before, after = ([w for w, job in zip(run.waits, jobs, strict=True) if job.placed is mine]
                         for run in (plain, ours))
        yield results.row(f"trace: mean wait of {who}, slurmdl", [float(np.mean(after))], "s",
                          baseline=float(np.mean(before)), target=f"at most {SLACK:g} of sbatch "
                          f"({np.mean(before):.4g} s)", met=bool(np.mean(after) <= SLACK * np.mean(before)))
        leaves = [np.mean([_leaves(box.spec.topology, run.nodes[i]) for i, job in enumerate(jobs)
                           if job.placed is mine]) for run in (plain, ours)]
        yield results.row(f"trace: mean leaves of {who}, slurmdl", [float(leaves[1])], "leaves",
                          baseline=float(leaves[0]))


def _leaves(topology: Topology, nodes: Sequence[str]) -> int:
    return len({topology.leaf_of(node) for node in nodes})
