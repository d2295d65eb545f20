"""Quasi-global momentum against its definition, and what it is refused for."""

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

METHOD = StrategyConfig("gossip", "base", quasi_global_momentum=True)
RATES, BETA, STEPS = (0.1, 0.03), 0.8, 12
#: the rank pulls the model to CENTRES[rank]
CENTRES = np.random.default_rng(3).standard_normal((4, 2, 3)).astype(np.float32)


def on_ranks(count: int, method: StrategyConfig, program: Callable[[Run], Any]) -> list[Any]:
    def rank(transport: virtual.VirtualTransport) -> Any:
        return program(init(method, environ={}, transport=transport))
    return virtual.run_virtual_ranks(count, rank)


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.zeros(3)) for _ in RATES)

    def forward(self, centre: Any) -> Any:
        return sum(((its - to) ** 2).sum() / 2 for its, to in zip((self.one, self.two), centre, strict=True))


def optimizer_of(model: Vectors) -> Any:
    groups = [{"params": [its], "lr": rate} for its, rate in zip((model.one, model.two), RATES, strict=True)]
    return torch.optim.SGD(groups, lr=1.0, momentum=BETA)


def models(run: Run) -> Any:
    model = Vectors()
    opt = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 5, 0.5)
    run.attach(model, opt)
    seen = []
    for _ in range(STEPS):
        opt.zero_grad()
        model(torch.from_numpy(CENTRES[run.rank])).backward()
        opt.step()
        assert [group["momentum"] for group in opt.param_groups] == [BETA, BETA]
        schedule.step()
        seen.append(np.stack([model.one.detach().numpy(), model.two.detach().numpy()]))
    run.close()
    return np.array(seen)


@pytest.mark.parametrize(("count", "period"), [(1, 1), (2, 1), (4, 1), (4, 3)])
def test_it_is_what_its_authors_define(count: int, period: int) -> None:
    """With an exchange after each step; with fewer the way of the mixing counts as that of a step."""
    x, m = np.zeros((count, 2, 3)), np.zeros((count, 2, 3))
    found = on_ranks(count, replace(METHOD, period=period), models)
    for step in range(STEPS):
        rates = (0.5 ** (step // 5) * np.array(RATES))[None, :, None]
        then, x = x, x - rates * (x - CENTRES[:count] + BETA * m)
        stepped = x
        if count > 1 and (step + 1) % period == 0:
            x = (x + x[np.arange(count) ^ (1 << step // period % int(np.log2(count)))]) / 2
        m = BETA * m + (1 - BETA) * (then - stepped + (stepped - x) / period) / rates
        np.testing.assert_allclose([its[step] for its in found], x, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("make", [
    lambda its: torch.optim.SGD(its, lr=0.1), lambda its: torch.optim.SGD(its, lr=0.1, momentum=0.9, maximize=True),
    lambda its: torch.optim.Adam(its), lambda its: torch.optim.RMSprop(its, momentum=0.9)],
    ids=["no momentum", "maximises", "Adam", "RMSprop"])
def test_other_optimizers_have_no_such_momentum(make: Callable[[Any], Any]) -> None:
    def program(run: Run) -> None:
        model = Vectors()
        run.attach(model, make(model.parameters()))
    with pytest.raises(InvalidRunError, match=r"--quasi-global: .* valid: torch.optim.SGD\(..., momentum=0.9\)"):
        on_ranks(2, METHOD, program)


def test_only_gossip_has_it() -> None:
    with pytest.raises(InvalidRunError, match=r"--quasi-global: not valid with strategy allreduce.*valid with gossip"):
        train(parse_train_options(["--simulate", "2", "--strategy", "allreduce", "--quasi-global"], {}))


@pytest.mark.parametrize(("words", "warns"), [
    ("--strategy gossip --skew 0.1", True), ("--strategy local-sgd --skew 0.1", True),
    ("--strategy gossip --skew 0.1 --quasi-global", False), ("--strategy allreduce --skew 0.1", False),
    ("--strategy gossip --skew 1000", False), ("--strategy gossip", False)],
    ids=["skewed", "local-sgd", "quasi-global", "allreduce", "nearly alike", "alike"])
def test_label_skew_is_measured_and_warned_of(words: str, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = train(parse_train_options([*words.split(), "--simulate", "4", "--steps", "2", "--model", "mlp:8"], {}))
    assert found is not None
    told = capsys.readouterr().err
    assert ("the workers' labels differ by 0." in told) == warns
    assert ("--quasi-global" in told) == (warns and "gossip" in words)
    assert (found["label_skew"] > 0.4) == ("0.1" in words)
