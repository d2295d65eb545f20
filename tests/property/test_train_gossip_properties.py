"""Properties of gossip and local SGD with any number of workers, zones and valid options."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategy_harness import RandomDelayNetwork, noise, run_strategy, sum_error

from slurmdl.comm_layout import COMPRESSION_NAMES
from slurmdl.errors import InvalidRunError
from slurmdl.plan import COMM_PATTERNS
from slurmdl.train.strategy_config import StrategyConfig, check_compatibility

bounded = settings(max_examples=50, deadline=None, derandomize=True,
                   suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def is_valid(config: StrategyConfig) -> bool:
    try:
        check_compatibility(config)
    except InvalidRunError:
        return False
    return True


@bounded
@given(st.data())
def test_gossip_preserves_weighted_sum(data: st.DataObject) -> None:
    zones = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=17))
    count = len(zones)
    strategy, budget = data.draw(st.sampled_from([("gossip", None), ("adaptive-gossip", 0.5),
                                                  ("adaptive-gossip", 0.9)]))
    choices = st.builds(
        StrategyConfig, st.just(strategy), st.sampled_from(COMM_PATTERNS["gossip"]),
        compression=st.sampled_from(COMPRESSION_NAMES), comm_budget=st.just(budget), asynchronous=st.booleans())
    config = data.draw(choices.filter(is_valid))
    network = RandomDelayNetwork(data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.01, 3.0])))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("slurmdl.train.triggers.MAX_WARMUP_STEPS", data.draw(st.integers(0, 9)))
        logs = run_strategy(config, count, 25, zones=zones, network=network, update=noise(0.05), size=data.draw(
            st.integers(3, 600)), step_seconds=lambda rank: 1.0 + rank % 3)
    assert sum_error(logs) < 1e-5
    assert np.isclose(sum(log.strategy.model_weight for log in logs), count)
    assert (sum(log.strategy.exchanges for log in logs) > 0) == (count > 1)


@bounded
@given(st.data())
def test_local_sgd_gives_equal_models(data: st.DataObject) -> None:
    zones = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=17))
    count = len(zones)
    choices = st.builds(
        StrategyConfig, st.just("local-sgd"), st.sampled_from(["ring", "hierarchical"]),
        compression=st.sampled_from(COMPRESSION_NAMES), period=st.integers(1, 9))
    config = data.draw(choices.filter(is_valid))
    logs = run_strategy(config, count, 18, zones=zones, update=noise(0.05),
                        network=RandomDelayNetwork(data.draw(st.integers(0, 99)), 3.0),
                        size=data.draw(st.integers(1, 600)))
    assert all(log.exchange_steps == logs[0].exchange_steps for log in logs)
    if logs[0].exchange_steps:
        last = logs[0].exchange_steps[-1]
        averaged = [log.final - sum(noise(0.05)(rank, step, log.final) for step in range(last + 1, 18))
                    for rank, log in enumerate(logs)]
        assert np.ptp(averaged, axis=0).max() < 1e-5
