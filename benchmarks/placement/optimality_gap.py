"""Optimality gap of `place`: predicted times relative to the exact optimum, on small random clusters."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from benchmarks import results
from benchmarks.placement import exact_solver
from benchmarks.results import make_row
from benchmarks.suite import check_output_file, start, worker_pool
from slurmdl.cli.arguments import CliParser
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import SlurmdlError
from slurmdl.job_request import JobRequest, resolve_job_size
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.eligibility import eligible_tasks
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.place import place_job
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

#: time limit of the exact solver for one cluster in seconds
SOLVER_TIMEOUT_S = 20.0
#: cases per batch for the worker processes
BATCH = 100
#: ratio to the optimum above which leaf order is far from it
MAX_LEAF_RATIO = 1.1


@dataclass(frozen=True, eq=False)
class Case:
    """One job on one small cluster."""

    seed: int
    request: JobRequest
    cluster: ClusterSnapshot
    topology: Topology
    scores: LinkScores


@dataclass(frozen=True)
class Outcome:
    """Predicted seconds of one case.

    Attributes:
        fits: the job fits one leaf zone.
        proven: `optimum` is proven, not only the best solution within the time limit.
    """

    seed: int
    kind: str
    fits: bool
    optimum: float
    placed: float
    leaf: float
    random_choice: float
    proven: bool = True

    @property
    def counts(self) -> bool:
        """Whether the optimum is proven and the result depends on more than the choice of a leaf."""
        times = (self.placed, self.leaf, self.random_choice)
        return self.proven and not self.fits and self.optimum > 0 and \
            max(times) > min(times) * (1 + 1e-6)


def draw_case(seed: int) -> Case:
    """Draw 8 to 24 nodes, some busy, in 3 to 6 leaf zones of a tree with two or three levels and random links."""
    generator = np.random.default_rng(seed)
    leaves, nodes = int(generator.integers(3, 7)), int(generator.integers(8, 25))
    names = [f"n{i:02d}" for i in generator.permutation(nodes)]
    cuts = np.sort(generator.choice(np.arange(1, nodes), leaves - 1, replace=False))
    shares = [tuple(part.tolist()) for part in np.split(np.array(names), cuts)]
    declared = [ZoneDecl(f"z{i}", nodes=share) for i, share in enumerate(shares)]
    below = [zone.name for zone in declared]
    if generator.random() < 0.5:
        half = int(generator.integers(1, leaves))
        declared += [ZoneDecl("m0", children=tuple(below[:half])), ZoneDecl("m1", children=tuple(below[half:]))]
        below = ["m0", "m1"]
    topology = build_topology([*declared, ZoneDecl("root", children=tuple(below))], kind="tree", source="bench")
    measured = generator.random() < 0.3

    def score(low: float, high: float) -> LinkScore:
        return LinkScore(float(np.round(generator.uniform(low, high), -6)),
                         float(generator.choice([1e-4, 5e-4, 2e-3, 1e-2])) if measured else 4e-5)

    scores = LinkScores(
        nodes={name: score(4e8, 12.5e8) for name in names if generator.random() < 0.7},
        zones={zone: score(1e8, 20e8) for zone in topology.zones if generator.random() < 0.8})
    free = generator.choice([0, 1, 2, 4], nodes, p=[0.1, 0.1, 0.2, 0.6])
    cluster = ClusterSnapshot.from_nodes(
        (Node(name, ("MIXED",) if count < 4 else ("IDLE",), cpus=4, cpus_unallocated=int(count), memory=4000,
              memory_unallocated=1000 * int(count), partitions=("main",)) for name, count in zip(
                  sorted(names), free, strict=True)), (Partition("main", True, memory_per_cpu=1000),))
    per_node = int(generator.choice([1, 1, 2, 4]))
    fitting = int((free >= per_node).sum())
    num_nodes = int(generator.integers(2, max(3, fitting + 1)))
    kind = str(generator.choice(["allreduce", "gossip", "ps", "ps"]))
    ps = int(generator.integers(1, min(4, num_nodes * per_node - 1) + 1)) if kind == "ps" else 0
    options = DlOptions(strategy=kind, ps=ps, rank0="any")
    request = JobRequest(nodes=(num_nodes, num_nodes), ntasks_per_node=per_node, options=options)
    return Case(seed, request, cluster, topology, scores)


def solve_case(instance: Case) -> Outcome | None:
    """Return the predicted time of the case with each method; None if the job does not fit the cluster."""
    try:
        placement = place_job(instance.request, instance.cluster, instance.topology, instance.scores)
    except SlurmdlError:
        return None
    if not placement.free_now or placement.rank_map is None:
        return None
    best = exact_solver.solve_exactly(instance.request, instance.cluster, instance.topology, instance.scores,
                                      SOLVER_TIMEOUT_S)
    tasks_now = eligible_tasks(instance.request, instance.cluster, "main").tasks_now
    nodes = [name for name, tasks in zip(instance.cluster.names, tasks_now.tolist(), strict=True)
             if tasks >= resolve_job_size(instance.request).max_tasks_per_node]
    generator = np.random.default_rng(instance.seed)
    num_nodes = resolve_job_size(instance.request).nodes
    random_nodes = generator.permutation(nodes)[:num_nodes].tolist()
    random_order = np.repeat(random_nodes, resolve_job_size(instance.request).tasks // num_nodes).tolist()
    largest = max(sum(instance.topology.leaf_of(name) == zone for name in nodes) for zone in instance.topology.zones)
    return Outcome(instance.seed, instance.request.options.strategy, largest >= num_nodes, best.cost.seconds,
                   placement.rank_map.cost.seconds, predicted(instance, leaf_order(instance, nodes)),
                   predicted(instance, random_order), best.proven)


def leaf_order(instance: Case, nodes: Sequence[str]) -> list[str]:
    """Choose like Slurm: the lowest zone that fits, its largest leaves, the last one best-fit; ranks leaf by leaf."""
    topology, num_nodes = instance.topology, resolve_job_size(instance.request).nodes
    below = {zone: [node for node in nodes if zone in topology.path_of(node)] for zone in topology.zones}
    zone = min((zone for zone in topology.zones if len(below[zone]) >= num_nodes),
               key=lambda zone: (topology.level[topology.zone_index[zone]], len(below[zone])))
    leaves = {leaf: [node for node in below[zone] if topology.leaf_of(node) == leaf] for leaf in topology.zones}
    chosen: list[str] = []
    while len(chosen) < num_nodes:
        remaining = num_nodes - len(chosen)
        fitting = [leaf for leaf in leaves if len(leaves[leaf]) >= remaining]
        leaf = min(fitting, key=lambda leaf: len(leaves[leaf])) if fitting else \
            max(leaves, key=lambda leaf: len(leaves[leaf]))
        chosen += leaves.pop(leaf)[:remaining]
    ranked = sorted(chosen, key=lambda node: (topology.zone_index[topology.leaf_of(node)], node))
    return np.repeat(ranked, resolve_job_size(instance.request).tasks // num_nodes).tolist()


def predicted(instance: Case, order: Sequence[str]) -> float:
    """Predict the seconds of an iteration; `order` is the node of each rank."""
    names = sorted(set(order))
    ranks = np.array([names.index(name) for name in order], np.int64)
    phases = instance.request.options.traffic.phases(len(order))
    return predict_cost(phases, network_links(names, instance.topology, instance.scores), ranks).seconds


def outcomes(clusters: int, seed: int) -> Iterator[Outcome]:
    """Solve cases in parallel and yield all of them until `clusters` count."""
    counted = 0
    with worker_pool() as pool:
        for first in itertools.count(seed * 1_000_000, BATCH):
            for result in pool.imap(_solve_numbered_case, range(first, first + BATCH)):
                if result is not None:
                    counted += result.counts
                    yield result
                if counted >= clusters:
                    return


def _solve_numbered_case(number: int) -> Outcome | None:
    return solve_case(draw_case(number))


def rows(seed: int = 1, clusters: int = 2000) -> list[results.Row]:
    """Return ratios of predicted seconds to the exact optimum over `clusters` counted cases."""
    drawn = []
    for entry in outcomes(clusters, seed):
        drawn.append(entry)
        if len(drawn) % 500 == 0:
            print(f"exact: {len(drawn)} cases, {sum(earlier.counts for earlier in drawn)} of {clusters} counted",
                  file=sys.stderr, flush=True)
    counted = [entry for entry in drawn if entry.counts]
    ratios = np.array([entry.placed / entry.optimum for entry in counted])
    leaf = np.array([entry.leaf / entry.optimum for entry in counted])
    random_choice = np.array([entry.random_choice / entry.optimum for entry in counted])
    worst = counted[int(ratios.argmax())]
    other_ratios = [entry.placed / entry.optimum for entry in drawn
                    if entry.proven and not entry.counts and entry.optimum > 0]
    median, high = float(np.median(ratios)), float(np.quantile(ratios, 0.99))
    share_above = float((leaf > MAX_LEAF_RATIO).mean())
    table = [
        make_row("exact: cases that count", [len(counted)], "cases", baseline=len(drawn),
                 target=f"at least {clusters}", met=len(counted) >= clusters),
        make_row(f"exact: excluded cases, no optimum proven in {SOLVER_TIMEOUT_S:g} s",
                 [sum(not entry.proven for entry in drawn)], "cases", baseline=len(drawn)),
        make_row("exact: share of counted cases with leaf order more than 10 % above the optimum", [share_above],
                 "share", target="at least 0.5", met=share_above >= 0.5),
        make_row("exact: median ratio to the optimum", [median], "ratio", baseline=float(np.median(leaf)),
                 target="1.00", met=median <= 1.0 + 1e-6),
        make_row("exact: 99th percentile of the ratio", [high], "ratio", baseline=float(np.quantile(leaf, 0.99)),
                 target="at most 1.05", met=high <= 1.05),
        make_row(f"exact: worst ratio (cluster {worst.seed}, {worst.kind})", [float(ratios.max())], "ratio",
                 baseline=float(leaf.max())),
        make_row("exact: control, median ratio of random choices", [float(np.median(random_choice))], "ratio",
                 baseline=median, target="above the median of place",
                 met=float(np.median(random_choice)) > median * 1.05)]
    for kind in sorted({entry.kind for entry in counted}):
        kind_ratios = [entry.placed / entry.optimum for entry in counted if entry.kind == kind]
        table.append(make_row(f"exact: 99th percentile, {kind}", [float(np.quantile(kind_ratios, 0.99))], "ratio"))
    if other_ratios:
        table.append(make_row("exact: worst ratio of the other cases", [max(other_ratios)], "ratio"))
    return table


def main(argv: list[str]) -> None:
    """Measure, print the rows, and write them to --results."""
    name = "python -m benchmarks.placement.optimality_gap"
    parser = CliParser(prog=name, description="Compare placements with the exact optimum, on small random clusters.")
    parser.add_argument("--clusters", type=int, default=2000, metavar="N",
                        help="number of counted cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N",
                        help="seed of the clusters (default: %(default)s)")
    parser.add_argument("--results", metavar="FILE", help="write all rows, negative controls included, as JSON")
    options = parser.parse_args(argv)
    if options.results:
        check_output_file(options.results, "--results")
    clusters, seed = max(1, options.clusters), options.seed
    measured = rows(seed, clusters)
    for row in measured:
        print(f"{row.metric:60} {row.value:10.4f} {row.unit:6} {row.target}")
    if options.results:
        results.write(options.results, measured, seed=seed,
                      versions={package: version(package) for package in ("numpy", "ortools")},
                      command=f"{name} --clusters {clusters} --seed {seed} --results {options.results}")


if __name__ == "__main__":
    start(main)
