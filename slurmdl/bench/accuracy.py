"""What sending less costs in accuracy: periods and triggers on one graph, with and without compression.

Every run is simulated: 8 ranks, the graph `base`, a small perceptron on the digits; bytes are exact. Each way runs on
the same folds with the same seeds as gossip at every step, so that differences are paired.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from slurmdl.bench.results import Row, row
from slurmdl.bench.simulated import Outcome, outcomes

# computation takes no time: nobody asks for times here, and ranks change over less often
COMMON = ("--simulate", "8", "--model", "mlp:64", "--batch", "16", "--traffic", "base", "--compute", "replay:0")
STEPS = 500
FOLDS = 5
SGD, ADAM = ("--lr", "0.05"), ("--optimizer", "adam", "--lr", "0.002")
#: each rank has images of its own in any case: ranks that were dealt all of them in turn would train well alone
SAME, SKEWED = ("--skew", "1000"), ("--skew", "0.3")
#: what is trained: its name, and its options
SITUATIONS = {"same data, SGD": (*SGD, *SAME), "skewed data, SGD": (*SGD, *SKEWED),
              "same data, Adam": (*ADAM, *SAME), "skewed data, Adam": (*ADAM, *SKEWED)}
#: where a trigger may gain over a period: a learning rate that changes, once or in phases
CHANGING = {f"skewed data, SGD, {words}": (*SGD, *SKEWED, "--lr-schedule", name) for name, words in (
    ("step", "rate falls in steps"), ("cosine", "rate falls"), ("restarts", "rate falls four times"))}
COMPRESSORS = {"fp32": (), "int4": ("--compress", "int4"), "sign": ("--compress", "sign")}
PERIODS = tuple(1 << power for power in range(8))
THRESHOLDS = (0.05, 0.2)
#: the trigger whose bytes are set beforehand; how, and with which compressor, was chosen on other seeds (1 to 5)
BUDGET = "2.8%"
#: periods of each compressor that send no more than triggers do begin about here
SELDOM = {"fp32": 8, "int4": 8, "sign": 2}
#: points of accuracy that may be lost, and the share of the bytes that must be saved
LOSS, SAVED = 0.5, 97.0
#: Student's t, one-sided 95 %, by degrees of freedom
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 9: 1.833}


@dataclass(frozen=True)
class Way:
    """One way of exchanging.

    Attributes
    ----------
    compressor : key of COMPRESSORS.
    period : steps from exchange to exchange; 0 for a trigger.
    trigger : its options, () for a period.
    """

    compressor: str
    period: int = 0
    trigger: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"every {self.period} steps" if self.period else " ".join(self.trigger).replace("--", "")
        return f"{self.compressor}, {what}"

    def options(self) -> tuple[str, ...]:
        when = ("--strategy", "gossip", "--period", str(self.period)) if self.period else (
            "--strategy", "adaptive-gossip", *self.trigger)
        return (*when, *COMPRESSORS[self.compressor])


EVERY = Way("fp32", 1)
#: the control: no rank ever hears of another, and each is judged by its own model
ALONE = Way("fp32", 1 << 20)
JUDGED = Way("sign", trigger=("--comm-budget", BUDGET))
WAYS = (ALONE, *(Way(compressor, period) for compressor in ("fp32", "int4") for period in PERIODS),
        *(Way("sign", period) for period in PERIODS[:4]),
        *(Way(compressor, trigger=("--threshold", str(threshold))) for compressor in ("fp32", "int4")
          for threshold in THRESHOLDS), Way("int4", trigger=JUDGED.trigger), JUDGED)


def seldom(*compressors: str) -> tuple[Way, ...]:
    """What tells whether a trigger gains: those that send little."""
    return tuple(way for way in WAYS if way in (ALONE, EVERY) or (
        way.compressor in compressors and (way.period == 0 or way.period >= SELDOM[way.compressor])))


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Figures of each situation, as soon as it is done; where `quick`, only of SITUATIONS."""
    for situation, options in (SITUATIONS if quick else {**SITUATIONS, **CHANGING}).items():
        ways = WAYS if situation in SITUATIONS else seldom("int4", "sign")
        yield from measure(situation, ways, options, seed, quick)


def measure(situation: str, ways: Sequence[Way], options: Sequence[str], seed: int, quick: bool) -> Iterator[Row]:
    """Figures of one situation; where `quick`, on one fold and 4 seeds instead of 5 and 5, too few to judge by."""
    print(f"accuracy: {situation}", file=sys.stderr, flush=True)
    folds, seeds = (1, 4) if quick else (FOLDS, 5)
    found = run(ways, options, range(seed, seed + seeds), folds)
    yield from judge(situation, found, judged=not quick)


