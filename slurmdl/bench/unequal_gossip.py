"""Gossip of unequal ranks: {shared memory, messages, both} x {balanced, not} x {in step, asynchronous}.

What each combination does in a second, on nodes of a sandbox that hold all ranks, one each, or half of them, and what
it costs in accuracy, simulated on the same nodes with the same seeds at equal speed; allreduce stands beside it.
Allreduce, which the parts `speed` and `accuracy` judge, is not judged here.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from slurmdl.bench import results
from slurmdl.bench.accuracy import bound as lower
from slurmdl.bench.accuracy import difference
from slurmdl.bench.results import Row
from slurmdl.bench.unequal_accuracy import run
from slurmdl.bench.unequal_jobs import SETTINGS, Jobs, bound
from slurmdl.bench.unequal_speed import CPUS, OFF, RANKS, SPEEDS, STEPS, TARGET, WAYS, common, rate
from slurmdl.sandbox import cluster
from slurmdl.sandbox.spec import Spec, alternating

#: which ranks are how slow
MIXED = list(SPEEDS)[-1]
REPEATS, SEEDS = 2, 3
#: points of accuracy that unequal speeds may cost
LOSS = 0.5


@dataclass(frozen=True)
class Way:
    """A strategy on so many nodes with so many ranks on each."""

    name: str
    nodes: int
    each: int
    options: str
    judged: bool = True

    @property
    def zones(self) -> str:
        """As --zones of a simulation has the nodes."""
        return f"A:{self.nodes}x{self.each}"

    @property
    def balanced(self) -> bool:
        return "--balance" in self.options


WHERE = {"shared memory": (1, RANKS, " --shared-memory"), "messages": (RANKS, 1, ""),
         "both": (2, RANKS // 2, " --shared-memory")}
#: ranks that meet after every step make as many, so that a batch is all that can differ
HOW = {"not balanced, in step": "", "balanced, in step": " --balance batch", "not balanced, asynchronous": " --async",
       "balanced, asynchronous": " --async --balance steps"}
COMBINATIONS = [Way(f"gossip, {where}, {how}", nodes, each, f"--strategy gossip{memory}{options}")
                for (where, (nodes, each, memory)), (how, options) in product(WHERE.items(), HOW.items())]
ALLREDUCE = [Way("allreduce, not balanced", RANKS, 1, "--strategy allreduce", judged=False),
             Way("allreduce, balanced", RANKS, 1, "--strategy allreduce --balance batch", judged=False)]


def rows(seed: int) -> Iterator[Row]:
    """Samples per second of each combination, then accuracies."""
    box = cluster.up(Spec(f"gossip-{os.getpid()}", alternating(RANKS, 1), cpus=CPUS, settings=SETTINGS))
    try:
        jobs = Jobs(box)
        off = 0.0
        for way in (Way(OFF, RANKS, 1, WAYS[OFF], judged=False), *COMBINATIONS, *ALLREDUCE):
            options = f"{common(STEPS, seed)} --slow {SPEEDS[MIXED]} {way.options}"
            found = [jobs.train(way.nodes, way.each, options) for _ in range(REPEATS)]
            print(f"gossip: {way.name}", file=sys.stderr, flush=True)
            rates = [rate(its, way.options) for its in found]
            off = off or statistics.median(rates)
            yield throughput(way, bound(found), rates, off)
    finally:
        cluster.down(box.spec.name)
    yield from accuracies(seed)


def throughput(way: Way, bound: str, rates: Sequence[float], off: float) -> Row:
    """Samples per second of a combination beside those of communication off; what is not balanced is the control."""
    good = statistics.median(rates) >= TARGET * off
    words = f"at least {TARGET:g} of them" if way.balanced else f"below {TARGET:g} of them (control)"
    return results.row(f"{MIXED}: {way.name}{bound}", rates, "1/s", baseline=off, target=words if way.judged else "",
                       met=good == way.balanced if way.judged else None)


def accuracies(seed: int) -> Iterator[Row]:
    """Differences in accuracy of each combination to its own at equal speed."""
    cases = {(way.name, speeds): (*way.options.split(), "--zones", way.zones, *slow)
             for way in (*COMBINATIONS, *ALLREDUCE)
             for speeds, slow in (("", ()), (MIXED, ("--slow", SPEEDS[MIXED])))}
    found = run(cases, range(seed, seed + SEEDS))
    for way in (*COMBINATIONS, *ALLREDUCE):
        equal = found[way.name, ""]
        more = difference(found[way.name, MIXED], equal)
        judged = way.judged and way.balanced
        bounds = f"95 % bounds {lower(more):.2f} and {-lower([-points for points in more]):.2f}"
        yield results.row(f"{way.name}: accuracy, {MIXED} over equal speeds", more, "points",
                          baseline=statistics.fmean(its.accuracy for folds in equal for its in folds),
                          target=f"lower bound at least -{LOSS:g} ({bounds})" if judged else bounds,
                          met=lower(more) >= -LOSS if judged else None)
