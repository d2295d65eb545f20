"""10,000 generated jobs on 256 and 5,000 nodes under each policy: waiting, utilisation, run times, other users' jobs.

Run times follow the nodes: a job bound by communication (half of the multi-node jobs, 30 % of their run time) runs
longer on worse nodes, which delays the jobs behind it. On a tree that is the only influence of the choice of nodes on
waiting times; on blocks free nodes can also be unusable. All comparisons are with plain Slurm on the same jobs.

Random nodes are the negative control with thin uplinks only: with 2:1 uplinks all-to-all traffic is fastest on few
nodes of each of many leaves, as random ones mostly are, since jobs do not share links in this model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.results import Row, make_row
from slurmdl.history.replay import POLICIES, PolicyOutcome, ReplaySettings, replay_seeds
from slurmdl.history.scheduler import Communication
from slurmdl.links.link_scores import LinkScores
from slurmdl.topology.source import block_topology, tree_topology
from slurmdl.topology.topology import Topology

JOBS, SEEDS, LOADS = 10_000, 10, (0.7, 0.85, 0.95)
TOLERANCE, SHORTER = 0.01, 0.1
DEFAULT, THIN = LinkScores(), LinkScores(default_zone_bandwidth=(6.25e8,))


@dataclass(frozen=True, eq=False)
class Case:
    """One cluster with one kind of traffic."""

    name: str
    topology: Topology
    strategy: str
    scores: LinkScores


def cases() -> tuple[Case, ...]:
    """Return the cases; with thin uplinks a leaf's uplink has half the rate of one node's link."""
    small = tree_topology((1, 16, 256))
    blocks = block_topology((14, 252), (18, 72))
    large = tree_topology((1, 25, 250, 5000))
    return (Case("256 nodes, all to all, 2:1 uplinks", small, "gossip", DEFAULT),
            Case("256 nodes, all to all, thin uplinks", small, "gossip", THIN),
            Case("256 nodes, ring, thin uplinks", small, "allreduce", THIN),
            Case("252 nodes in blocks, all to all, 2:1 uplinks", blocks, "gossip", DEFAULT),
            Case("5,000 nodes, all to all, 2:1 uplinks", large, "gossip", DEFAULT))


def rows(seed: int) -> Iterator[Row]:
    """Yield the rows of each case and load."""
    for case in cases():
        settings = ReplaySettings(case.topology, POLICIES, strategy=case.strategy, scores=case.scores)
        for load in LOADS:
            seeds = range(seed, seed + SEEDS)
            outcomes = list(replay_seeds(settings, JOBS, load, seeds, os.cpu_count() or 1))
            yield from evaluate(f"{case.name}, load {load:g}", outcomes, has_control=case.scores is THIN)


def evaluate(name: str, outcomes: list[list[PolicyOutcome]], has_control: bool) -> Iterator[Row]:
    """Yield the rows of one case with one load from the outcomes of each seed.

    `has_control`: random nodes must be worse.
    """
    by_seed = [{outcome.policy: outcome for outcome in of_seed} for of_seed in outcomes]
    for policy, label in (("slurmdl", "all placed"), ("mixed", "half placed")):
        waits = [_ratio(seed[policy].wait_s, seed["slurm"].wait_s) for seed in by_seed]
        yield make_row(f"{name}: mean wait, {label} / plain Slurm", waits, "times", baseline=1.0,
                       target=f"at most {1 + TOLERANCE:g}", met=float(np.median(waits)) <= 1 + TOLERANCE)
        useful = [seed[policy].useful / seed["slurm"].useful for seed in by_seed]
        yield make_row(f"{name}: useful utilisation, {label} / plain Slurm", useful, "times", baseline=1.0,
                       target=f"at least {1 - TOLERANCE:g}", met=float(np.median(useful)) >= 1 - TOLERANCE)
    runs = [_ratio(seed["slurmdl"].run_ratio, seed["slurm"].run_ratio) for seed in by_seed]
    yield make_row(f"{name}: run time of jobs bound by communication, all placed / plain Slurm", runs, "times",
                   baseline=1.0, target=f"at most {1 - SHORTER:g}", met=float(np.median(runs)) <= 1 - SHORTER)
    # the reference of all factors is the choice for an empty cluster: no choice of nodes makes them much shorter
    bounds = [1 / Communication().resulting_run_s(1.0, float(seed["slurm"].factor.mean())) for seed in by_seed]
    yield make_row(f"{name}: the same, if each job had an empty cluster", bounds, "times", baseline=1.0)
    factors = [_ratio(seed["slurmdl"].factor, seed["slurm"].factor) for seed in by_seed]
    yield make_row(f"{name}: their communication time, all placed / plain Slurm", factors, "times", baseline=1.0)
    others = [_ratio(seed["mixed"].response_s[~seed["mixed"].placed], seed["slurm"].response_s[~seed["mixed"].placed])
              for seed in by_seed]
    yield make_row(f"{name}: time from submission to end of other users' jobs, half placed / plain Slurm", others,
                   "times", baseline=1.0, target=f"at most {1 + TOLERANCE:g}",
                   met=float(np.median(others)) <= 1 + TOLERANCE)
    control = [_ratio(seed["random"].factor, seed["slurmdl"].factor) for seed in by_seed]
    yield make_row(f"{'control: ' * has_control}{name}: communication time, random nodes / all placed", control,
                   "times", baseline=1.0, target="above 1" if has_control else "",
                   met=float(np.median(control)) > 1 if has_control else None)


def _ratio(values: np.typing.NDArray[np.float64], reference: np.typing.NDArray[np.float64]) -> float:
    """Ratio of the means; 1 if both are 0."""
    base = float(reference.mean())
    return float(values.mean()) / base if base else 1.0 if not values.any() else 1e9
