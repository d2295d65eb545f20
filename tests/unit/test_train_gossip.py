"""Gossip, adaptive gossip and local SGD against their definitions, on virtual ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from strategy_harness import RandomDelayNetwork, sum_error, noise, run_strategy, consensus_spread

from slurmdl.train.mixing.weighted_graph import GRAPHS, GossipGroup
from slurmdl.train.strategy_config import StrategyConfig

COUNTS = (1, 2, 3, 5, 8, 13, 17)
ZONES = tuple("abbacabcddeabcbda")


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("count", COUNTS)
def test_gossip_is_the_product_of_its_mixing_matrices(graph: str, count: int) -> None:
    steps, zones = 9, ZONES[:count]
    played = run_strategy(StrategyConfig("gossip", graph), count, steps, zones=zones)
    models = np.array([its.initial for its in played], np.float64)
    expected = GRAPHS[graph](GossipGroup(zones, 5))
    for step in range(steps):
        models = expected.round(step).matrix @ models
    assert np.abs(models - [its.final for its in played]).max() < 1e-5
    assert sum_error(played) < 1e-6
    rests = [sum(expected.round(step).target[worker] == worker for step in range(steps)) for worker in range(count)]
    assert [its.strategy.exchanges for its in played] == [steps - rest for rest in rests]
    assert all(its.strategy.exchanges_skipped == 0 for its in played)


@pytest.mark.parametrize("compress, near", [("fp16", 1e-3), ("int8", 1e-3), ("int4", 1e-3), ("sign", 0.1),
                                            ("topk", 0.01)])
@pytest.mark.parametrize("count", [2, 5, 8])
def test_compressed_gossip_keeps_the_sum_and_comes_together(compress: str, near: float, count: int) -> None:
    played = run_strategy(StrategyConfig("gossip", "base-2", compression=compress), count, 300, zones=ZONES[:count])
    assert sum_error(played) < 1e-5
    assert consensus_spread([its.final for its in played]) < near * consensus_spread([its.initial for its in played])


@pytest.mark.parametrize("graph", ["one-peer-exponential", "zone-aware"])
def test_copies_on_every_fixed_graph(graph: str) -> None:
    played = run_strategy(StrategyConfig("gossip", graph, compression="int4"), 8, 300, zones=ZONES[:8],
                          update=noise(1e-3))
    assert sum_error(played) < 1e-5
    assert consensus_spread([its.final for its in played]) < 0.05 * consensus_spread([its.initial for its in played])


@pytest.mark.parametrize("method, count", [
    (StrategyConfig("adaptive-gossip", "base-2"), 5), (StrategyConfig("adaptive-gossip", "random-matching",
                                                       compression="fp16"), 8),
    (StrategyConfig("adaptive-gossip", "zone-aware", compression="int4"), 6), (StrategyConfig("adaptive-gossip",
                                                                               "link-aware"), 7),
    (StrategyConfig("gossip", "one-peer-exponential", period=3), 5), (StrategyConfig("gossip", "random-matching",
                                                                      global_average_every=7), 6),
    (StrategyConfig("adaptive-gossip", "random-matching", asynchronous=True), 5),
    (StrategyConfig("gossip", "one-peer-exponential", asynchronous=True, compression="fp16"), 7),
    (StrategyConfig("local-sgd", "ring", compression="int4", period=5), 5),
    (StrategyConfig("local-sgd", "hierarchical", trigger="drift"), 7)],
    ids=lambda its: f"{its.strategy}-{its.comm_pattern}-{its.compression}" if isinstance(its,
                                                                                         StrategyConfig) else str(its))
def test_no_deadlock_and_no_loss_whatever_the_delays(method: StrategyConfig, count: int) -> None:
    """Messages that take up to 5 steps, and ranks of which each is slower than the one before."""
    for seed in range(4):
        played = run_strategy(method, count, 60, zones=ZONES[:count], network=RandomDelayNetwork(seed, 5.0),
                              update=noise(0.05),
                      step_seconds=lambda rank: 1.0 + rank)
        assert sum(its.strategy.exchanges for its in played) > 0
        if method.strategy in ("gossip", "adaptive-gossip"):
            assert sum_error(played) < 1e-5


def test_the_same_seed_makes_the_same_exchanges_whatever_the_delays() -> None:
    method = StrategyConfig("adaptive-gossip", "base-2", compression="int8", drift_threshold=0.03)
    one, other = (run_strategy(method, 6, 200, update=noise(2e-3), network=network) for network in (None,
                  RandomDelayNetwork(1, 9.0)))
    assert [its.exchange_steps for its in one] == [its.exchange_steps for its in other]
    assert all(np.array_equal(a.final, b.final) for a, b in zip(one, other, strict=True))


def test_drift_decides_when_pairs_exchange() -> None:
    """One worker moves, the others stand still: all exchanges that no guard forces are those with the one."""
    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return np.full_like(parameters, 0.02 * (worker == 0 and step < 60))
    played = run_strategy(
    StrategyConfig(
        "adaptive-gossip",
        "base-2",
        drift_threshold=0.05,
        trigger_warmup=4),
        4,
        100,
        update=update,
         initial_spread=0)
    first, *others = (its.exchange_steps for its in played)
    assert first[:4] == [0, 1, 2, 3]
    assert 5 < len(first) < 25
    assert all(step % 4 == 3 for step in first[4:])
    for step in first:
        assert sum(step in its for its in others) == (3 if step < 4 else 1)
    assert sum_error(played) < 1e-5


def test_nothing_moves_and_silence_ends() -> None:
    played = run_strategy(StrategyConfig("adaptive-gossip", "base-2", trigger_warmup=2, max_interval=20), 4, 200,
                          initial_spread=0)
    for its in played:
        gaps = np.diff([*its.exchange_steps, 200])
        assert its.exchange_steps[:2] == [0, 1]
        assert gaps.max() <= 20
        assert 200 // 20 <= len(its.exchange_steps) <= 2 + 200 // 16


def test_the_threshold_follows_the_learning_rate() -> None:
    """Steps in proportion to a rate that falls: the exchanges do not become rarer."""
    def rate(step: int) -> float:
        return 0.1 if step < 200 else 0.01

    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return noise(0.05)(worker, step, parameters) * np.float32(rate(step))
    fixed, scaled = (run_strategy(StrategyConfig("adaptive-gossip", "base-2", drift_threshold=0.02,
                     trigger_warmup=0, max_interval=1000), 4, 400,
                          update=update, initial_spread=0, learning_rate=its) for its in (lambda step: 0.1, rate))

    def late(played: list) -> int:
        return sum(step >= 220 for log in played for step in log.exchange_steps)
    assert late(scaled) > 3 * max(1, late(fixed))


@pytest.mark.parametrize("budget, compress", [(0.05, "none"), (0.02, "int4"), (0.1, "fp16"), (0.012, "sign")])
def test_a_budget_is_kept(budget: float, compress: str) -> None:
    count, steps, size = 4, 1500, 600
    played = run_strategy(StrategyConfig("adaptive-gossip", "base-2" if compress in ("int4",
                          "sign") else "random-matching", compression=compress,
                         comm_budget=budget), count, steps, size=size, update=noise(0.02), initial_spread=0)
    final = 8 * size * (count - 1) / count
    for its in played:
        share = (sum(its.bytes_per_step) + final) / (4 * size * steps)
        assert 0.95 * budget < share < 1.05 * budget


def test_a_budget_below_what_silence_forces_is_refused() -> None:
    from slurmdl.errors import InvalidRunError
    with pytest.raises(InvalidRunError, match=r"--comm-budget 1%: below 1.56%, .* 64 steps"):
        run_strategy(StrategyConfig("adaptive-gossip", "base-2", comm_budget=0.01), 2, 1, size=100_000)
    run_strategy(StrategyConfig("adaptive-gossip", "base-2", comm_budget=0.01, compression="int4"), 2, 1,
                 size=100_000)


@pytest.mark.parametrize("budget, compress, warm_up, silence", [(0.02, "int4", 7, 16), (0.02, "none", 1, 64),
                                                                (0.1, "none", 5, 24), (0.5, "none", 25, 6),
                                                                (0.02, "sign", 30, 4)])
def test_a_budget_says_how_long_all_exchange_and_how_long_none_need_to(budget: float, compress: str, warm_up: int,
                                                                      silence: int) -> None:
    """A quarter of what it pays for in 200 steps; 2.5 times the mean distance, in whole checks of 4 steps or 2."""
    for its in run_strategy(StrategyConfig("adaptive-gossip", "base-2", comm_budget=budget, compression=compress),
                            2, 300, size=100_000,
                    initial_spread=0):
        assert its.exchange_steps[:warm_up] == list(range(warm_up))
        assert warm_up + 1 not in its.exchange_steps
        assert set(np.diff(its.exchange_steps[warm_up:])) == {silence}


def test_what_is_asked_for_wins_over_what_the_budget_says() -> None:
    method = StrategyConfig(
    "adaptive-gossip",
    "base-2",
    comm_budget=0.02,
    compression="int4",
    trigger_warmup=12,
     max_interval=40)
    for its in run_strategy(method, 2, 300, size=100_000, initial_spread=0):
        assert its.exchange_steps[:12] == list(range(12))
        assert set(np.diff(its.exchange_steps[12:])) == {40}


@pytest.mark.parametrize("strategy", ["gossip", "local-sgd"])
def test_a_budget_of_one_who_is_alone(strategy: str) -> None:
    (alone,) = run_strategy(StrategyConfig(strategy, "random-matching" if strategy == "gossip" else "ring",
                            comm_budget=0.1), 1, 50, initial_spread=0)
    assert np.array_equal(alone.initial, alone.final)


def test_a_global_average_makes_all_models_the_mean() -> None:
    played = run_strategy(StrategyConfig("gossip", "random-matching", global_average_every=4), 6, 8, zones=ZONES[:6])
    mean = np.mean([its.initial for its in played], axis=0, dtype=np.float64)
    assert all(np.abs(its.final - mean).max() < 1e-5 for its in played)


def test_a_global_average_ends_the_silence_and_is_paid_from_the_budget() -> None:
    method = StrategyConfig("adaptive-gossip", "base-2", trigger_warmup=0, global_average_every=10, max_interval=20)
    assert all(not its.exchange_steps for its in run_strategy(method, 4, 200, initial_spread=0))
    paid = run_strategy(replace(method, comm_budget=0.25), 4, 1000, update=noise(0.02), initial_spread=0)
    final = 8 * 300 * 3 / 4
    assert all(0.95 < (sum(its.bytes_per_step) + final) / (4 * 300 * 1000) / 0.25 < 1.05 for its in paid)


@pytest.mark.parametrize("traffic", ["ring", "hierarchical"])
@pytest.mark.parametrize("count", COUNTS)
def test_local_sgd_is_its_formula(traffic: str, count: int) -> None:
    """In fp64, in one process."""
    alpha, mu, period = 0.7, 0.5, 4
    played = run_strategy(StrategyConfig("local-sgd", traffic, period=period), count, 20, initial_spread=0,
                          update=noise(0.1),
                  zones=ZONES[:count])
    x = np.array([its.initial for its in played], np.float64)
    z, u = x[0].copy(), np.zeros(x.shape[1])
    for step in range(20):
        x += [noise(0.1)(worker, step, z) for worker in range(count)]
        if step % period == period - 1:
            change = (x - z).mean(0)
            u = mu * u + change
            z = z + alpha * (change + mu * u)
            x[:] = z
    assert np.abs(x - [its.final for its in played]).max() < 1e-4
    assert all(np.array_equal(its.final, played[0].final) for its in played)


@pytest.mark.parametrize("compress", ["int8", "int4", "sign", "topk"])
def test_what_compression_leaves_out_comes_later(compress: str) -> None:
    """All are drawn to one point: compressed and not, they come to it."""
    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return np.float32(0.02) * (3 - parameters)
    played = run_strategy(
    StrategyConfig(
        "local-sgd",
        "ring",
        compression=compress,
        period=4),
        5,
        800,
        size=700,
         update=update)
    far = np.abs(played[0].initial - 3).max()
    near = 0.2 if compress == "sign" else 0.01
    assert all(np.abs(its.final - 3).max() < near * far for its in played)
    assert len({its.strategy.exchanges for its in played}) == 1


@pytest.mark.parametrize("compress", ["int4", "sign", "topk"])
def test_momentum_and_what_is_fed_back_do_not_swing_up(compress: str) -> None:
    method = StrategyConfig("local-sgd", "ring", compression=compress, period=2, outer_momentum=0.9)

    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return np.float32(0.04) * (3 - parameters)
    played = run_strategy(method, 4, 800, size=700, update=update)
    assert all(np.abs(its.final - 3).max() < np.abs(its.initial - 3).max() for its in played)


def test_all_decide_alike_by_the_mean_drift() -> None:
    """One of five moves: in the mean it is a fifth as urgent."""
    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return np.full_like(parameters, 0.01 * (worker == 2))
    played = run_strategy(StrategyConfig("local-sgd", "ring", trigger="drift", drift_threshold=0.02,
                          trigger_warmup=0), 5, 100, update=update,
                  initial_spread=0)
    exchanges = played[0].exchange_steps
    assert all(its.exchange_steps == exchanges for its in played)
    assert 5 <= len(exchanges) <= 15


def test_asynchronous_gossip_comes_together_though_one_is_slow() -> None:
    """Nobody waits: on its clock a quick rank ends long before one that takes 10 times as long for a step."""
    played = run_strategy(StrategyConfig("gossip", "random-matching", asynchronous=True), 6, 150,
                          network=RandomDelayNetwork(3, 0.5),
                  step_seconds=lambda rank: 10.0 if rank == 0 else 1.0)
    assert sum_error(played) < 1e-5
    assert sum(its.strategy.model_weight for its in played) == pytest.approx(6, rel=1e-12)
    assert consensus_spread([its.final for its in played]) < 0.2 * consensus_spread([its.initial for its in played])


def test_a_push_that_would_wait_is_left_out() -> None:
    played = run_strategy(StrategyConfig("gossip", "random-matching", asynchronous=True), 3, 40,
                          network=RandomDelayNetwork(3, 20.0))
    assert all(its.strategy.exchanges_skipped > 10 for its in played)
    assert sum_error(played) < 1e-5
