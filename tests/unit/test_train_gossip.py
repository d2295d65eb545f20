"""Gossip, adaptive gossip and local SGD against their definitions, on virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest
from strategy_harness import RandomDelayNetwork, consensus_spread, fix_threshold, noise, run_strategy, sum_error

from slurmdl.gossip_graphs import GRAPHS
from slurmdl.train.strategy_config import StrategyConfig

COUNTS = (1, 2, 3, 5, 8, 13, 17)
ZONES = tuple("abbacabcddeabcbda")


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("count", COUNTS)
def test_gossip_equals_product_of_mixing_matrices(graph: str, count: int) -> None:
    steps, zones = 9, ZONES[:count]
    logs = run_strategy(StrategyConfig("gossip", graph), count, steps, zones=zones)
    models = np.array([log.initial for log in logs], np.float64)
    expected = GRAPHS[graph](zones, 5)
    for step in range(steps):
        models = expected.round(step).mix(models)
    assert np.abs(models - [log.final for log in logs]).max() < 1e-5
    assert sum_error(logs) < 1e-6
    idle_steps = [sum(expected.round(step).target[worker] == worker for step in range(steps))
                  for worker in range(count)]
    assert [log.strategy.exchanges for log in logs] == [steps - idle for idle in idle_steps]
    assert all(log.strategy.exchanges_skipped == 0 for log in logs)


@pytest.mark.parametrize("compression, max_ratio", [("fp16", 1e-3), ("int8", 1e-3), ("int4", 1e-3), ("sign", 0.1)])
@pytest.mark.parametrize("count", [2, 5, 8])
def test_compressed_gossip_preserves_sum_and_reaches_consensus(compression: str, max_ratio: float,
                                                               count: int) -> None:
    logs = run_strategy(StrategyConfig("gossip", "base-2", compression=compression), count, 300, zones=ZONES[:count])
    assert sum_error(logs) < 1e-5
    assert consensus_spread([log.final for log in logs]) < max_ratio * consensus_spread([log.initial for log in logs])


@pytest.mark.parametrize("graph", ["one-peer-exponential", "zone-aware"])
def test_choco_on_static_graphs_reaches_consensus(graph: str) -> None:
    logs = run_strategy(StrategyConfig("gossip", graph, compression="int4"), 8, 300, zones=ZONES[:8],
                        update=noise(1e-3))
    assert sum_error(logs) < 1e-5
    assert consensus_spread([log.final for log in logs]) < 0.05 * consensus_spread([log.initial for log in logs])


def test_exchanges_depend_on_seed_not_on_delays() -> None:
    config = StrategyConfig("adaptive-gossip", "base-2", compression="int8", comm_budget=0.05)
    instant, delayed = (run_strategy(config, 6, 200, update=noise(2e-3), network=network)
                        for network in (None, RandomDelayNetwork(1, 9.0)))
    assert [log.exchange_steps for log in instant] == [log.exchange_steps for log in delayed]
    assert all(np.array_equal(a.final, b.final) for a, b in zip(instant, delayed, strict=True))


def test_drift_trigger_exchanges_only_with_drifting_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker drifts, the others are static: after the warm-up all exchanges involve the drifting worker."""
    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return np.full_like(parameters, 0.02 * (worker == 0))
    fix_threshold(0.05, 4, monkeypatch.setattr)
    logs = run_strategy(StrategyConfig("adaptive-gossip", "base-2"), 4, 60, update=update, initial_spread=0)
    first, *static = (log.exchange_steps for log in logs)
    assert first[:4] == [0, 1, 2, 3]
    assert 5 < len(first) < 25
    assert all(step % 4 == 3 for step in first[4:])
    for step in first:
        assert sum(step in exchange_steps for exchange_steps in static) == (3 if step < 4 else 1)
    assert sum_error(logs) < 1e-5


def test_max_interval_bounds_interval_of_static_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmdl.train.triggers.MAX_INTERVAL", 20)
    logs = run_strategy(StrategyConfig("adaptive-gossip", "base-2"), 4, 200, initial_spread=0)
    for log in logs:
        gaps = np.diff([*log.exchange_steps, 200])
        assert log.exchange_steps[:4] == [0, 1, 2, 3]
        assert gaps.max() <= 20
        assert 200 // 20 <= len(log.exchange_steps) <= 4 + 200 // 16


