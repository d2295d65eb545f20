"""Overhead of the phase meter: time of its calls in a step over the step time of the smallest model.

The negative control is the same meter with a clock that takes CLOCK seconds to read.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout

from benchmarks.results import Row, make_row
from slurmdl.train.meters import PHASES, PhaseTimer, StepMeter

#: options of a run with one rank, which sends no messages: a step is only computation
RUN = ("--virtual-ranks", "1", "--model", "mlp:64", "--batch-size", "16", "--steps", "1000")
#: largest share of a step
TARGET = 0.01
#: seconds of a clock read in the negative control
CLOCK_S = 20e-6
REPEATS, CALLS = 9, 10_000


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield the share of the step time that the meter takes."""
    step = _step(seed)
    repeats = 3 if quick else REPEATS
    shares = [measure_meter(time.perf_counter, CALLS) / step for _ in range(repeats)]
    slow = [measure_meter(_slow_clock, CALLS // 100) / step for _ in range(repeats)]
    share = statistics.median(shares)
    yield make_row("share of the meter in the step time of the smallest model", shares, "share",
                   target=f"below {TARGET}", met=share < TARGET)
    yield make_row(f"the same with a clock that takes {CLOCK_S * 1e6:.0f} us (control)", slow, "share",
                   baseline=share, target=f"above {TARGET}", met=statistics.median(slow) > TARGET)
    yield make_row("step time of the smallest model", [step], "s")


def measure_meter(clock: Callable[[], float], calls: int) -> float:
    """Measure the seconds of the meter calls of one step."""
    timer = PhaseTimer(StepMeter(), clock, lambda: 0.0)
    start = time.perf_counter()
    for _ in range(calls):
        for phase in PHASES:
            timer.enter(phase)
        timer.end_step()
    return (time.perf_counter() - start) / calls


def _step(seed: int) -> float:
    """Return the median step time in seconds."""
    from slurmdl.train.trainer.options import parse_train_options
    from slurmdl.train.trainer.trainer import train

    with redirect_stdout(io.StringIO()):
        summary = train(parse_train_options([*RUN, "--seed", str(seed)], {}))
    assert summary is not None, "a simulation returns its summary"
    return float(summary["seconds_per_step"])


def _slow_clock() -> float:
    deadline = time.perf_counter() + CLOCK_S
    while (now := time.perf_counter()) < deadline:
        pass
    return now
