"""Gossip of ranks of different speeds: {shared memory, messages, both} x {balanced, not} x {synchronous,
asynchronous}.

This is the experiment of the paper on gossip training on heterogeneous hardware (Large-Scale Scientific Computing,
LSSC 2019). None of its values is quoted here, because they belong to its machines. Measured are samples per second
relative to the same ranks with communication off, on sandbox nodes that hold all ranks, one each, or half of them;
and the accuracy relative to equal speed, on virtual ranks with the same nodes and seeds. Allreduce is shown without a
target; the parts `throughput` and `accuracy` evaluate it.
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

#: which ranks are how slow
MIXED = list(SPEEDS)[-1]
REPEATS, SEEDS = 2, 3
#: points of accuracy that unequal speeds may cost
LOSS = 0.5


@dataclass(frozen=True)
class Variant:
    """A strategy on `nodes` nodes with `each` ranks on each."""

    name: str
    nodes: int
    each: int
    options: str
    judged: bool = True

    @property
    def zones(self) -> str:
        """The nodes as value of --virtual-zones."""
        return f"A:{self.nodes}x{self.each}"

    @property
    def balanced(self) -> bool:
        return "--load-balance" in self.options


WHERE = {"shared memory": (1, RANKS, " --shared-memory"), "messages": (RANKS, 1, ""),
         "both": (2, RANKS // 2, " --shared-memory")}
#: ranks that meet after every step make as many, so that a batch is all that can differ
HOW = {"not balanced, in step": "", "balanced, in step": " --load-balance batch-size",
       "not balanced, asynchronous": " --async",
       "balanced, asynchronous": " --async --load-balance local-steps"}
COMBINATIONS = [Variant(f"gossip, {where}, {how}", nodes, each, f"--strategy gossip{memory}{options}")
                for (where, (nodes, each, memory)), (how, options) in product(WHERE.items(), HOW.items())]
ALLREDUCE = [Variant("allreduce, not balanced", RANKS, 1, "--strategy allreduce", judged=False),
             Variant("allreduce, balanced", RANKS, 1, "--strategy allreduce --load-balance batch-size", judged=False)]


def rows(seed: int) -> Iterator[Row]:
    """Yield samples per second of each combination, then accuracies."""
    sandbox = lifecycle.sandbox_up(
    SandboxSpec(
        f"gossip-{os.getpid()}",
        round_robin_topology(
            RANKS,
            1),
            cpus=CPUS,
             slurm_conf_lines=SETTINGS))
    try:
        jobs = Jobs(sandbox)
        off = 0.0
        for variant in (Variant(OFF, RANKS, 1, VARIANTS[OFF], judged=False), *COMBINATIONS, *ALLREDUCE):
            options = f"{common(STEPS, seed)} --straggler {SPEEDS[MIXED]} {variant.options}"
            found = [jobs.train(variant.nodes, variant.each, options) for _ in range(REPEATS)]
            print(f"gossip: {variant.name}", file=sys.stderr, flush=True)
            rates = [rate(its, variant.options) for its in found]
            off = off or statistics.median(rates)
            yield throughput(variant, cpu_bound_note(found), rates, off)
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield from accuracies(seed)


def throughput(variant: Variant, cpu_bound_note: str, rates: Sequence[float], off: float) -> Row:
    """Compare samples per second with those without communication; variants without balance are controls."""
    good = statistics.median(rates) >= TARGET * off
    words = f"at least {TARGET:g} of them" if variant.balanced else f"below {TARGET:g} of them (control)"
    return make_row(f"{MIXED}: {variant.name}{cpu_bound_note}", rates, "1/s", baseline=off, target=words
                    if variant.judged else "",
                    met=good == variant.balanced if variant.judged else None)


def accuracies(seed: int) -> Iterator[Row]:
    """Yield the difference in accuracy of each combination from the same at equal speed."""
    cases = {(variant.name, speeds): (*variant.options.split(), "--virtual-zones", variant.zones, *slow)
             for variant in (*COMBINATIONS, *ALLREDUCE)
             for speeds, slow in (("", ()), (MIXED, ("--straggler", SPEEDS[MIXED])))}
    found = run(cases, range(seed, seed + SEEDS))
    for variant in (*COMBINATIONS, *ALLREDUCE):
        equal = found[variant.name, ""]
        more = difference(found[variant.name, MIXED], equal)
        judged = variant.judged and variant.balanced
        bounds = f"95 % bounds {lower_bound_95(more):.2f} and {-lower_bound_95([-points for points in more]):.2f}"
        yield make_row(f"{variant.name}: accuracy, {MIXED} over equal speeds", more, "points",
                       baseline=statistics.fmean(its.accuracy for folds in equal for its in folds),
                       target=f"lower bound at least -{LOSS:g} ({bounds})" if judged else bounds,
                       met=lower_bound_95(more) >= -LOSS if judged else None)
