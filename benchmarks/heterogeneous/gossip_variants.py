"""Gossip between ranks of different speeds: {shared memory, messages, both} x {balanced, not} x {synchronous,
asynchronous}.

This is the experiment of the paper on gossip training on heterogeneous hardware (Large-Scale Scientific Computing,
LSSC 2019). Its values are not quoted, because they belong to its machines. The first metric is samples per second
relative to the same ranks with communication off, on sandbox nodes with all ranks, half of them, or one rank each.
The second is the accuracy relative to equal speed, on virtual ranks with the same nodes and seeds. Allreduce is shown
without a target; the parts `throughput` and `accuracy` evaluate it.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.heterogeneous.accuracy import run
from benchmarks.heterogeneous.throughput import CPUS, OFF, RANKS, SPEEDS, STEPS, TARGET, VARIANTS, common, rate
from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs, cpu_bound_note
from benchmarks.results import Row, make_row
from benchmarks.strategies.accuracy_vs_bytes import difference, lower_bound_95
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

#: speeds of the ranks, a key of SPEEDS
MIXED = list(SPEEDS)[-1]
REPEATS, SEEDS = 2, 3
#: maximum loss of accuracy by unequal speeds, in points
LOSS = 0.5


@dataclass(frozen=True)
class Variant:
    """A strategy on `nodes` nodes with `tasks_per_node` ranks on each."""

    name: str
    nodes: int
    tasks_per_node: int
    options: str
    judged: bool = True

    @property
    def zones(self) -> str:
        """The nodes as value of --virtual-zones."""
        return f"A:{self.nodes}x{self.tasks_per_node}"

    @property
    def balanced(self) -> bool:
        return "--load-balance" in self.options


LAYOUTS = {"shared memory": (1, RANKS, " --shared-memory"), "messages": (RANKS, 1, ""),
           "both": (2, RANKS // 2, " --shared-memory")}
#: balanced synchronous ranks have different batch sizes, asynchronous ones make different numbers of steps
MODES = {"not balanced, synchronous": "", "balanced, synchronous": " --load-balance",
         "not balanced, asynchronous": " --async",
         "balanced, asynchronous": " --async --load-balance"}
COMBINATIONS = [Variant(f"gossip, {layout}, {mode}", nodes, ranks, f"--strategy gossip{memory}{options}")
                for (layout, (nodes, ranks, memory)), (mode, options) in product(LAYOUTS.items(), MODES.items())]
ALLREDUCE = [Variant("allreduce, not balanced", RANKS, 1, "--strategy allreduce", judged=False),
             Variant("allreduce, balanced", RANKS, 1, "--strategy allreduce --load-balance", judged=False)]


def rows(seed: int) -> Iterator[Row]:
    """Yield samples per second of each combination, then accuracies."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"gossip-{os.getpid()}", round_robin_topology(RANKS, 1), cpus=CPUS,
                                               slurm_conf_lines=SETTINGS))
    try:
        jobs = Jobs(sandbox)
        rate_without_comm = 0.0
        for variant in (Variant(OFF, RANKS, 1, VARIANTS[OFF], judged=False), *COMBINATIONS, *ALLREDUCE):
            options = f"{common(STEPS, seed)} --straggler {SPEEDS[MIXED]} {variant.options}"
            results = [jobs.train(variant.nodes, variant.tasks_per_node, options) for _ in range(REPEATS)]
            print(f"gossip: {variant.name}", file=sys.stderr, flush=True)
            rates = [rate(result, variant.options) for result in results]
            rate_without_comm = rate_without_comm or statistics.median(rates)
            yield throughput(variant, cpu_bound_note(results), rates, rate_without_comm)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield from accuracies(seed)


def throughput(variant: Variant, cpu_bound_note: str, rates: Sequence[float], rate_without_comm: float) -> Row:
    """Compare samples per second with communication off; variants without balance are negative controls."""
    is_met = statistics.median(rates) >= TARGET * rate_without_comm
    target = f"{'at least' if variant.balanced else 'below'} {TARGET:g} of the baseline"
    target += "" if variant.balanced else " (control)"
    return make_row(f"{MIXED}: {variant.name}{cpu_bound_note}", rates, "1/s", baseline=rate_without_comm,
                    target=target if variant.judged else "",
                    met=is_met == variant.balanced if variant.judged else None)


def accuracies(seed: int) -> Iterator[Row]:
    """Yield the difference in accuracy of each combination between unequal and equal speeds."""
    cases = {(variant.name, speeds): (*variant.options.split(), "--virtual-zones", variant.zones, *slow)
             for variant in (*COMBINATIONS, *ALLREDUCE)
             for speeds, slow in (("", ()), (MIXED, ("--straggler", SPEEDS[MIXED])))}
    by_case = run(cases, range(seed, seed + SEEDS))
    for variant in (*COMBINATIONS, *ALLREDUCE):
        equal = by_case[variant.name, ""]
        gains = difference(by_case[variant.name, MIXED], equal)
        judged = variant.judged and variant.balanced
        bounds = f"95 % bounds {lower_bound_95(gains):.2f} and {-lower_bound_95([-points for points in gains]):.2f}"
        yield make_row(f"{variant.name}: accuracy, {MIXED} vs. equal speeds", gains, "points",
                       baseline=statistics.fmean(outcome.accuracy for folds in equal for outcome in folds),
                       target=f"lower bound at least -{LOSS:g} ({bounds})" if judged else bounds,
                       met=lower_bound_95(gains) >= -LOSS if judged else None)
