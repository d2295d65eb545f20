"""Negative control of placement: without a network bottleneck, placed and unplaced jobs take the same time.

Eight nodes in two zones, with one busy node in each, and a job that needs more than one zone; Slurm's default order
alternates between the zones. Placed and unplaced runs alternate. On unshaped links their times must be equal; behind
thin uplinks the same measurement must separate them.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence

from benchmarks.heterogeneous.placement_methods import DEFAULT, PLACED, Job, Run, run
from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs, cpu_bound_note
from benchmarks.results import Row, make_row
from benchmarks.strategies.accuracy_vs_bytes import lower_bound_95
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, ZONES, CPUS, BUSY = 8, 2, 4, ("n7", "n8")
#: the ring has five nodes: with four, three of one zone and one of the other, each order is good
JOBS = (Job("PS", 4, 2, 2), Job("allreduce", 5, 1))
STEPS, REPEATS = 40, 5
#: bits/s of the links of nodes and of zones, 0 for unshaped
UNSHAPED, SHAPED = (0.0, 0.0), (1e8, 5e7)
#: maximum ratio of a tie, and maximum ratio of the bounds of a conclusive tie
MAX_TIE_RATIO, MAX_BOUNDS_RATIO = 1.05, 1.25


def rows(seed: int) -> Iterator[Row]:
    """Yield ratios of step times on both kinds of links; the seed has no effect."""
    topology = round_robin_topology(NODES, ZONES)
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"tie-{os.getpid()}", topology, cpus=CPUS, zone_features=False,
                                               slurm_conf_lines=SETTINGS))
    try:
        jobs = Jobs(sandbox)
        jobs.occupy(BUSY)
        for node_rate, zone_rate in (UNSHAPED, SHAPED):
            for link in (*topology.nodes, *topology.zones):
                if link != "core":
                    sandbox.shape_link(link, rate=node_rate if link in topology.node_index else zone_rate)
            for job in JOBS:
                runs = [{variant: run(jobs, job, variant, (), STEPS)
                         for variant in (PLACED, DEFAULT)[::-1 if repeat % 2 else 1]}
                        for repeat in range(REPEATS)]
                print(f"no-bottleneck control: {job.kind}, {node_rate:g} bit/s", file=sys.stderr, flush=True)
                yield evaluate(job.kind, runs, shaped=zone_rate > 0)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)


def evaluate(kind: str, runs: Sequence[dict[str, Run]], shaped: bool) -> Row:
    """Return the row of a job on one kind of links."""
    ratios = [by_variant[PLACED].seconds / by_variant[DEFAULT].seconds for by_variant in runs]
    logs = [math.log(ratio) for ratio in ratios]
    low, high = math.exp(lower_bound_95(logs)), math.exp(-lower_bound_95([-log for log in logs]))
    note = cpu_bound_note([by_variant[variant].result for by_variant in runs for variant in by_variant])
    seconds = f"{kind}: seconds per step, placed, over those of {DEFAULT}"
    bounds = f"(95 % bounds {low:.3f} and {high:.3f})"
    if shaped:
        return make_row(f"{seconds}, thin uplinks (control){note}", ratios, "times", baseline=1.0,
                        target=f"below {1 / MAX_TIE_RATIO:.2f} {bounds}", met=high < 1 / MAX_TIE_RATIO)
    return make_row(f"{seconds}, unshaped links{note}", ratios, "times", baseline=1.0,
                    target=f"a tie: 95 % bounds overlap {1 / MAX_TIE_RATIO:.2f} to {MAX_TIE_RATIO:g}, and their "
                    f"ratio is at most {MAX_BOUNDS_RATIO:g} (here {low:.3f} and {high:.3f})",
                    met=low <= MAX_TIE_RATIO and high >= 1 / MAX_TIE_RATIO and high <= MAX_BOUNDS_RATIO * low)
