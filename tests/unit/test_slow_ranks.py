"""The rule for slow ranks, on values made here; runs with slow ranks are in test_slow_rank_runs.py."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from slurmdl.train.slow_ranks import (
    CONFIRMING_S,
    CONFIRMING_WINDOWS,
    MIN_EXCESS_S,
    MIN_FACTOR,
    WINDOW_STEPS,
    SlowRank,
    SlowRankDetector,
)


def findings(windows: Sequence[Mapping[int, float]]) -> list[tuple[int, SlowRank]]:
    """Index of the window and finding, of all windows."""
    detector = SlowRankDetector()
    return [(index, finding) for index, seconds in enumerate(windows)
            for finding in detector.add_window(seconds, index * WINDOW_STEPS)]


def window(*seconds: float) -> dict[int, float]:
    return dict(enumerate(seconds))


EVEN, SLOW = window(0.2, 0.21, 0.2, 0.19), window(0.2, 0.21, 0.2, 0.38)


def noisy_windows(draw: random.Random, ranks: int, count: int = 200, spread: float = 0.07) -> list[dict[int, float]]:
    """Compute times that vary by the share `spread`."""
    return [{rank: 0.2 * draw.lognormvariate(0, spread) for rank in range(ranks)} for _ in range(count)]


def test_slow_rank_is_found_after_three_windows():
    found = findings([EVEN, EVEN, *[SLOW] * 10])
    assert found == [(4, SlowRank(3, 2 * WINDOW_STEPS, 0.38, 0.2))]
    assert found[0][1].describe("n4") == \
        "rank 3 on n4 computes 1.9 times as long as the median rank, since step 40 (380 ms, 200 ms)"


def test_short_windows_are_confirmed_by_more_of_them():
    """At 5 ms per step three windows are 0.3 s, in which a node may be busy by chance."""
    short = window(0.0015, 0.0015, 0.005)
    needed = round(CONFIRMING_S / (0.005 * WINDOW_STEPS))
    assert needed > 3 * CONFIRMING_WINDOWS
    assert [index for index, _ in findings([short] * 100)] == [needed - 1]
    assert findings(([short] * (needed - 1) + [window(0.0015, 0.0015, 0.0015)]) * 5) == []


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 64])
def test_slow_rank_is_found_among_any_number_of_ranks(ranks: int):
    """With noise of 5 %."""
    windows = noisy_windows(random.Random(ranks), ranks, 10, 0.05)
    slow = [seconds | {ranks - 1: 2 * seconds[ranks - 1]} for seconds in windows]
    assert [(index, found.rank) for index, found in findings(slow)] == [(CONFIRMING_WINDOWS - 1, ranks - 1)]
    assert findings(windows) == []


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_noise_is_no_finding(ranks: int):
    """Windows vary by 7 %, as their median does if steps vary by 25 %; 200 windows are 4000 steps."""
    for seed in range(100):
        assert findings(noisy_windows(random.Random(seed), ranks)) == []


def test_slowness_without_a_fixed_rank_is_no_finding():
    """Negative control: in each window one rank is slow, but another one each time."""
    draw = random.Random(1)
    for ranks in (4, 8, 16):
        slow = -1
        windows = []
        for _ in range(200):
            slow = draw.choice([rank for rank in range(ranks) if rank != slow])
            windows.append({rank: 0.4 if rank == slow else 0.2 for rank in range(ranks)})
        assert findings(windows) == []


@pytest.mark.parametrize("spike_windows", [1, 2])
def test_short_spike_is_no_finding(spike_windows: int):
    spike = window(0.2, 0.2, 0.2, 20.0)
    assert findings([*[EVEN] * 5, *[spike] * spike_windows, *[EVEN] * 5, *[spike] * spike_windows, EVEN]) == []


def test_rank_that_recovers_is_reported_again():
    assert [index for index, _ in findings([*[SLOW] * 6, EVEN, *[SLOW] * 6])] == [2, 9]
    # recovery is counted by windows, too: a single good one is enough to start again
    assert findings([SLOW, SLOW, EVEN, SLOW, SLOW]) == []


def test_slow_majority_is_the_median():
    assert findings([window(0.4, 0.4, 0.4, 0.2, 0.2)] * 10) == []
    assert [found.rank for _, found in findings([window(0.4, 0.4, 0.2, 0.2, 0.2)] * 10)] == [0, 1]
    assert [found.rank for _, found in findings([window(0.5, 0.4, 0.2, 0.2)] * 10)] == [0, 1]
    assert [found.rank for _, found in findings([window(0.4, 0.5, 0.2, 0.2)] * 10)] == [1, 0]


def test_values_below_a_limit_are_no_finding():
    for low, high in ((0.2, 0.2 * MIN_FACTOR * 0.99), (0.0001, 0.0001 + 0.99 * MIN_EXCESS_S), (0.0, 0.5)):
        assert findings([window(low, low, high)] * 10) == []
    assert len(findings([window(0.2, 0.2, 0.2 * MIN_FACTOR * 1.01)] * 10)) == 1
    # far in the ratio, but not in deviations: the ranks differ as much without it
    assert findings([window(0.2, 0.1, 0.3, 0.25, 0.15, 0.32)] * 10) == []


def test_windows_with_missing_ranks():
    """A rank without a value keeps its state; a rank alone has no median."""
    part = {rank: seconds for rank, seconds in SLOW.items() if rank != 3}
    assert [index for index, _ in findings([SLOW, part, SLOW, part, SLOW, part])] == [4]
    assert findings([{}, {3: 0.4}, {3: 0.4}, {3: 0.4}]) == []
