"""Predicted times of named groups of nodes relative to the exact optimum, on small random trees and blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from benchmarks.mesh import optimality
from benchmarks.mesh.optimality import Case, Outcome
from benchmarks.results import Row
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest

INSTANCES = 300
MAX_NODES, MAX_GROUPS = 12, 3


def draw_case(seed: int) -> Case:
    """Draw a cluster, and 2 or 3 groups of nodes with one rank each and traffic inside and between some of them."""
    generator = np.random.default_rng(seed)
    topology = optimality.draw_topology(generator, MAX_NODES)
    nodes = int(generator.integers(4, len(topology.nodes) + 1))
    cuts = np.sort(generator.choice(np.arange(1, nodes), int(generator.integers(1, MAX_GROUPS)), replace=False))
    sizes = np.diff([0, *cuts, nodes])
    names = ["trainer", "rollout", "reward"][:len(sizes)]
    keys = [*names, *(f"{first}:{second}" for first, second in itertools.permutations(names, 2))]
    sending = [key for key in keys if generator.random() < 0.5] or [names[0]]
    options = DlOptions(groups=",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)),
                   bytes=",".join(f"{key}={generator.uniform(0.05, 8):.3f}G" for key in sending), rank0="any",
                   node_binding="zone")
    return Case(JobRequest(options, nodes=(nodes, nodes), ntasks_per_node=1), optimality.idle_cluster(topology),
                topology, optimality.draw_scores(generator, topology.source), 1)


def solve_drawn_case(seed: int) -> Outcome | None:
    return optimality.solve_case(draw_case(seed))


def rows(seed: int, instances: int = INSTANCES) -> Iterator[Row]:
    yield from optimality.rows(seed, instances, solve_drawn_case)