def run(ways: Sequence[Way], options: Sequence[str], seeds: Sequence[int],
        folds: int) -> dict[Way, list[list[Outcome]]]:
    """Outcome of each way, by seed and fold."""
    cases = list(product(ways, seeds, range(1, folds + 1)))
    came = outcomes((*COMMON, "--steps", str(STEPS), *options, *way.options(), "--seed", str(seed),
                     "--fold", f"{fold}/{FOLDS}") for way, seed, fold in cases)
    found: dict[Way, list[list[Outcome]]] = {way: [[] for _ in seeds] for way in ways}
    for (way, seed, _), outcome in zip(cases, came, strict=True):
        found[way][seed - seeds[0]].append(outcome)
    return found


def judge(situation: str, found: dict[Way, list[list[Outcome]]], judged: bool = True,
          published: float | None = None) -> Iterator[Row]:
    """Rows of a situation: the control, what each way saves and loses, and what triggers gain over periods.

    Parameters
    ----------
    judged : whether the outcomes are enough to tell that a target is met or missed.
    published : % of the bytes that others have saved.
    """
    every = found[EVERY]
    base = _mean([[its.accuracy for its in folds] for folds in every])
    alone = [_mean_of(mine) - _mean_of(theirs) for mine, theirs in zip(
        [[its.own for its in folds] for folds in found[ALONE]],
        [[its.accuracy for its in folds] for folds in every], strict=True)]
    yield row(f"{situation}: control: ranks that never exchange, over every step", alone, "points",
              target=f"at least {LOSS} worse", met=bound(alone) < -LOSS)
    share = saved(found)
    for way in found:
        if way in (EVERY, ALONE):
            continue
        lost = difference(found[way], every)
        low = bound(lost)
        good = low >= -LOSS and share[way] >= SAVED
        target = f"{SAVED:g} % saved, and lower 95 % bound (here {low:.2f}) at least -{LOSS} points"
        told = f"saves {share[way]:.2f} %, lower 95 % bound {low:.2f}"
        yield row(f"{situation}: {way}: accuracy over every step", lost, "points", baseline=base,
                  target=target if way == JUDGED else told, met=good if way == JUDGED and judged else None)
        if way == JUDGED:
            yield row(f"{situation}: {way}: bytes saved", [share[way]], "%", baseline=published,
                      target=f"at least {SAVED:g} %", met=share[way] >= SAVED)
        if not way.period:
            yield from gain(situation, way, found)


def saved(found: Mapping[Way, list[list[Outcome]]]) -> dict[Way, float]:
    """% of the bytes of gossip at every step that each way saves."""
    return {way: 100 * (1 - _bytes(its) / _bytes(found[EVERY])) for way, its in found.items()}


def gain(situation: str, way: Way, found: dict[Way, list[list[Outcome]]]) -> Iterator[Row]:
    """What a trigger gains over the most accurate period of the same compressor at no more bytes; None: no row."""
    rivals = [other for other in found if other.period and other != ALONE and other.compressor == way.compressor
              and _bytes(found[other]) <= _bytes(found[way])]
    if not rivals:
        return
    best = max(rivals, key=lambda other: _mean([[its.accuracy for its in folds] for folds in found[other]]))
    more = difference(found[way], found[best])
    low, high = bound(more), -bound([-value for value in more])
    word = "a gain" if low > 0 else "a loss" if high < 0 else "no gain"
    yield row(f"{situation}: {way}: accuracy over {best}, the best period at no more bytes", more, "points",
              target=f"{word} (95 % bounds {low:.2f} and {high:.2f})")


def difference(one: Sequence[Sequence[Outcome]], other: Sequence[Sequence[Outcome]]) -> list[float]:
    """For each seed the mean over its folds of the paired difference in accuracy: each image is tested once in it."""
    return [_mean_of([a.accuracy - b.accuracy for a, b in zip(mine, theirs, strict=True)])
            for mine, theirs in zip(one, other, strict=True)]


def bound(differences: Sequence[float]) -> float:
    """Lower 95 % bound of their mean, by Student's t; the seeds' differences are independent of each other."""
    count = len(differences)
    return _mean_of(differences) - T95[count - 1] * statistics.stdev(differences) / math.sqrt(count)


def _bytes(outcomes: Sequence[Sequence[Outcome]]) -> float:
    return statistics.fmean(its.sent for folds in outcomes for its in folds)


def _mean(values: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(value for folds in values for value in folds)


def _mean_of(values: Sequence[float]) -> float:
    return statistics.fmean(values)
