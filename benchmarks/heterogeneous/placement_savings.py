"""Savings of placement for jobs with several tasks per node: bytes between nodes and zones, and step times.

Sixteen nodes in four zones, of which random ones are busy; node names alternate between the zones. On each of
OCCUPANCIES such clusters a job requests 2 to 4 tasks on each of some nodes, and a real Slurm with topology/tree
chooses nodes for it. The cost model compares the methods of `placement_methods` and the exact optimum: the nodes and
ranks that send the fewest bytes between zones and, with equal bytes, between nodes. The first RUN jobs with at most
RANKS tasks also train on the sandbox. The link of a zone has half the total rate of its nodes, the default of the
cost model.

The savings of parameter servers are shown next to a published value: Qiao, Li, Wu: DLTAP: a network-efficient
scheduling method for distributed deep learning workload in containerized cluster environment. ITM Web of Conferences
12 (2017), 03030. doi:10.1051/itmconf/20171203030
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.heterogeneous.placement_methods import (
    DEFAULT,
    KINDS,
    LEAF,
    NEGATIVE_CONTROL,
    PLACED,
    VARIANTS,
    Job,
    Run,
    run,
)
from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs, cpu_bound_note
from benchmarks.results import Row, make_row
from slurmdl.cluster import reader
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.place import place_job
from slurmdl.placement.result import Cost
from slurmdl.sandbox import lifecycle, namespaces
from slurmdl.sandbox.spec import LOGIN, SandboxSpec, round_robin_topology
from slurmdl.topology.topology import Topology

NODES, ZONES, CPUS = 16, 4, 4
OCCUPANCIES, RUN = 200, 20
#: jobs between progress messages if they do not run
PROGRESS = 20
#: maximum ranks of a job that runs: Open MPI 4.1.4 often fails to start many processes on two CPUs
RANKS = 12
#: minimum and maximum of free nodes, nodes of a job, and tasks per node
FREE, SIZES, EACH = (4, 10), (3, 5), (2, 4)
#: bits/s; low, so that two CPUs are not the bottleneck
NODE_RATE, ZONE_RATE = 1e8, 2e8
#: kinds whose time depends on the rank order: a random order must be slower
ORDERED = ("allreduce", "gossip, base graph")
LEAST = "least bytes"
LEVELS: Mapping[str, Callable[[Cost | Run], float]] = {
    "nodes": lambda cost: cost.inter_node_bytes, "zones": lambda cost: cost.inter_zone_bytes}
#: minimum share of the largest possible saving, and maximum ratio of a tie
MIN_SAVING_SHARE, MAX_TIE_RATIO = 0.98, 1.05
#: steps of a run, and time limit of the exact solver in seconds
STEPS, SOLVER_TIMEOUT_S = 12, 20.0
#: saving of bytes between nodes that DLTAP reports, in %
DLTAP = 12.0
#: replaces a ratio to zero: JSON has no infinity
INFINITE = 1e9


@dataclass(frozen=True)
class Case:
    """A job on a cluster whose nodes `busy` are occupied by other jobs."""

    job: Job
    busy: tuple[str, ...]


@dataclass(frozen=True)
class JobOutcome:
    """Results of a job.

    Attributes:
        costs: variant -> cost in the model.
        runs: variant -> measurements, and modeled cost of the same ranks; {} if the job did not run.
    """

    kind: str
    costs: Mapping[str, Cost]
    runs: Mapping[str, tuple[Run, Cost]] = field(default_factory=dict)


def rows(seed: int) -> Iterator[Row]:
    """Run all jobs on a sandbox and yield their rows."""
    topology = round_robin_topology(NODES, ZONES)
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"aggregation-{os.getpid()}", topology, node_rate=NODE_RATE,
                                               zone_rate=ZONE_RATE, cpus=CPUS, zone_features=False,
                                               slurm_conf_lines=SETTINGS))
    try:
        jobs = Jobs(sandbox)
        outcomes: list[JobOutcome] = []
        for number, case in enumerate(draw(topology, seed), 1):
            train = (case.job.nodes * case.job.tasks_per_node <= RANKS
                     and sum(bool(outcome.runs) for outcome in outcomes) < RUN)
            outcomes.append(measure(jobs, case, topology, np.random.default_rng([seed, number]), train))
            if train or number % PROGRESS == 0:
                print(f"placement savings: {number} of {OCCUPANCIES} jobs", file=sys.stderr, flush=True)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield from evaluate(outcomes)


def draw(topology: Topology, seed: int) -> list[Case]:
    """Draw the jobs, the same number of each kind, reproducibly."""
    random = np.random.default_rng(seed)

    def between(low: int, high: int) -> int:
        return int(random.integers(low, high + 1))

    cases = []
    for number in range(OCCUPANCIES):
        kind = list(KINDS)[number % len(KINDS)]
        free = between(*FREE)
        nodes, tasks_per_node = between(SIZES[0], min(SIZES[1], free)), between(*EACH)
        busy = random.choice(topology.nodes, NODES - free, replace=False)
        ps = between(1, nodes) if kind == "PS" else 0
        cases.append(Case(Job(kind, nodes, tasks_per_node, ps), tuple(sorted(busy.tolist()))))
    return cases


def measure(jobs: Jobs, case: Case, topology: Topology, random: np.random.Generator, train: bool) -> JobOutcome:
    """Measure a job while another job occupies the busy nodes; train if `train`."""
    blocker = jobs.occupy(case.busy)
    try:
        slurm = jobs.assigned_nodes(case.job.nodes, case.job.tasks_per_node)
        text = namespaces.run_on_host(jobs.sandbox.pids[LOGIN], ["scontrol", "-o", "-d"],
                                      stdin="show nodes\nshow partitions\nshow config\n")
        variants = orders(case, topology, reader.parse_snapshot(text), slurm, random)
        runs = {variant: run(jobs, case.job, variant, variants[variant], STEPS)
                for variant in (*VARIANTS, NEGATIVE_CONTROL)} if train else {}
        return JobOutcome(case.job.kind,
                          {variant: predicted(case.job, order, topology) for variant, order in variants.items()},
                          {variant: (measured, predicted(case.job, measured.order, topology))
                           for variant, measured in runs.items()})
    finally:
        jobs.cancel(blocker)


def orders(case: Case, topology: Topology, snapshot: ClusterSnapshot, slurm: Sequence[str],
           random: np.random.Generator) -> dict[str, tuple[str, ...]]:
    """Return variant -> node of each rank; LEAST is omitted if there is no exact solution."""
    from benchmarks.placement.exact_solver import solve_exactly  # imports OR-tools

    job, scores = case.job, LinkScores()

    def repeat_nodes(nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(node for node in nodes for _ in range(job.tasks_per_node))

    placed = place_job(job.request, snapshot, topology, scores)
    assert placed.rank_map is not None
    free = sorted(set(topology.nodes) - set(case.busy))
    random_nodes = repeat_nodes([free[i] for i in random.choice(len(free), job.nodes, replace=False)])
    variants = {PLACED: placed.rank_map.nodes, DEFAULT: repeat_nodes(sorted(slurm)),
                LEAF: repeat_nodes(sorted(slurm, key=lambda node: (topology.leaf_of(node), node))),
                NEGATIVE_CONTROL: tuple(random_nodes[i] for i in random.permutation(len(random_nodes)))}
    with contextlib.suppress(PlacementError):
        placement = solve_exactly(job.request, snapshot, topology, scores, SOLVER_TIMEOUT_S, "bytes")
        variants[LEAST] = placement.node_of_rank
    return variants


def predicted(job: Job, order: Sequence[str], topology: Topology) -> Cost:
    """Predict the cost of an iteration."""
    names = sorted(set(order))
    return predict_cost(job.traffic.phases(len(order)), network_links(names, topology, LinkScores()),
                        np.array([names.index(node) for node in order]))


def evaluate(outcomes: Sequence[JobOutcome]) -> Iterator[Row]:
    """Yield the rows of all kinds of jobs."""
    for kind in KINDS:
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        for level in LEVELS:
            for base in (LEAF, DEFAULT):
                yield from saving_rows(kind, level, base, of_kind)
            yield from control_rows(kind, level, of_kind)
        yield from run_rows(kind, [outcome.runs for outcome in of_kind if outcome.runs])


def saving_rows(kind: str, level: str, base: str, outcomes: Sequence[JobOutcome]) -> Iterator[Row]:
    """Yield the bytes at one level that placement saves relative to `base`, next to the largest possible saving."""
    get_bytes = LEVELS[level]
    before, placed = ([get_bytes(outcome.costs[variant]) for outcome in outcomes] for variant in (base, PLACED))
    least = [get_bytes(outcome.costs[LEAST]) if LEAST in outcome.costs else None for outcome in outcomes]
    metric = f"{kind}: bytes across {level} saved relative to {base}"
    if not sum(before):
        return
    published = f"DLTAP publishes {DLTAP:g} %" if (kind, level, base) == ("PS", "nodes", DEFAULT) else ""
    largest = None if None in least else 100 * (1 - sum(filter(None, least)) / sum(before))
    yield make_row(f"{metric}, {len(outcomes)} jobs", [100 * (1 - sum(placed) / sum(before))], "%",
                   baseline=largest, target=published)
    shares = [(base - actual) / (base - best) for base, actual, best in zip(before, placed, least, strict=True)
              if best is not None and base > best * (1 + 1e-9)]
    if shares:
        yield make_row(f"{metric}, as a share of the largest possible saving, per job", shares, "share",
                       baseline=1.0, target=f"median at least {MIN_SAVING_SHARE:g}",
                       met=statistics.median(shares) >= MIN_SAVING_SHARE)


def control_rows(kind: str, level: str, outcomes: Sequence[JobOutcome]) -> Iterator[Row]:
    """Yield the negative control, random nodes and ranks, unless placement saves nothing."""
    get_bytes = LEVELS[level]
    total = {variant: sum(get_bytes(outcome.costs[variant]) for outcome in outcomes)
             for variant in (*VARIANTS, NEGATIVE_CONTROL)}
    if max(total[LEAF], total[DEFAULT]) > total[PLACED] * (1 + 1e-9):
        ratio = total[NEGATIVE_CONTROL] / total[PLACED] if total[PLACED] else INFINITE
        yield make_row(f"{kind}: bytes across {level} of {NEGATIVE_CONTROL} over those of placement (control)",
                       [ratio], "times", baseline=1.0, target="above 1", met=ratio > 1 + 1e-9)


def run_rows(kind: str, runs: Sequence[Mapping[str, tuple[Run, Cost]]]) -> Iterator[Row]:
    """Yield the rows of the jobs that ran."""
    if not runs:
        return
    busy = cpu_bound_note([by_variant[variant][0].result for by_variant in runs for variant in by_variant])
    for level, get_bytes in LEVELS.items():
        metered = [get_bytes(run) / get_bytes(model)
                   for by_variant in runs for run, model in by_variant.values() if get_bytes(model)]
        if metered:
            yield make_row(f"{kind}, run: metered bytes across {level} over modeled ones",
                           metered, "times", baseline=1.0)
    for base in (LEAF, DEFAULT):
        ratios = [by_variant[PLACED][0].seconds / by_variant[base][0].seconds for by_variant in runs]
        model = [by_variant[PLACED][1].seconds / by_variant[base][1].seconds
                 for by_variant in runs if by_variant[base][1].seconds]
        yield make_row(f"{kind}, run: seconds per step, placed, over those of {base}{busy}", ratios, "times",
                       baseline=statistics.median(model), target=f"median at most {MAX_TIE_RATIO:g}",
                       met=statistics.median(ratios) <= MAX_TIE_RATIO)
    control_ratios = [by_variant[NEGATIVE_CONTROL][0].seconds / by_variant[PLACED][0].seconds for by_variant in runs]
    judged = kind in ORDERED
    yield make_row(f"{kind}, run: seconds per step of {NEGATIVE_CONTROL} over those of placement (control){busy}",
                   control_ratios, "times", baseline=1.0, target=f"above {MAX_TIE_RATIO:g}" if judged else "",
                   met=statistics.median(control_ratios) > MAX_TIE_RATIO if judged else None)
    yield make_row(f"{kind}, run: seconds per step, placed",
                   [by_variant[PLACED][0].seconds for by_variant in runs], "s",
                   baseline=statistics.median(by_variant[LEAF][0].seconds for by_variant in runs))
