"""Sampling assigns every sample once per epoch for any speeds of the workers."""

from __future__ import annotations

import math
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.train.library.load_balance import GuidedScheduler, LoadBalancer
from slurmdl.train.library.sampling import MAX_SHARE_FACTOR, BatchSlice, GlobalBatches, LockstepSampler, apportion
from slurmdl.train.triggers import PeriodTrigger

speeds_of = st.floats(0.01, 1000)


@given(st.integers(0, 5000), st.lists(speeds_of, min_size=1, max_size=40), st.data())
def test_apportion_keeps_sum_and_bounds(total: int, weights: list[float], data: st.DataObject) -> None:
    count = len(weights)
    least = data.draw(st.integers(0, total // count))
    most = data.draw(st.integers(-(-total // count), total))
    found = apportion(total, weights, least, most)
    assert sum(found) == total
    assert least <= min(found) and max(found) <= most
    for one, other in zip(range(count), range(1, count), strict=False):
        assert found[one] <= found[other] + 1 or weights[one] >= weights[other]
    for its, weight in zip(apportion(total, weights), weights, strict=True):
        assert abs(its - total * weight / sum(weights)) < 1 + 1e-6


def hands(deal: GlobalBatches, worker: int, by_steps: bool, period: int, ahead: int, told: list[list[float]],
          begin: int) -> list[list[BatchSlice]]:
    """Slices of a worker in two epochs, the first from a position; all workers publish the same speeds.

    A batch is fetched `ahead` steps before it is used; speeds are published after the last batch of a round.
    """
    answers = iter(told)
    made = 0

    def gather(speed: float) -> Future[np.ndarray]:
        future: Future[np.ndarray] = Future()
        future.set_result(np.array(next(answers)[:deal.worker_count], np.float32))
        return future

    strategy = SimpleNamespace(next_exchange=lambda number: PeriodTrigger(period).next_due(number - 1))
    balance = LoadBalancer(deal, by_steps, strategy, 1 + ahead, gather, lambda future: future.result(timeout=0))
    rounds = LockstepSampler(deal, worker, by_steps, balance.next_round, lambda: made)
    found: list[list[BatchSlice]] = []
    for epoch, cursor in ((0, begin), (1, 0)):
        drawn: list[BatchSlice] = []
        source, used = rounds.slices(epoch, cursor, None), 0
        while True:
            following = next(source, None)
            drawn += [following] if following else []
            if used < len(drawn) and (len(drawn) - used > ahead or following is None):
                made = drawn[used].steps.stop
                if drawn[used].publishes_speed:
                    balance.publish_speed(1.0)
                used += 1
            elif following is None:
                break
        found.append(drawn)
    return found


@given(st.data(), st.integers(1, 9), st.integers(1, 20), st.booleans(), st.integers(1, 40), st.integers(0, 4))
def test_lockstep_sampling_assigns_every_sample_once_while_speeds_change(data: st.DataObject, workers: int,
                                                                         batch: int, by_steps: bool,
                                                        period: int, ahead: int) -> None:
    count = data.draw(st.integers(workers, 3000))
    begin = data.draw(st.integers(0, count - workers))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    told = (10 ** random.uniform(-1, 1, (3000, workers))).tolist()
    deal = GlobalBatches(count, workers, batch, True, 1)
    both = [hands(deal, worker, by_steps, period, ahead, told, begin) for worker in range(workers)]
    for epoch, start in ((0, begin), (1, 0)):
        dealt = [both[worker][epoch] for worker in range(workers)]
        places = [place for its in dealt for hand in its for place in range(hand.start, hand.stop)]
        assert sorted(places) == list(range(start, count))
        # all have the same steps, each once, and publish speeds at the same steps
        steps = [[step for hand in its for step in hand.steps] for its in dealt]
        assert all(its == steps[0] for its in steps)
        assert len({tuple(hand.steps.stop for hand in its if hand.publishes_speed) for its in dealt}) == 1
        assert all(hand.stop > hand.start for its in dealt for hand in its)
        if not by_steps:
            for same in zip(*dealt, strict=True):
                assert math.isclose(sum(hand.gradient_weight for hand in same), workers)
                assert max(hand.gradient_weight for hand in same) <= MAX_SHARE_FACTOR + workers / sum(
                    hand.stop - hand.start for hand in same)


@given(st.data(), st.integers(1, 9), st.integers(1, 20), st.booleans(), st.integers(1, 60))
def test_guided_scheduling_grants_every_sample_once(data: st.DataObject, workers: int, batch: int, by_steps: bool,
                                                until: int) -> None:
    count = data.draw(st.integers(workers, 2000))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    deal = GlobalBatches(count, workers, batch, True, 1)
    dealer = GuidedScheduler(deal, by_steps)
    epoch, going = [0] * workers, set(range(workers))
    taken: dict[int, list[int]] = {}
    while going:
        worker = int(random.choice(sorted(going)))
        speed = float(10 ** random.uniform(-1, 1)) if random.random() < 0.9 else 0.0
        kind, start, stop, steps, *sizes = map(int, dealer.grant(worker, epoch[worker], 0, until, speed))
        if kind == 0:
            assert 0 < steps <= stop - start
            assert sum(sizes) == deal.global_batch_size and min(sizes) >= 1
            taken.setdefault(epoch[worker], []).extend(range(start, stop))
        elif kind == 1:
            epoch[worker] += 1
        else:
            going.remove(worker)
    epochs, rest = divmod(until, deal.steps_per_epoch)
    for number, places in taken.items():
        assert places == list(range(count if number < epochs else rest * deal.global_batch_size))
    assert len(taken) == epochs + (rest > 0)
