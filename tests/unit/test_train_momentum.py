"""Quasi-global momentum compared with its definition; invalid optimizers and strategies; label skew warning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slurmdl.errors import InvalidRunError
from slurmdl.train import init
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train
from slurmdl.train.transports import virtual

CONFIG = StrategyConfig("gossip", "base-2", quasi_global_momentum=True)
LEARNING_RATES, BETA, STEPS = (0.1, 0.03), 0.8, 12
#: the loss of a rank is the squared distance of the model from TARGETS[rank]
TARGETS = np.random.default_rng(3).standard_normal((4, 2, 3)).astype(np.float32)


def run_on_ranks(count: int, config: StrategyConfig, program: Callable[[Run], Any]) -> list[Any]:
    def run_rank(transport: virtual.VirtualTransport) -> Any:
        return program(init(config, environ={}, transport=transport))
    return virtual.run_virtual_ranks(count, run_rank)


class TwoVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(3)) for _ in LEARNING_RATES)

    def forward(self, targets: Any) -> Any:
        return sum(((vector - target) ** 2).sum() / 2
                   for vector, target in zip((self.first, self.second), targets, strict=True))


def make_optimizer(model: TwoVectors) -> Any:
    groups = [{"params": [vector], "lr": rate} for vector, rate in zip((model.first, model.second),
              LEARNING_RATES, strict=True)]
    return torch.optim.SGD(groups, lr=1.0, momentum=BETA)


def record_models(run: Run) -> Any:
    model = TwoVectors()
    opt = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 5, 0.5)
    run.attach(model, opt)
    recorded = []
    for _ in range(STEPS):
        opt.zero_grad()
        model(torch.from_numpy(TARGETS[run.rank])).backward()
        opt.step()
        assert [group["momentum"] for group in opt.param_groups] == [BETA, BETA]
        schedule.step()
        recorded.append(np.stack([model.first.detach().numpy(), model.second.detach().numpy()]))
    run.close()
    return np.array(recorded)


@pytest.mark.parametrize(("count", "period"), [(1, 1), (2, 1), (4, 1), (4, 3)])
def test_quasi_global_momentum_matches_definition(count: int, period: int) -> None:
    """With a period, the change by mixing counts like that of one step."""
    x, m = np.zeros((count, 2, 3)), np.zeros((count, 2, 3))
    recorded = run_on_ranks(count, replace(CONFIG, period=period), record_models)
    for step in range(STEPS):
        rates = (0.5 ** (step // 5) * np.array(LEARNING_RATES))[None, :, None]
        previous, x = x, x - rates * (x - TARGETS[:count] + BETA * m)
        stepped = x
        if count > 1 and (step + 1) % period == 0:
            x = (x + x[np.arange(count) ^ (1 << step // period % int(np.log2(count)))]) / 2
        m = BETA * m + (1 - BETA) * (previous - stepped + (stepped - x) / period) / rates
        np.testing.assert_allclose([models[step] for models in recorded], x, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("make", [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, maximize=True),
    lambda parameters: torch.optim.Adam(parameters),
    lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9)],
    ids=["no momentum", "maximize", "Adam", "RMSprop"])
def test_quasi_global_momentum_rejects_other_optimizers(make: Callable[[Any], Any]) -> None:
    def program(run: Run) -> None:
        model = TwoVectors()
        run.attach(model, make(model.parameters()))
    message = r"--quasi-global-momentum: .*torch.optim.SGD\(..., momentum=0.9\)"
    with pytest.raises(InvalidRunError, match=message):
        run_on_ranks(2, CONFIG, program)


def test_quasi_global_momentum_rejects_other_strategies() -> None:
    with pytest.raises(InvalidRunError,
                       match=r"--quasi-global-momentum: not valid with strategy allreduce.*valid with gossip"):
        train(parse_train_options(["--virtual-ranks", "2", "--strategy", "allreduce", "--quasi-global-momentum"], {}))


@pytest.mark.parametrize(("words", "warns"), [
    ("--strategy gossip --dirichlet-alpha 0.1", True), ("--strategy local-sgd --dirichlet-alpha 0.1", True),
    ("--strategy gossip --dirichlet-alpha 0.1 --quasi-global-momentum",
     False), ("--strategy allreduce --dirichlet-alpha 0.1", False),
    ("--strategy gossip --dirichlet-alpha 1000", False), ("--strategy gossip", False)],
    ids=["skewed", "local-sgd", "quasi-global", "allreduce", "nearly alike", "alike"])
def test_label_skew_is_reported_and_warned_about(words: str, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    summary = train(parse_train_options([*words.split(), "--virtual-ranks", "4", "--steps", "2", "--model",
                    "mlp:8"], {}))
    assert summary is not None
    stderr = capsys.readouterr().err
    assert ("label skew of the workers is 0." in stderr) == warns
    assert ("--quasi-global-momentum" in stderr) == (warns and "gossip" in words)
    assert (summary["label_skew"] > 0.4) == ("0.1" in words)
