"""Islands and flat strategies under the same disturbance: skewed data between zones, and one zone at half the speed.

All figures are from virtual ranks: the training is real, its time is emulated (50 Mbit/s between the zones). Control:
the same without the disturbance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from benchmarks.islands.virtual_training import RANKS, Case, Course, train_all
from benchmarks.results import Row, make_row

#: seconds of a step on one core of the machine that wrote the results, and the emulated links
COMPUTE_S, LINKS = 0.024, "inter-zone=50M:0.0005,intra-zone=10G"
STEPS, TARGET_STEPS = 128, 64
ALLREDUCE = "allreduce, hierarchical"
ISLANDS = "islands, gossip every 16 steps, int4"
#: method -> options of `slurmdl train`
METHODS: dict[str, tuple[str, ...]] = {
    ALLREDUCE: ("--strategy", "allreduce", "--comm-pattern", "hierarchical"),
    "local-sgd every 16 steps, int4": ("--strategy", "local-sgd", "--period", "16", "--compression", "int4"),
    "gossip every 16 steps, int4": ("--strategy", "gossip", "--comm-pattern", "base-2", "--period", "16",
                                    "--compression", "int4"),
    "islands, local-sgd every 16 steps, int4": ("--strategy", "local-sgd", "--period", "16", "--compression", "int4",
                                                "--islands", "zone"),
    ISLANDS: ("--strategy", "gossip", "--comm-pattern", "base-2", "--period", "16", "--compression", "int4",
              "--islands", "zone"),
    "islands, NoLoCo every 16 steps, int4": (
        "--preset", "noloco", "--comm-pattern", "base-2", "--period", "16", "--compression", "int4",
        "--islands", "zone")}
UNDISTURBED, SKEW, SLOW, BALANCED = "undisturbed", "skewed data", "zone B at half speed", \
    "zone B at half speed, load balance"
SLOW_ZONE = ("--straggler", ",".join(f"{rank}=2" for rank in range(RANKS // 2, RANKS)))
#: steps that are timed with a slow zone; two periods
TIMED_STEPS = 32
#: disturbance -> its options and the Dirichlet parameter of the skew between the zones
DISTURBANCES: dict[str, tuple[tuple[str, ...], float | None]] = {
    UNDISTURBED: ((), None), SKEW: ((), 0.3), SLOW: ((*SLOW_ZONE, "--steps", str(TIMED_STEPS)), None),
    BALANCED: ((*SLOW_ZONE, "--load-balance"), None)}


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield the loss of each method under each disturbance, and its emulated time to that of allreduce."""
    seeds = range(seed, seed + (1 if quick else 5))
    common = ("--emulate-compute", str(COMPUTE_S), "--virtual-links", LINKS, "--steps", str(STEPS),
              "--evaluate-every", "32")
    cases = {f"{disturbance}: {method}": Case((*common, *options, *extra), alpha)
             for disturbance, (extra, alpha) in DISTURBANCES.items() for method, options in METHODS.items()}
    courses = train_all(cases, seeds)
    for method, seed in product(METHODS, seeds):
        # without load balance a slow zone changes the time of a step, not what is computed
        slow, other = (courses[f"{disturbance}: {method}", seed] for disturbance in (SLOW, UNDISTURBED))
        courses[f"{SLOW}: {method}", seed] = replace(other, step_s=slow.step_s)
    yield from evaluate(courses, seeds)


def evaluate(courses: Mapping[tuple[str, int], Course], seeds: Sequence[int]) -> Iterator[Row]:
    """Target of a method: the loss of undisturbed allreduce after TARGET_STEPS steps."""
    targets = [courses[f"{UNDISTURBED}: {ALLREDUCE}", seed].losses[TARGET_STEPS] for seed in seeds]
    for disturbance in DISTURBANCES:
        base = [courses[f"{disturbance}: {ALLREDUCE}", seed] for seed in seeds]
        base_s = statistics.median(course.seconds_to(target) for course, target in zip(base, targets, strict=True))
        for method in METHODS:
            name, own = f"{disturbance}: {method}", [courses[f"{disturbance}: {method}", seed] for seed in seeds]
            seconds = [course.seconds_to(target) for course, target in zip(own, targets, strict=True)]
            yield make_row(f"{name}: test loss after {STEPS} steps", [course.losses[STEPS] for course in own], "nats",
                           baseline=statistics.median(course.losses[STEPS] for course in base))
            reached = [value for value in seconds if math.isfinite(value)]
            if len(reached) < len(seconds):
                yield make_row(f"{name}: seeds that do not reach the loss of allreduce after {TARGET_STEPS} steps",
                               [len(seconds) - len(reached)], "seeds", baseline=0)
            if reached:
                judged = method == ISLANDS
                yield make_row(f"{name}: emulated time to the loss", reached, "s",
                               baseline=base_s if math.isfinite(base_s) else None,
                               target="sooner than allreduce" if judged else "",
                               met=len(reached) == len(seconds) and statistics.median(reached) < base_s
                               if judged else None)