def test_drift_threshold_scales_with_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates shrink with the learning rate, but exchanges do not become rarer."""
    monkeypatch.setattr("slurmdl.train.triggers.MAX_INTERVAL", 1000)

    def rate(step: int) -> float:
        return 0.1 if step < 200 else 0.01

    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return noise(0.05)(worker, step, parameters) * np.float32(rate(step))
    fix_threshold(0.02, 0, monkeypatch.setattr)
    config = StrategyConfig("adaptive-gossip", "base-2")
    fixed, scaled = (run_strategy(config, 4, 400, update=update, initial_spread=0, learning_rate=learning_rate)
                     for learning_rate in (lambda step: 0.1, rate))

    def late_exchanges(logs: list) -> int:
        return sum(step >= 220 for log in logs for step in log.exchange_steps)
    assert late_exchanges(scaled) > 3 * max(1, late_exchanges(fixed))


@pytest.mark.parametrize("budget, compression", [(0.05, "none"), (0.02, "int4"), (0.1, "fp16"), (0.012, "sign")])
def test_comm_budget_is_met(budget: float, compression: str) -> None:
    count, steps, size = 4, 1500, 600
    comm_pattern = "base-2" if compression in ("int4", "sign") else "random-matching"
    config = StrategyConfig("adaptive-gossip", comm_pattern, compression=compression, comm_budget=budget)
    logs = run_strategy(config, count, steps, size=size, update=noise(0.02), initial_spread=0)
    final = 8 * size * (count - 1) / count
    for log in logs:
        share = (sum(log.bytes_per_step) + final) / (4 * size * steps)
        assert 0.95 * budget < share < 1.05 * budget


def test_comm_budget_below_minimum_raises() -> None:
    from slurmdl.errors import InvalidRunError
    with pytest.raises(InvalidRunError, match=r"--comm-budget 1%: below 1.56%, .* 64 steps"):
        run_strategy(StrategyConfig("adaptive-gossip", "base-2", comm_budget=0.01), 2, 1, size=100_000)
    run_strategy(StrategyConfig("adaptive-gossip", "base-2", comm_budget=0.01, compression="int4"), 2, 1,
                 size=100_000)


@pytest.mark.parametrize("budget, compression, warmup, max_interval", [
    (0.02, "int4", 7, 16), (0.02, "none", 1, 64), (0.1, "none", 5, 24), (0.5, "none", 25, 6), (0.02, "sign", 30, 4)])
def test_comm_budget_sets_warmup_and_max_interval(budget: float, compression: str, warmup: int,
                                                  max_interval: int) -> None:
    """Warm-up: a quarter of the budget of 200 steps; interval: 2.5 times the mean, in multiples of 4 or 2 steps."""
    config = StrategyConfig("adaptive-gossip", "base-2", comm_budget=budget, compression=compression)
    for log in run_strategy(config, 2, 300, size=100_000, initial_spread=0):
        assert log.exchange_steps[:warmup] == list(range(warmup))
        assert warmup + 1 not in log.exchange_steps
        assert set(np.diff(log.exchange_steps[warmup:])) == {max_interval}


def test_comm_budget_of_single_worker_changes_nothing() -> None:
    (alone,) = run_strategy(StrategyConfig("adaptive-gossip", "random-matching", comm_budget=0.1), 1, 50,
                            initial_spread=0)
    assert np.array_equal(alone.initial, alone.final)


@pytest.mark.parametrize("comm_pattern", ["ring", "hierarchical"])
@pytest.mark.parametrize("count", COUNTS)
def test_local_sgd_matches_formula(comm_pattern: str, count: int) -> None:
    """The reference is computed in fp64."""
    alpha, mu, period = 0.7, 0.5, 4
    logs = run_strategy(StrategyConfig("local-sgd", comm_pattern, period=period), count, 20, initial_spread=0,
                        update=noise(0.1), zones=ZONES[:count])
    x = np.array([log.initial for log in logs], np.float64)
    z, u = x[0].copy(), np.zeros(x.shape[1])
    for step in range(20):
        x += [noise(0.1)(worker, step, z) for worker in range(count)]
        if step % period == period - 1:
            change = (x - z).mean(0)
            u = mu * u + change
            z = z + alpha * (change + mu * u)
            x[:] = z
    assert np.abs(x - [log.final for log in logs]).max() < 1e-4
    assert all(np.array_equal(log.final, logs[0].final) for log in logs)


@pytest.mark.parametrize(("fragments", "overlap"), [(3, 0), (1, 3), (2, 1), (2, 2)])
@pytest.mark.parametrize("comm_pattern", ["ring", "hierarchical"])
def test_fragments_and_overlap_match_formula(fragments: int, overlap: int, comm_pattern: str) -> None:
    """Each fragment has its own outer step; with an overlap, that of the models some steps before."""
    alpha, mu, period, count, size = 0.7, 0.5, 12, 3, 300
    config = StrategyConfig("local-sgd", comm_pattern, period=period, fragments=fragments, overlap=overlap)
    logs = run_strategy(config, count, 40, size=size, initial_spread=0, update=noise(0.1), zones=ZONES[:count])
    share = 0.5 if overlap else 0.0
    interval, x = period // fragments, np.array([log.initial for log in logs], np.float64)
    z, u, change = x[0].copy(), np.zeros(size), np.zeros(size)
    for step in range(40):
        x += [noise(0.1)(worker, step, x[worker]) for worker in range(count)]
        index = step // interval % fragments
        part = slice(size * index // fragments, size * (index + 1) // fragments)
        if step % interval == interval - 1 - overlap:
            change[part] = (x - z).mean(0)[part]
        if step % interval == interval - 1:
            u[part] = mu * u[part] + change[part]
            z[part] += alpha * (change[part] + mu * u[part])
            x[:, part] = (1 - share) * z[part] + share * x[:, part]
    assert np.abs(x - [log.final for log in logs]).max() < 1e-4
    assert {log.strategy.exchanges for log in logs} == {40 // interval}


@pytest.mark.parametrize("graph", ["random-matching", "one-peer-exponential", "base-2"])
@pytest.mark.parametrize("count", [2, 4, 5])
def test_gossip_with_outer_optimizer_matches_formula(graph: str, count: int) -> None:
    """NoLoCo's step, with the mean of outer parameters and changes over the graph's neighbors; in fp64."""
    alpha, mu, period, steps, size = 0.6, 0.4, 3, 18, 50
    config = StrategyConfig("gossip", graph, period=period, outer_lr=alpha, outer_momentum=mu)
    logs = run_strategy(config, count, steps, size=size, initial_spread=0, update=noise(0.1), zones=ZONES[:count])
    expected = GRAPHS[graph](ZONES[:count], 5)
    x = np.array([log.initial for log in logs], np.float64)
    z, u = x.copy(), np.zeros_like(x)
    for step in range(steps):
        x += [noise(0.1)(worker, step, x[worker]) for worker in range(count)]
        if step % period < period - 1:
            continue
        mixing = expected.round(step // period)
        paired = [worker for worker in range(count) if mixing.target[worker] != worker]
        mean_outer, mean_change = mixing.mix(z), mixing.mix(x - z)
        u[paired] = (mu * u + alpha * mean_change + alpha * (mean_outer - z))[paired]
        z[paired] += u[paired]
        x[paired] = z[paired]
    assert np.abs(x - [log.final for log in logs]).max() < 1e-4


@pytest.mark.parametrize("compression", ["int8", "int4", "sign"])
def test_compressed_local_sgd_converges_with_error_feedback(compression: str) -> None:
    """The updates pull all workers to one point, and all workers reach it."""
    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return np.float32(0.02) * (3 - parameters)
    logs = run_strategy(StrategyConfig("local-sgd", "ring", compression=compression, period=4), 5, 800,
                        size=700, update=update)
    initial_distance = np.abs(logs[0].initial - 3).max()
    max_ratio = 0.2 if compression == "sign" else 0.01
    assert all(np.abs(log.final - 3).max() < max_ratio * initial_distance for log in logs)
    assert len({log.strategy.exchanges for log in logs}) == 1


@pytest.mark.parametrize("compression", ["int4", "sign"])
def test_outer_momentum_with_error_feedback_is_stable(compression: str) -> None:
    config = StrategyConfig("local-sgd", "ring", compression=compression, period=2, outer_momentum=0.9)

    def update(worker: int, step: int, parameters: np.ndarray) -> np.ndarray:
        return np.float32(0.04) * (3 - parameters)
    logs = run_strategy(config, 4, 800, size=700, update=update)
    assert all(np.abs(log.final - 3).max() < np.abs(log.initial - 3).max() for log in logs)


def test_asynchronous_gossip_with_slow_rank_reaches_consensus() -> None:
    """Sends do not block: fast ranks end long before the rank with 10 times longer steps."""
    logs = run_strategy(StrategyConfig("gossip", "random-matching", asynchronous=True), 6, 150,
                        network=RandomDelayNetwork(3, 0.5), step_seconds=lambda rank: 10.0 if rank == 0 else 1.0)
    assert sum_error(logs) < 1e-5
    assert sum(log.strategy.model_weight for log in logs) == pytest.approx(6, rel=1e-12)
    assert consensus_spread([log.final for log in logs]) < 0.2 * consensus_spread([log.initial for log in logs])


def test_push_that_would_block_is_skipped() -> None:
    logs = run_strategy(StrategyConfig("gossip", "random-matching", asynchronous=True), 3, 40,
                        network=RandomDelayNetwork(3, 20.0))
    assert all(log.strategy.exchanges_skipped > 10 for log in logs)
    assert sum_error(logs) < 1e-5
