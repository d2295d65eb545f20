"""Benchmark of strategies at a small size: rows, negative controls and statistics."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from judging import check_rows

from benchmarks import virtual_runs
from benchmarks.strategies import accuracy_vs_bytes, meter_overhead, time_to_accuracy
from benchmarks.strategies.accuracy_vs_bytes import (
    EVERY_STEP,
    NO_EXCHANGE,
    TARGET_VARIANT,
    Variant,
    evaluate,
    lower_bound_95,
)
from benchmarks.virtual_runs import Outcome, run_training

ROOT = Path(__file__).parents[2]


def outcomes(right: float, bytes_sent: int, local_accuracy: float | None = None) -> list[list[Outcome]]:
    """Make outcomes of 5 seeds and 2 folds, with the same noise for all variants."""
    noise = np.random.default_rng(1).normal(0, 0.5, (5, 2))
    local = right if local_accuracy is None else local_accuracy
    return [[Outcome(right + offset, local + offset, bytes_sent, 0.5) for offset in seed_offsets]
            for seed_offsets in noise.tolist()]


OUTCOMES = {EVERY_STEP: outcomes(97, 1000), NO_EXCHANGE: outcomes(95, 0, local_accuracy=80),
            TARGET_VARIANT: outcomes(97, 20),
            Variant("sign", 8): outcomes(96, 15), Variant("sign", 4): outcomes(98, 25),
            Variant("fp32", 8): outcomes(97.5, 5)}


@pytest.mark.parametrize(("changes", "expected"), [
    # the period of 4 is more accurate, but sends more bytes; fp32 is another compressor
    ({}, {"here: control: ranks that never exchange vs. gossip at every step": True,
          f"here: {TARGET_VARIANT}: accuracy vs. gossip at every step": (0.0, True),
          f"here: {TARGET_VARIANT}: bytes saved": 98.0,
          f"here: {TARGET_VARIANT}: accuracy vs. sign, every 8 steps, the best period at no more bytes": 1.0,
          "here: sign, every 4 steps: accuracy vs. gossip at every step": None}),
    ({TARGET_VARIANT: outcomes(96, 20)}, {f"here: {TARGET_VARIANT}: accuracy vs. gossip at every step": False}),
    ({TARGET_VARIANT: outcomes(97, 40)}, {f"here: {TARGET_VARIANT}: bytes saved": False}),
    ({NO_EXCHANGE: outcomes(97, 0)}, {"here: control: ranks that never exchange vs. gossip at every step": False}),
])
def test_variants_are_compared_with_every_step_and_triggers_with_periods(
        changes: dict[Variant, list[list[Outcome]]], expected: dict[str, object]) -> None:
    rows = [*evaluate("here", {**OUTCOMES, **changes})]
    check_rows(rows, expected)
    assert max(row.repeats for row in rows) == 5
    assert changes or any(row.target.startswith("a gain") for row in rows)


def test_terminated_benchmark_ends_workers() -> None:
    benchmark = subprocess.Popen([sys.executable, "-m", "benchmarks.strategies", "--only", "accuracy-vs-bytes-async"],
                                 cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, start_new_session=True)

    def working() -> int:
        """Count the running processes of the session."""
        stats = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                stats.append(file.read_text().rpartition(")")[2].split())
        return sum(stat[3] == str(benchmark.pid) and stat[0] != "Z" for stat in stats)

    try:
        deadline = time.monotonic() + 60
        while working() < 2 + virtual_runs.MAX_PROCESSES:  # plus the benchmark and multiprocessing's resource tracker
            assert benchmark.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        benchmark.terminate()
        assert benchmark.wait(30) == 128 + signal.SIGINT
        while working():
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(benchmark.pid, signal.SIGKILL)
        benchmark.wait()


def test_lower_bound_95_holds_in_95_percent() -> None:
    random = np.random.default_rng(3)
    below = [lower_bound_95(random.normal(1.0, 0.3, 5).tolist()) <= 1.0 for _ in range(4000)]
    assert np.mean(below) == pytest.approx(0.95, abs=0.012)


def test_outcome_has_accuracy_bytes_and_course() -> None:
    result = run_training(("--virtual-ranks", "2", "--steps", "40", "--model", "mlp:16", "--strategy", "gossip",
                           "--evaluate-every", "20", "--emulate-compute", "0.25"))
    # the last batch of an epoch is smaller and takes proportionally less time
    assert [clock for clock, _, _ in result.accuracy_curve] == pytest.approx([5.0, 10.0], rel=0.02)
    assert result.local_accuracy == pytest.approx(result.accuracy), "two ranks with the same model"
    assert result.accuracy > 50
    assert result.accuracy_curve[-1][1] == pytest.approx(result.accuracy, abs=0.01)
    assert result.bytes_sent > 0


def test_time_to_accuracy_evaluate_times_gains_and_control() -> None:
    def accuracy_curve(*means: float, local_accuracy: float = 50.0) -> tuple[tuple[float, float, float], ...]:
        return tuple((1.0 + at, mean, local_accuracy) for at, mean in enumerate(means))

    slow = Outcome(97, 97, 1000, 0.75, accuracy_curve(50, 70, 80, 92, 94, 95, 95, 96))
    fast = Outcome(97, 97, 10, 0.1, accuracy_curve(93, 94))
    by_variant = {variant: [slow if variant == "every step" else fast] * 2 for variant in time_to_accuracy.VARIANTS}
    adaptive = f"here: {time_to_accuracy.TARGET_VARIANT}"
    check_rows(time_to_accuracy.evaluate("here", by_variant), {
        "here: gossip at every step, time to 93 %": 6.0, f"{adaptive}, time to 93 %": 2.0,
        f"{adaptive}, time saved vs. gossip at every step": (100 * 4 / 6, True),
        f"{adaptive}, time saved as a share of the communication time": 100 * 4 / 4.5,
        "here: control: accuracy that ranks without exchange lack vs. gossip at every step": True})
    with pytest.raises(RuntimeError, match="not reached"):
        time_to_accuracy.seconds_to_goal(Outcome(90, 90, 1, 0.5, accuracy_curve(80, 90)))


def test_meter_overhead_slow_clock_is_detected() -> None:
    rows = list(meter_overhead.rows(1, quick=True))
    assert [row.unit for row in rows] == ["share", "share", "s"]
    assert rows[1].value > 5 * rows[0].value
    assert rows[1].met is True


def test_variants_are_valid_trainer_options() -> None:
    from slurmdl.train.strategy_config import check_compatibility
    from slurmdl.train.trainer.options import parse_train_options
    situations = [*itertools.product([*accuracy_vs_bytes.SITUATIONS.values(), *accuracy_vs_bytes.CHANGING.values()],
                                     accuracy_vs_bytes.VARIANTS),
                  *itertools.product([accuracy_vs_bytes.ASYNC_OPTIONS],
                                     accuracy_vs_bytes.low_traffic_variants("fp32"))]
    for options, variant in situations:
        parsed = parse_train_options([*accuracy_vs_bytes.COMMON, *options, *variant.options()], {})
        assert parsed.virtual_ranks == 8
        check_compatibility(dataclasses.replace(parsed.strategy_config, comm_pattern="base-2"))
    for variant, rate in itertools.product(time_to_accuracy.VARIANTS.values(), time_to_accuracy.RATES):
        arguments = [*time_to_accuracy.COMMON, *time_to_accuracy.link_options(rate), *variant]
        assert len(parse_train_options(arguments, {}).virtual_links) == 2
    assert virtual_runs.MAX_PROCESSES == 2
