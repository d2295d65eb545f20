"""Predicted times of meshes relative to the exact optimum, on small random trees, blocks and links of two tiers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.mesh.exact_mesh import solve_mesh
from benchmarks.results import Row, make_row
from benchmarks.suite import worker_pool
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import SlurmdlError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.place import place_job
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology

#: instances with a proven optimum
INSTANCES = 500
SOLVER_TIMEOUT_S = 20.0
MAX_RANKS = 24
MAX_MEDIAN, MAX_HIGH = 1.0, 1.05


@dataclass(frozen=True, eq=False)
class Case:
    """One mesh on one small cluster, all nodes free."""

    request: JobRequest
    cluster: ClusterSnapshot
    topology: Topology
    scores: LinkScores
    ranks_per_node: int


@dataclass(frozen=True)
class Outcome:
    """Predicted seconds: the optimum, the placement, and the first nodes by name with ranks in that order."""

    kind: str
    optimum: float
    placed: float
    by_name: float
    proven: bool


def draw_topology(generator: np.random.Generator, max_nodes: int = 24) -> Topology:
    """Draw 6 or more nodes in 2 to 5 leaf zones; the source of the topology is its kind."""
    leaves, count = int(generator.integers(2, 6)), int(generator.integers(6, max_nodes + 1))
    names = [f"n{i:02d}" for i in generator.permutation(count)]
    cuts = np.sort(generator.choice(np.arange(1, count), leaves - 1, replace=False))
    zones = [ZoneDecl(f"z{i}", nodes=tuple(part.tolist())) for i, part in enumerate(np.split(np.array(names), cuts))]
    kind = str(generator.choice(["tree", "block", "two tiers"]))
    below = [zone.name for zone in zones]
    if kind == "tree":
        if generator.random() < 0.5 and leaves > 2:
            half = int(generator.integers(1, leaves))
            zones += [ZoneDecl("m0", children=tuple(below[:half])), ZoneDecl("m1", children=tuple(below[half:]))]
            below = ["m0", "m1"]
        zones.append(ZoneDecl("root", children=tuple(below)))
    return build_topology(zones, kind="tree" if kind == "tree" else "block", source=kind)


def draw_scores(generator: np.random.Generator, kind: str) -> LinkScores:
    """Draw the capacities of links of a kind of topology."""
    return LinkScores(default_node_bandwidth=1e9, default_latency=0.0,
                      default_zone_bandwidth=(float(generator.choice([5e8, 1e9, 2e9, 4e9])),
                                              float(generator.choice([5e8, 1e9, 4e9]))),
                      default_leaf_bandwidth=8e9 if kind == "two tiers" else 0.0)


def idle_cluster(topology: Topology) -> ClusterSnapshot:
    return ClusterSnapshot.from_nodes(
        [Node(name, ("IDLE",), cpus=4, cpus_unallocated=4, memory=4000, memory_unallocated=4000, partitions=("main",))
         for name in sorted(topology.nodes)], (Partition("main", True, memory_per_cpu=1000),))


def draw_case(seed: int) -> Case | None:
    """Draw a cluster and a mesh of up to MAX_RANKS ranks; None if none fits."""
    generator = np.random.default_rng(seed)
    topology = draw_topology(generator)
    per_node = int(generator.choice([1, 1, 2, 4]))
    for _ in range(100):
        data, pipeline, tensor = (int(size) for size in generator.choice([1, 2, 2, 3, 4], 3))
        ranks = data * pipeline * tensor
        if ranks % per_node == 0 and 2 <= ranks // per_node <= len(topology.nodes) and ranks <= MAX_RANKS:
            break
    else:
        return None
    experts = 2 if generator.random() < 0.3 and data % 2 == 0 else 1
    dimensions = {"dp": data // experts, "ep": experts, "pp": pipeline, "tp": tensor}
    high = {"dp": 8.0, "ep": 3.0, "pp": 1.0, "tp": 4.0}
    volumes = ",".join(f"{name}={generator.uniform(0.05, high[name]):.3f}G" for name in dimensions)
    scores = draw_scores(generator, topology.source)
    mesh = ",".join(f"{name}={size}" for name, size in dimensions.items())
    options = DlOptions(mesh=mesh, bytes=volumes, rank0="any", node_binding="zone")
    nodes = ranks // per_node
    return Case(JobRequest(options, nodes=(nodes, nodes), ntasks_per_node=per_node), idle_cluster(topology), topology,
                scores, per_node)


def solve_drawn_case(seed: int) -> Outcome | None:
    case = draw_case(seed)
    return solve_case(case) if case else None


def solve_case(case: Case) -> Outcome | None:
    """Predicted seconds of one case; None if the job does not fit one tree of the cluster."""
    try:
        placement = place_job(case.request, case.cluster, case.topology, case.scores)
    except SlurmdlError:
        return None
    assert placement.rank_map
    index = {name: i for i, name in enumerate(case.cluster.names)}
    placed = np.array([index[name] for name in placement.rank_map.nodes])
    phases = case.request.options.traffic.phases(len(placed))
    network = network_links(case.cluster.names, case.topology, case.scores)
    by_name = np.repeat(np.arange(len(placed) // case.ranks_per_node), case.ranks_per_node)
    exact = solve_mesh(phases, network, len(placed), case.ranks_per_node, placed, SOLVER_TIMEOUT_S)
    return Outcome(case.topology.source, exact.seconds, predict_cost(phases, network, placed).seconds,
                   predict_cost(phases, network, by_name).seconds, exact.proven)


def outcomes(seed: int, instances: int,
             solve: Callable[[int], Outcome | None] = solve_drawn_case) -> Iterator[Outcome]:
    """Solve cases in parallel until `instances` have a proven optimum above 0; `solve` draws one from a seed."""
    proven = 0
    with worker_pool() as pool:
        for first in itertools.count(seed * 1_000_000, 50):
            for outcome in pool.imap(solve, range(first, first + 50)):
                if outcome is not None and outcome.optimum > 0:
                    proven += outcome.proven
                    yield outcome
                if proven >= instances:
                    return


def rows(seed: int, instances: int = INSTANCES,
         solve: Callable[[int], Outcome | None] = solve_drawn_case) -> Iterator[Row]:
    drawn = []
    for outcome in outcomes(seed, instances, solve):
        drawn.append(outcome)
        if len(drawn) % 50 == 0:
            print(f"optimality: {len(drawn)} cases", file=sys.stderr, flush=True)
    proven = [outcome for outcome in drawn if outcome.proven]
    ratios = np.array([outcome.placed / outcome.optimum for outcome in proven])
    by_name = np.array([outcome.by_name / outcome.optimum for outcome in proven])
    median, high = float(np.median(ratios)), float(np.quantile(ratios, 0.99))
    yield make_row("instances with a proven optimum", [len(proven)], "", baseline=len(drawn))
    yield make_row("predicted seconds / optimum, median", [median], "x", baseline=float(np.median(by_name)),
                   target="at most 1.00", met=median <= MAX_MEDIAN + 1e-6)
    yield make_row("predicted seconds / optimum, 99th percentile", [high], "x",
                   baseline=float(np.quantile(by_name, 0.99)), target="at most 1.05", met=high <= MAX_HIGH)
    yield make_row("predicted seconds / optimum, largest", [float(ratios.max())], "x",
                   baseline=float(by_name.max()))
    for kind in ("tree", "block", "two tiers"):
        of_kind = [outcome.placed / outcome.optimum for outcome in proven if outcome.kind == kind]
        if of_kind:
            yield make_row(f"predicted seconds / optimum, {kind}, 99th percentile",
                           [float(np.quantile(of_kind, 0.99))], "x", baseline=float(len(of_kind)))
    share = float((by_name > 1.1).mean())
    yield make_row("control: nodes and ranks by name more than 10 % above the optimum", [share], "",
                   target="more than 0.3, or the instances are too easy", met=share > 0.3)
