"""The benchmark of islands: verdicts on given figures. It runs for real in `make bench-islands`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from judging import check_rows

from benchmarks.islands import disturbances, prediction, trigger
from benchmarks.islands import time_to_loss as bench
from benchmarks.islands.virtual_training import Course, skewed_zones
from slurmdl.train.trainer import data_readers


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
    check_rows(bench.evaluate(steps, measured(ring, islands, control, other)), {
        **dict(zip((f"50 Mbit/s: {bench.ISLANDS}: time to the loss", f"1 Gbit/s: {bench.ISLANDS}: time to the loss",
                    f"50 Mbit/s: {bench.CONTROL}: time to the loss"), met, strict=True)),
        "50 Mbit/s: gossip: time to the loss": 110 * other,
        f"{bench.ISLANDS}: bytes between zones to the loss": True})


def test_more_steps_to_the_loss_count_as_time_and_bytes() -> None:
    steps = {method: [300.0 if method == bench.ISLANDS else 100.0] for method in bench.METHODS}
    check_rows(bench.evaluate(steps, measured(1.0, 0.1, 0.2, 0.3)), {
        f"50 Mbit/s: {bench.ISLANDS}: time to the loss": 30.0,
        f"{bench.ISLANDS}: bytes between zones to the loss": False})
    some, seeds = bench.steps_rows("gossip", [100.0, math.inf, 120.0])
    assert (some.samples, seeds.value) == ((100.0, 120.0), 1), "seeds that do not reach the loss are counted"
    check_rows(bench.steps_rows("gossip", [math.inf] * 3), {
        f"gossip: seeds that do not reach the loss in {bench.MAX_STEPS} steps": 3.0})


def test_steps_and_seconds_to_a_loss() -> None:
    course = Course({16: 3.0, 32: 2.0, 48: 2.5}, 0.5, 0)
    assert (course.steps_to(2.2), course.seconds_to(2.2)) == (32, 16.0)
    assert math.isinf(course.steps_to(1.0)) and math.isinf(course.seconds_to(1.0))


def test_skewed_zones_share_no_sample_and_differ_in_sections() -> None:
    labels = np.repeat(np.arange(10), 80)
    with skewed_zones(0.1):
        parts = data_readers.partition_indices(labels, 8, 1.0, 3)
    samples = np.concatenate(parts)
    assert len(set(samples)) == len(samples) and {len(part) for part in parts} == {100}
    sections = [np.bincount(labels[np.concatenate(zone)], minlength=10) for zone in (parts[:4], parts[4:])]
    assert np.abs(sections[0] - sections[1]).sum() > 400  # of 800 samples
    within = np.abs(np.bincount(labels[parts[0]], minlength=10) - np.bincount(labels[parts[1]], minlength=10)).sum()
    assert within < 100


def trigger_courses(saving: float) -> dict[tuple[str, int], Course]:
    """Periods lose 0.1 from one to the next; a budget loses `saving` less than the period with its bytes."""
    courses = {}
    for index, (period, budget) in enumerate(trigger.BUDGETS.items()):
        loss, sent = 1.9 + 0.1 * index, 100.0 / period
        for seed in range(3):
            courses[trigger.period_name(period), seed] = Course({trigger.STEPS: loss}, 0.1, sent)
            courses[trigger.budget_name(budget), seed] = Course({trigger.STEPS: loss - saving}, 0.1, sent)
    return courses


@pytest.mark.parametrize(("saving", "met"), [(0.05, True), (-0.05, False)])
def test_trigger_must_lose_less_than_the_period_with_its_bytes(saving: float, met: bool) -> None:
    rows = [row for row in trigger.evaluate(trigger_courses(saving), range(3)) if row.met is not None]
    assert [row.met for row in rows] == [met, True] * len(trigger.BUDGETS)


@pytest.mark.parametrize(("islands_s", "met"), [(5.0, True), (20.0, False)])
def test_islands_must_be_sooner_than_allreduce_under_each_disturbance(islands_s: float, met: bool) -> None:
    target = disturbances.TARGET_STEPS
    courses = {}
    for disturbance in disturbances.DISTURBANCES:
        for method in disturbances.METHODS:
            seconds = islands_s if method == disturbances.ISLANDS else 10.0
            courses[f"{disturbance}: {method}", 1] = Course(
                {target: 2.0, disturbances.STEPS: 1.5}, seconds, 0)
    # a method that does not reach the loss of undisturbed allreduce
    lost = f"{disturbances.SKEW}: gossip every 16 steps, int4"
    courses[lost, 1] = Course({disturbances.STEPS: 2.1}, 10.0, 0)
    rows = [*disturbances.evaluate(courses, [1])]
    verdicts = {row.metric: row.met for row in rows if row.met is not None}
    assert verdicts == {f"{disturbance}: {disturbances.ISLANDS}: emulated time to the loss": met
                        for disturbance in disturbances.DISTURBANCES}
    assert [row.value for row in rows if row.metric.startswith(f"{lost}: seeds that do not reach")] == [1]


@pytest.mark.parametrize(("factor", "met"), [(1.0, (True, True)), (1.5, (False, True)), (0.16, (False, False))])
def test_prediction_must_be_near_and_that_of_allreduce_far(factor: float, met: tuple[bool, bool]) -> None:
    predicted = bench.predict_seconds(bench.METHODS[bench.ISLANDS], 2e7, "zone", prediction.NODES,
                                      0.12, prediction.NODE_RATE)
    assert predicted > 0.12
    own, control = prediction.compare("20 Mbit/s", 2e7, bench.ISLANDS, [predicted / factor] * 3, 0.12)
    assert own.value == pytest.approx(factor)
    assert (own.met, control.met) == met
