"""Time to accuracy over slow links between zones, in virtual time.

8 virtual ranks in two zones, each on its own node; computation takes a fixed time, and messages queue on the uplinks
of the zones. Gossip at every step, with and without compression, is compared with a period and with the trigger, on
one graph. The gain is also shown as a share of the communication time, the largest possible gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise, product

from benchmarks.results import Row, make_row
from benchmarks.strategies.accuracy_vs_bytes import SAME, SKEWED, Variant
from benchmarks.strategies.accuracy_vs_bytes import TARGET_VARIANT as BYTES_VARIANT
from benchmarks.virtual_runs import Outcome, run_trainings

#: computation of a step in seconds, and target accuracy in %
COMPUTE, GOAL = 0.005, 93.0
COMMON = ("--virtual-ranks", "8", "--virtual-zones", "A:4,B:4", "--model", "mlp:256,128", "--batch-size", "16",
          "--lr", "0.05", "--comm-pattern", "base-2", "--steps", "300", "--evaluate-every", "5",
          "--emulate-compute", f"{COMPUTE}")
#: name -> rate between zones in bit/s; the rate within a zone is 10 Gbit/s
RATES = {"100 Mbit/s": "100M", "1 Gbit/s": "1G", "10 Gbit/s": "10G"}
DATA = {"same data": SAME, "skewed data": SKEWED}
EVERY_STEP = ("--strategy", "gossip")
#: negative control: ranks never exchange, and each trains on its own images
NO_EXCHANGE = ("--strategy", "gossip", "--period", "1000000")
TARGET_VARIANT = f"adaptive, {BYTES_VARIANT}"
VARIANTS = {"every step": EVERY_STEP, TARGET_VARIANT: BYTES_VARIANT.options(),
            **{str(variant): variant.options() for variant in (Variant("sign", 2), Variant("int4", 16))},
            "alone": NO_EXCHANGE}
#: minimum share of communication for a target, and the target: time saved in %
MIN_COMM_SHARE, TARGET_SAVING = 0.70, 60.0
#: minimum loss of accuracy of the negative control in points
MIN_LOSS = 1.0


def rows(seed: int, quick: bool = False, published: float | None = None) -> Iterator[Row]:
    """Yield times, gains and controls of each link rate.

    `quick`: 2 seeds instead of 5; `published`: saving of time that a paper reports, in %.
    """
    seeds = range(seed, seed + (2 if quick else 5))
    cases = list(product(DATA, RATES, VARIANTS, seeds))
    completed = run_trainings((*COMMON, *DATA[data], *link_options(rate), *VARIANTS[variant], "--seed", str(run_seed))
                              for data, rate, variant, run_seed in cases)
    by_case: dict[tuple[str, str, str], list[Outcome]] = {}
    for (data, rate, variant, _), outcome in zip(cases, completed, strict=True):
        by_case.setdefault((data, rate, variant), []).append(outcome)
    for data, rate in product(DATA, RATES):
        yield from evaluate(f"{data}, {rate}", {variant: by_case[data, rate, variant] for variant in VARIANTS},
                            published)


def link_options(rate: str) -> tuple[str, ...]:
    """Return the options for links between zones of the rate RATES[rate], and of 10 Gbit/s within a zone."""
    return "--virtual-links", f"inter-zone={RATES[rate]}:0.0001,intra-zone=10G:0.00005"


def evaluate(label: str, by_variant: dict[str, list[Outcome]], published: float | None = None) -> Iterator[Row]:
    """Yield the rows of one inter-zone link rate.

    Raises:
        RuntimeError: a variant other than the negative control does not reach the goal.
    """
    every_step = by_variant["every step"]
    base = [seconds_to_goal(outcome) for outcome in every_step]
    share = statistics.median(outcome.comm_share for outcome in every_step)
    yield make_row(f"{label}: gossip at every step, time to {GOAL:g} %", base, "s",
                   target=f"communication: {share:.0%} of the step time")
    for variant, outcomes_of_variant in by_variant.items():
        if variant == "every step":
            continue
        if variant == "alone":
            accuracy_lost = [reference.accuracy - max(local for _, _, local in isolated.accuracy_curve)
                             for isolated, reference in zip(outcomes_of_variant, every_step, strict=True)]
            yield make_row(f"{label}: control: accuracy that ranks without exchange lack vs. gossip at every step",
                           accuracy_lost, "points", target=f"at least {MIN_LOSS:g}",
                           met=min(accuracy_lost) >= MIN_LOSS)
            continue
        times = [seconds_to_goal(outcome) for outcome in outcomes_of_variant]
        yield make_row(f"{label}: {variant}, time to {GOAL:g} %", times, "s", baseline=statistics.median(base))
        reductions = [100 * (1 - time / reference) for time, reference in zip(times, base, strict=True)]
        judged = share >= MIN_COMM_SHARE and variant == TARGET_VARIANT
        yield make_row(f"{label}: {variant}, time saved vs. gossip at every step", reductions, "%",
                       baseline=published if variant == TARGET_VARIANT else None,
                       target=f"at least {TARGET_SAVING:g} %" if judged else "",
                       met=statistics.median(reductions) >= TARGET_SAVING if judged else None)
        # the largest possible gain is the communication time: computation takes the same time
        gain_shares = [100 * (reference - time) / (reference * outcome.comm_share)
                       for time, reference, outcome in zip(times, base, every_step, strict=True)]
        yield make_row(f"{label}: {variant}, time saved as a share of the communication time", gain_shares, "%")


def seconds_to_goal(outcome: Outcome) -> float:
    """Return the seconds until the averaged model reaches the goal in two consecutive evaluations."""
    for (_, previous, _), (clock, current, _) in pairwise(outcome.accuracy_curve):
        if min(previous, current) >= GOAL:
            return clock
    raise RuntimeError(f"an accuracy of {GOAL:g} % is not reached in "
                       f"{outcome.accuracy_curve[-1][0]:.2f} virtual seconds")
