"""Accuracy lost by different rank speeds, on virtual ranks; paired with equal speed by seed and fold.

The negative control, ranks that never exchange, must be worse. Its ranks have their own partitions of the images:
with all images in turn, as load balance assigns them, a rank trains nearly as well alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from benchmarks.heterogeneous.throughput import BALANCED, GOSSIP, SPEEDS, VARIANTS
from benchmarks.results import Row, make_row
from benchmarks.strategies.accuracy_vs_bytes import FOLDS, LOSS, SAME, difference, lower_bound_95
from benchmarks.virtual_runs import Outcome, run_trainings

COMMON = ("--virtual-ranks", "8", "--model", "mlp:64", "--batch-size", "16", "--lr", "0.05", "--steps", "500")
EQUAL = "equal speeds"
NO_EXCHANGE = "ranks that never exchange, each with its own images"
SEEDS = 5
#: (variant, speeds)
Case = tuple[str, str]


def rows(seed: int) -> Iterator[Row]:
    """Yield the differences in accuracy for each mixture of speeds."""
    speeds = {EQUAL: "", **SPEEDS}
    cases = {(variant, name): (*VARIANTS[variant].split(), *(("--straggler", slow) if slow else ()))
             for variant, (name, slow) in product((GOSSIP, BALANCED), speeds.items())}
    no_exchange = ("--strategy", "gossip", "--period", "1000000", *SAME)
    yield from evaluate(run({**cases, (NO_EXCHANGE, EQUAL): no_exchange}, range(seed, seed + SEEDS)))


def run(cases: Mapping[Case, Sequence[str]], seeds: Sequence[int]) -> dict[Case, list[list[Outcome]]]:
    """Run all cases; return their outcomes by seed and fold."""
    runs = list(product(cases, seeds, range(1, FOLDS + 1)))
    completed = run_trainings((*COMMON, *cases[case], "--seed", str(seed), "--fold", f"{fold}/{FOLDS}")
                              for case, seed, fold in runs)
    by_case: dict[Case, list[list[Outcome]]] = {case: [[] for _ in seeds] for case in cases}
    for (case, seed, _), outcome in zip(runs, completed, strict=True):
        by_case[case][seed - seeds[0]].append(outcome)
    return by_case


def evaluate(by_case: Mapping[Case, Sequence[Sequence[Outcome]]]) -> Iterator[Row]:
    """Yield the rows: accuracy lost by different speeds, and the negative control."""
    control = [statistics.fmean(isolated.local_accuracy - reference.accuracy
                                for isolated, reference in zip(*folds, strict=True))
               for folds in zip(by_case[NO_EXCHANGE, EQUAL], by_case[GOSSIP, EQUAL], strict=True)]
    yield make_row(f"control: {NO_EXCHANGE}, vs. {GOSSIP}", control, "points",
                   target=f"at least {LOSS:g} worse", met=-lower_bound_95([-points for points in control]) < -LOSS)
    for (variant, speeds), outcomes_by_seed in by_case.items():
        if speeds != EQUAL:
            equal = by_case[variant, EQUAL]
            gains = difference(outcomes_by_seed, equal)
            yield make_row(f"{variant}: accuracy, {speeds} vs. {EQUAL}", gains, "points",
                           baseline=statistics.fmean(outcome.accuracy for folds in equal for outcome in folds),
                           target=f"lower 95 % bound (here {lower_bound_95(gains):.2f}) at least -{LOSS:g} points",
                           met=lower_bound_95(gains) >= -LOSS)
