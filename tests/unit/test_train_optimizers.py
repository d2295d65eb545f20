"""Optimizers that step another one, and other ways to update parameters, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from virtual_ranks import flat, library

from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig

torch.set_num_threads(1)
STEPS = 4
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))
Y = torch.arange(24) % 3


def make_model() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class SharpnessAware(torch.optim.Optimizer):
    """Minimizes the loss at a perturbed point: P. Foret et al.: Sharpness-aware minimization. ICLR 2021."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def perturb(self) -> None:
        tensors = self.param_groups[0]["params"]
        scale = 0.05 / torch.stack([tensor.grad.norm() for tensor in tensors]).norm()
        for tensor in tensors:
            self.state[tensor]["old"] = tensor.clone()
            tensor.add_(tensor.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for tensor in self.param_groups[0]["params"]:
            tensor.copy_(self.state[tensor].pop("old"))
        self.base.step()

    def step(self, closure: Any = None) -> Any:
        self.perturb()
        with torch.enable_grad():
            loss = closure()
        self.descend()
        return loss


class AssigningSharpnessAware(SharpnessAware):
    """As published implementations, which give the parameters other memory."""

    @torch.no_grad()
    def descend(self) -> None:
        for tensor in self.param_groups[0]["params"]:
            tensor.data = self.state[tensor]["old"]
        self.base.step()


class Lookahead(torch.optim.Optimizer):
    """Moves slow weights towards those of a base optimizer every second step."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(parameters, lr=0.1)
        self.slow, self.steps = [tensor.detach().clone() for tensor in parameters], 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, tensor in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(tensor, 0.5)
                tensor.copy_(slow)
        return loss


class AssigningLookahead(Lookahead):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for tensor in self.param_groups[0]["params"]:
            tensor.data = tensor.detach().clone()
        return loss


def backward(model: Any, x: Any, y: Any) -> Any:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def in_two_calls(model: Any, opt: Any, x: Any, y: Any) -> None:
    backward(model, x, y)
    opt.perturb()
    backward(model, x, y)
    opt.descend()


def with_closure(model: Any, opt: Any, x: Any, y: Any) -> None:
    backward(model, x, y)
    opt.step(lambda: backward(model, x, y))


def only_by_closure(model: Any, opt: Any, x: Any, y: Any) -> None:
    opt.step(lambda: backward(model, x, y))


def plainly(model: Any, opt: Any, x: Any, y: Any) -> None:
    backward(model, x, y)
    opt.step()


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "local-sgd"])
def test_all_ranks_start_with_the_optimizer_state_of_rank_0(strategy: str) -> None:
    def train(model: Any, opt: Any, x: Any, y: Any) -> Any:
        for _ in range(STEPS):
            opt.zero_grad()
            plainly(model, opt, x, y)
        return flat(model)

    def adam(model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.1)

    earlier = make_model()
    saved = adam(earlier)
    train(earlier, saved, X, Y)

    def program(ranks: int) -> Callable[[Run], Any]:
        def rank_program(run: Run) -> Any:
            model = make_model()
            opt = adam(model)
            if run.rank < ranks:
                opt.load_state_dict(deepcopy(saved.state_dict()))
            run.wrap(model, opt)
            return train(model, opt, X[run.rank::2], Y[run.rank::2])
        return rank_program

    loaded, loaded_by_all, loaded_by_none = (
        library(2, StrategyConfig(strategy), program(ranks)) for ranks in (1, 2, 0))
    assert all(torch.equal(*models) for models in zip(loaded, loaded_by_all, strict=True))
    assert not torch.equal(loaded[1], loaded_by_none[1])


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "local-sgd"])
@pytest.mark.parametrize(("kind", "step"), [(SharpnessAware, in_two_calls), (SharpnessAware, with_closure),
                                            (AssigningSharpnessAware, in_two_calls),
                                            (AssigningSharpnessAware, with_closure),
                                            (Lookahead, plainly), (Lookahead, only_by_closure),
                                            (AssigningLookahead, plainly)])
def test_optimizer_with_a_base_optimizer_makes_each_step_once(
        kind: Any, step: Callable[[Any, Any, Any, Any], None], strategy: str) -> None:
    """With allreduce, equal to one process."""
    def train(model: Any, opt: Any, x: Any, y: Any) -> Any:
        for _ in range(STEPS):
            opt.zero_grad()
            step(model, opt, x, y)
        return flat(model)

    def program(run: Run) -> Any:
        model = make_model()
        opt = kind(model.parameters())
        run.wrap(model, opt)
        return train(model, opt, X[run.rank::2], Y[run.rank::2]), run.step, run.strategy.exchanges

    model = make_model()
    expected = train(model, kind(model.parameters()), X, Y)
    in_each_pass = strategy == "allreduce" and issubclass(kind, SharpnessAware)
    exchanges = 2 * STEPS if in_each_pass else STEPS
    for result, steps, made in library(2, StrategyConfig(strategy, period=None if strategy == "allreduce" else 1),
                                       program):
        assert (steps, made) == (STEPS, exchanges)
        if strategy == "allreduce":
            torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)
