"""Value of zones and of link scores, and no loss if Slurm's choice is already optimal.

Lee et al.: Electronics 12 (2023), 3021. It is the source of the weighted score (`cost_model: weighted`). Its values
are not quoted, because they were measured on another system and against another scheduler.

The first half is the part `training-value` of `benchmarks.link_scores`: one job on a cluster with two degraded nodes,
placed by {Slurm, leaf order, zone, score, zone + score}. The second half compares predicted step times of placement
with those of Slurm's own choice on partly occupied clusters, separately for the cases where Slurm's choice is
optimal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.heterogeneous.placement_methods import DEFAULT, LEAF, NEGATIVE_CONTROL, PLACED
from benchmarks.heterogeneous.placement_savings import CPUS, NODES, ZONES, JobOutcome, draw, measure
from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs
from benchmarks.link_scores import training_value
from benchmarks.results import Row, make_row
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

JOBS = 60
#: tolerance of equal predictions
TOLERANCE = 1e-6


def rows(seed: int) -> Iterator[Row]:
    """Yield measured step times by rule, then predicted step times by occupancy."""
    yield from training_value.rows(seed)
    topology = round_robin_topology(NODES, ZONES)
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"zones-{os.getpid()}", topology, cpus=CPUS, zone_features=False,
                                               slurm_conf_lines=SETTINGS))
    try:
        jobs, outcomes = Jobs(sandbox), []
        for number, case in enumerate(draw(topology, seed)[:JOBS], 1):
            outcomes.append(measure(jobs, case, topology, np.random.default_rng([seed, number]), False))
            print(f"zones: {number} of {JOBS} jobs", file=sys.stderr, flush=True)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield from evaluate(outcomes)


def evaluate(outcomes: Sequence[JobOutcome]) -> Iterator[Row]:
    """Yield ratios of predicted step times; placement must tie if Slurm's choice is optimal."""
    def seconds(outcome: JobOutcome, variant: str) -> float:
        return outcome.costs[variant].seconds

    optimal = [outcome for outcome in outcomes
               if seconds(outcome, DEFAULT) <= seconds(outcome, PLACED) * (1 + TOLERANCE)]
    suboptimal = [outcome for outcome in outcomes if outcome not in optimal]
    yield make_row("occupancies in which Slurm's choice is as fast as placement", [len(optimal) / len(outcomes)],
                   "share")
    for label, group in (("Slurm as fast as placement", optimal), ("Slurm slower than placement", suboptimal)):
        if group:
            ratios = [seconds(outcome, DEFAULT) / seconds(outcome, PLACED)
                      for outcome in group if seconds(outcome, PLACED)]
            yield make_row(f"{label}: predicted seconds of {DEFAULT} over those of placement", ratios, "times",
                           baseline=1.0, target="none below 1", met=min(ratios) >= 1 - TOLERANCE)
            leaf_ratios = [seconds(outcome, LEAF) / seconds(outcome, PLACED)
                           for outcome in group if seconds(outcome, PLACED)]
            yield make_row(f"{label}: predicted seconds of {LEAF} over those of placement", leaf_ratios, "times",
                           baseline=1.0)
    random_ratios = [seconds(outcome, NEGATIVE_CONTROL) / seconds(outcome, PLACED)
                     for outcome in outcomes if seconds(outcome, PLACED)]
    median = float(np.median(random_ratios))
    yield make_row(f"predicted seconds of {NEGATIVE_CONTROL} over those of placement (control)", random_ratios,
                   "times", baseline=1.0, target="median above 1", met=median > 1)
