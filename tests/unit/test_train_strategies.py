"""What all strategies have in common: the bytes that placement's model predicts, and equal models at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from placing import matrix
from virtual_ranks import attach_or_serve, flat, on_zones

from slurmdl.traffic import Traffic
from slurmdl.train.library.run import Run
from slurmdl.train.p2p import LOCALITY_LEVELS
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.world import message_levels

#: a multiple of the default period of local-sgd, and of the periods of the graphs
STEPS = 96
PARAMETERS = 60


def program(run: Run) -> Any:
    """Bytes sent in all steps, and the model after `finish`."""
    torch.manual_seed(2)
    model = torch.nn.Linear(PARAMETERS - 1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    if not attach_or_serve(run, model, opt):
        return run.p2p.bytes_sent, None
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + run.rank)
        opt.zero_grad()
        model(torch.randn(8, PARAMETERS - 1, generator=generator)).square().mean().backward()
        opt.step()
    sent = dict(run.p2p.bytes_sent)
    run.finish()
    return sent, flat(model)


@pytest.mark.parametrize(("config", "zones", "nodes"), [
    (StrategyConfig("allreduce", "ring"), "aaabb", ""), (StrategyConfig("allreduce", "hierarchical"), "aaabb", ""),
    (StrategyConfig("allreduce", "ring", compression="fp16"), "aabb", ""),
    (StrategyConfig("gossip", "one-peer-exponential"), "aaba", "uuvw"),
    (StrategyConfig("gossip", "base-2"), "aabbbbcc", "uuvwwxyz"),
    (StrategyConfig("gossip", "zone-aware"), "aabb", ""), (StrategyConfig("gossip", "random-matching"), "aabbb", ""),
    (StrategyConfig("local-sgd"), "aaabb", ""), (StrategyConfig("local-sgd", "hierarchical"), "aaabb", ""),
    (StrategyConfig("ps", ps=1), "aaabb", ""), (StrategyConfig("ps", ps=2), "aaabb", "uuvwx"),
    (StrategyConfig("local-sgd", islands="zone"), "aaabb", ""),
    (StrategyConfig("gossip", "base-2", islands="zone"), "aaabb", "")],
    ids=lambda value: "-".join(str(part) for part in (
        value.strategy, value.comm_pattern, value.compression, value.ps, value.islands) if part not in (None, "none"))
    if isinstance(value, StrategyConfig) else value)
def test_bytes_are_predicted_and_models_equal_at_the_end(config: StrategyConfig, zones: str, nodes: str) -> None:
    """By rank and locality level; of random partners and of islands in total."""
    sent, models = zip(*on_zones(zones, config, program, nodes), strict=True)
    trained = [model for model in models if model is not None]
    assert all(torch.equal(model, trained[0]) for model in trained)
    ranks, vector = len(zones), 4 * PARAMETERS // (2 if config.compression == "fp16" else 1)
    traffic = Traffic(config.strategy or "", float(vector), ps=config.ps or 0, pattern=config.comm_pattern or "",
                      islands=config.islands or "")
    zone = np.unique([*zones], return_inverse=True)[1]
    expected = sum(matrix(phase, ranks) for phase in traffic.phases(ranks, zone))
    expected *= STEPS // 32 if config.strategy == "local-sgd" and not config.islands else STEPS
    if config.ps:  # each worker sends a step's number and four hyperparameters to each server
        expected[config.ps:, :config.ps] += STEPS * 5 * 8
    if config.comm_pattern == "random-matching":
        assert sum(sum(levels.values()) for levels in sent) == STEPS * vector * (ranks // 2 * 2)
        return
    levels = np.array([message_levels(rank, [*(nodes or range(ranks))], zones) for rank in range(ranks)])
    for level in LOCALITY_LEVELS:
        counted, modeled = [entry[level] for entry in sent], np.where(levels == level, expected, 0).sum(1)
        if config.islands:
            assert sum(counted) == pytest.approx(modeled.sum(), rel=1e-6 if level == "inter_zone" else 0.01)
        else:
            assert counted == pytest.approx(modeled)
