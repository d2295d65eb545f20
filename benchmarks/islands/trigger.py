"""Does the drift trigger earn its place between islands? Its loss beside that of fixed periods with the same bytes.

Gossip between two islands in int4, on virtual ranks. Each budget is the share of bytes that one of the periods sends,
with the headers and the final average, which count for a budget. Control: both must send about equal bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.islands.virtual_training import Case, Course, train_all
from benchmarks.results import Row, make_row

STEPS = 240
#: period -> budget with about as many bytes: an int4 message has an eighth of the bytes of fp32, and a scale
BUDGETS = {8: "1.7%", 16: "0.85%", 32: "0.43%"}
OPTIONS = ("--islands", "zone", "--comm-pattern", "base-2", "--compression", "int4", "--emulate-compute", "0",
           "--steps", str(STEPS), "--evaluate-every", str(STEPS))
#: bytes of the trigger and of the period may differ by this share
BYTES_TOLERANCE = 0.15


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield losses and bytes of the periods and of the budgets."""
    seeds = range(seed, seed + (1 if quick else 5))
    cases = {period_name(period): Case((*OPTIONS, "--strategy", "gossip", "--period", str(period)))
             for period in BUDGETS}
    cases |= {budget_name(budget): Case((*OPTIONS, "--strategy", "adaptive-gossip", "--comm-budget", budget))
              for budget in BUDGETS.values()}
    yield from evaluate(train_all(cases, seeds), seeds)


def period_name(period: int) -> str:
    return f"islands, gossip every {period} steps, int4"


def budget_name(budget: str) -> str:
    return f"islands, adaptive gossip with a budget of {budget}, int4"


def evaluate(courses: Mapping[tuple[str, int], Course], seeds: Sequence[int]) -> Iterator[Row]:
    for period, budget in BUDGETS.items():
        fixed, adaptive = ([courses[name, seed] for seed in seeds] for name in (period_name(period),
                                                                                budget_name(budget)))
        losses, own = ([course.losses[STEPS] for course in group] for group in (fixed, adaptive))
        baseline = statistics.median(losses)
        yield make_row(f"{period_name(period)}: test loss after {STEPS} steps", losses, "nats")
        yield make_row(f"{budget_name(budget)}: test loss after {STEPS} steps", own, "nats", baseline=baseline,
                       target="below that of the period in each seed",
                       met=all(mine < other for mine, other in zip(own, losses, strict=True)))
        sent = [mine.inter_zone_bytes / other.inter_zone_bytes for mine, other in zip(adaptive, fixed, strict=True)]
        yield make_row(f"{budget_name(budget)}: bytes between zones, of those of period {period} (control)", sent,
                       "times", baseline=1.0, target=f"within {BYTES_TOLERANCE:.0%}",
                       met=abs(statistics.median(sent) - 1) <= BYTES_TOLERANCE)
