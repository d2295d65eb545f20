"""Sampling assigns every sample once per epoch for any worker speeds."""

from __future__ import annotations

import math
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.train.library.load_balance import GuidedScheduler, LoadBalancer
from slurmdl.train.library.sampling import MAX_SHARE_FACTOR, BatchSlice, GlobalBatches, LockstepSampler, apportion

speed_values = st.floats(0.01, 1000)


@given(st.integers(0, 5000), st.lists(speed_values, min_size=1, max_size=40), st.data())
def test_apportion_keeps_sum_and_bounds(total: int, weights: list[float], data: st.DataObject) -> None:
    count = len(weights)
    lower = data.draw(st.integers(0, total // count))
    upper = data.draw(st.integers(-(-total // count), total))
    shares = apportion(total, weights, lower, upper)
    assert sum(shares) == total
    assert lower <= min(shares) and max(shares) <= upper
    for i, j in zip(range(count), range(1, count), strict=False):
        assert shares[i] <= shares[j] + 1 or weights[i] >= weights[j]
    for share, weight in zip(apportion(total, weights), weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-6


def worker_slices_of_epochs(batches: GlobalBatches, worker: int, period: int, ahead: int, speeds: list[list[float]],
                            position: int) -> list[list[BatchSlice]]:
    """Return the slices of a worker in two epochs, the first from `position`; all workers publish the same speeds.

    A batch is fetched `ahead` steps before it is used; speeds are published after the last batch of a round.
    """
    gathered = iter(speeds)
    steps_done = 0

    def gather(speed: float) -> Future[np.ndarray]:
        future: Future[np.ndarray] = Future()
        future.set_result(np.array(next(gathered)[:batches.worker_count], np.float32))
        return future

    strategy = SimpleNamespace(next_exchange=lambda step: (step // period + 1) * period - 1)
    balance = LoadBalancer(batches, strategy, 1 + ahead, gather, lambda future: future.result(timeout=0))
    rounds = LockstepSampler(batches, worker, balance.next_round, lambda: steps_done)
    slices_of_epochs: list[list[BatchSlice]] = []
    for epoch, cursor in ((0, position), (1, 0)):
        drawn: list[BatchSlice] = []
        source, used = rounds.slices(epoch, cursor, None), 0
        while True:
            batch = next(source, None)
            drawn += [batch] if batch else []
            if used < len(drawn) and (len(drawn) - used > ahead or batch is None):
                steps_done = drawn[used].end_step
                if drawn[used].publishes_speed:
                    balance.publish_speed(1.0)
                used += 1
            elif batch is None:
                break
        slices_of_epochs.append(drawn)
    return slices_of_epochs


@given(st.data(), st.integers(1, 9), st.integers(1, 20), st.integers(1, 40), st.integers(0, 4))
def test_lockstep_sampling_assigns_every_sample_once_while_speeds_change(data: st.DataObject, workers: int,
                                                                         batch: int, period: int,
                                                                         ahead: int) -> None:
    count = data.draw(st.integers(workers, 3000))
    position = data.draw(st.integers(0, count - workers))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    speeds = (10 ** random.uniform(-1, 1, (3000, workers))).tolist()
    batches = GlobalBatches(count, workers, batch, True, 1)
    all_slices = [worker_slices_of_epochs(batches, worker, period, ahead, speeds, position)
                  for worker in range(workers)]
    for epoch, start in ((0, position), (1, 0)):
        slices = [all_slices[worker][epoch] for worker in range(workers)]
        indices = [index for worker_slices in slices for part in worker_slices
                   for index in range(part.start, part.stop)]
        assert sorted(indices) == list(range(start, count))
        # all workers have the same steps, each once, and publish speeds at the same steps
        for worker_slices in slices:
            first = slices[0][0].end_step
            assert [part.end_step for part in worker_slices] == list(range(first, first + len(slices[0])))
        assert len({tuple(part.end_step for part in worker_slices if part.publishes_speed)
                    for worker_slices in slices}) == 1
        assert all(part.stop > part.start for worker_slices in slices for part in worker_slices)
        for parts in zip(*slices, strict=True):
            assert math.isclose(sum(part.gradient_weight for part in parts), workers)
            assert max(part.gradient_weight for part in parts) <= MAX_SHARE_FACTOR + workers / sum(
                part.stop - part.start for part in parts)


@given(st.data(), st.integers(1, 9), st.integers(1, 20), st.integers(1, 60))
def test_guided_scheduling_grants_every_sample_once(data: st.DataObject, workers: int, batch: int,
                                                    last_step: int) -> None:
    count = data.draw(st.integers(workers, 2000))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    batches = GlobalBatches(count, workers, batch, True, 1)
    scheduler = GuidedScheduler(batches)
    epoch, active = [0] * workers, set(range(workers))
    granted: dict[int, list[int]] = {}
    while active:
        worker = int(random.choice(sorted(active)))
        speed = float(10 ** random.uniform(-1, 1)) if random.random() < 0.9 else 0.0
        kind, start, stop, steps = map(int, scheduler.grant(worker, epoch[worker], 0, last_step, speed))
        if kind == 0:
            assert 0 < steps <= stop - start
            granted.setdefault(epoch[worker], []).extend(range(start, stop))
        elif kind == 1:
            epoch[worker] += 1
        else:
            active.remove(worker)
    epochs, remainder = divmod(last_step, batches.steps_per_epoch)
    for number, indices in granted.items():
        assert indices == list(range(count if number < epochs else remainder * batches.global_batch_size))
    assert len(granted) == epochs + (remainder > 0)
