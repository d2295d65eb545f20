"""The benchmark of islands: verdicts on given figures. It runs for real in `make bench-islands`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.islands import time_to_loss as bench


def measured(ring: float, islands: float, control: float, other: float) -> dict[str, dict[str, Any]]:
    """Seconds of a step, at each rate, and bytes: 100 of the ring, 1 of the other methods."""
    seconds = dict.fromkeys((*bench.METHODS, bench.CONTROL), other)
    seconds |= {bench.DDP: ring, bench.RING: ring, bench.ISLANDS: islands, bench.CONTROL: control}
    return {rate: {method: {"seconds": [value] * 3, "inter_zone_bytes": 100e6 if value == ring else 1e6}
                   for method, value in seconds.items()} for rate in bench.RATES}


@pytest.mark.parametrize(("ring", "islands", "control", "other", "met"), [
    (1.0, 0.1, 0.2, 0.3, (True, True, True)), (0.4, 0.1, 0.2, 0.3, (False, True, True)),
    (1.0, 0.1, 0.05, 0.3, (True, True, False)), (1.0, 0.2, 0.3, 0.1, (False, False, True))])
def test_islands_must_be_sooner_and_the_control_later(ring: float, islands: float, control: float, other: float,
                                                      met: tuple[bool, bool, bool]) -> None:
    steps = {method: [100.0, 120.0, 110.0] for method in bench.METHODS}
    rows = {row.metric: row for row in bench.evaluate(steps, measured(ring, islands, control, other))}
    verdicts = [rows[f"{rate}: {method}: time to the loss"].met for rate, method in (
        ("50 Mbit/s", bench.ISLANDS), ("1 Gbit/s", bench.ISLANDS), ("50 Mbit/s", bench.CONTROL))]
    assert tuple(verdicts) == met
    assert rows["50 Mbit/s: gossip: time to the loss"].value == pytest.approx(110 * other)
    assert rows[f"{bench.ISLANDS}: bytes between zones to the loss"].met


def test_more_steps_to_the_loss_count_as_time_and_bytes() -> None:
    steps = {method: [300.0 if method == bench.ISLANDS else 100.0] for method in bench.METHODS}
    rows = {row.metric: row for row in bench.evaluate(steps, measured(1.0, 0.1, 0.2, 0.3))}
    assert rows["50 Mbit/s: " + bench.ISLANDS + ": time to the loss"].value == pytest.approx(30)
    assert rows[bench.ISLANDS + ": bytes between zones to the loss"].met is False


def test_seeds_that_do_not_reach_the_loss_are_counted() -> None:
    steps, seeds = bench.steps_rows("gossip", [100.0, math.inf, 120.0])
    assert (steps.samples, seeds.value) == ((100.0, 120.0), 1)
    [row] = bench.steps_rows("gossip", [math.inf] * 3)
    assert (row.value, row.metric) == (3, f"gossip: seeds that do not reach the loss in {bench.MAX_STEPS} steps")


def test_steps_to_a_loss_that_is_not_reached_are_infinite() -> None:
    assert bench.steps_to({16: 3.0, 32: 2.0, 48: 2.5}, 2.2) == 32
    assert math.isinf(bench.steps_to({16: 3.0}, 2.2))
