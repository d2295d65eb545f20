"""Equality of replicas: memory formats, and warnings of what makes them differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from user_scripts import X as ALL_X
from user_scripts import Y as ALL_Y
from user_scripts import make_mlp, sgd
from virtual_ranks import attach_or_serve, flat, library

from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig

X, Y = ALL_X[:24], ALL_Y[:24]
METHODS = [StrategyConfig("allreduce"), StrategyConfig("ps", ps=1)]


def method_name(value: Any) -> str | None:
    return value.strategy if isinstance(value, StrategyConfig) else None


def run_workers(count: int, method: StrategyConfig, program: Callable[[Run], Any], **options: Any) -> list[Any]:
    """Return the results of `program` on `count` virtual workers."""
    return [result for result in library(count + (method.ps or 0), method, program, **options) if result is not None]


def loss(model: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(model(x), y)


def in_one_pass(model: Any, x: Any, y: Any) -> None:
    loss(model, x, y).backward()


def train(model: Any, opt: Any, passes: Callable[[Any, Any, Any], None], x: Any, y: Any, steps: int = 5) -> Any:
    for _ in range(steps):
        opt.zero_grad()
        passes(model, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return flat(model)


def worker_samples(run: Run) -> tuple[Any, Any]:
    return X[run.worker_rank::run.worker_count], Y[run.worker_rank::run.worker_count]


def test_change_after_last_step_is_permitted_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def program(run: Run) -> Any:
        model = make_mlp()
        opt = sgd(model)
        run.wrap(model, opt)
        train(model, opt, in_one_pass, *worker_samples(run), steps=3)
        if run.is_main:
            model.load_state_dict(make_mlp().state_dict())  # e.g. the best one
        run.finish()
        return run.step, run.consensus_distance > 1e-3
    assert run_workers(2, StrategyConfig("allreduce"), program) == [(3, True)] * 2
    assert capsys.readouterr().err.count("slurmdl: train: the workers' models differ at the end") == 1


def test_second_optimizer_warns(capsys: pytest.CaptureFixture[str]) -> None:
    def program(run: Run) -> Any:
        model, other = make_mlp(), nn.Linear(6, 3)
        opt, adam = sgd(model), torch.optim.Adam(other.parameters())
        run.wrap(model, opt)
        for _ in range(3):
            in_one_pass(model, *worker_samples(run))
            in_one_pass(other, *worker_samples(run))
            opt.step()
            adam.step()
        run.finish()
        adam.step()
        return run.step
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    before = len(_global_optimizer_pre_hooks)
    assert run_workers(2, StrategyConfig("allreduce"), program) == [3, 3]
    assert capsys.readouterr().err.count(
        "slurmdl: train: Adam trains 2 parameters outside run.wrap(), which diverge between ranks; "
        "expected ") == 1
    assert len(_global_optimizer_pre_hooks) == before, "the hook stays after the run"
    assert run_workers(1, StrategyConfig("allreduce"), program) == [3]
    assert "outside run.wrap()" not in capsys.readouterr().err


def test_nested_optimizer_is_permitted(capsys: pytest.CaptureFixture[str]) -> None:
    """E.g. a lookahead optimizer."""
    class Outer(torch.optim.SGD):
        inner: Any

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    def program(run: Run) -> Any:
        model = make_mlp()
        opt = Outer(model.parameters(), lr=0.1)
        opt.inner = sgd(model)
        run.wrap(model, opt)
        return train(model, opt, in_one_pass, *worker_samples(run))
    assert torch.equal(*run_workers(2, StrategyConfig("allreduce"), program))
    assert "outside run.wrap()" not in capsys.readouterr().err


def batch_program(own: bool, distributed: bool = False, steps: int = 4) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        model = make_mlp()
        opt = sgd(model)
        if not attach_or_serve(run, model, opt):
            return None
        same = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 6)
        loader = run.loader((torch.ones(24, 6), Y), 3) if distributed else same
        for _, (x, y) in zip(range(steps), loader, strict=False):
            train(model, opt, in_one_pass, x + run.rank * own, y, steps=1)
        return run.step
    return program


SAME = "slurmdl: train: all workers train with the same samples; expected batches of run.loader()"


@pytest.mark.parametrize("method", [*METHODS, StrategyConfig("gossip"),
                         StrategyConfig("gossip", asynchronous=True)], ids=method_name)
def test_same_samples_on_all_ranks_warn(method: StrategyConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run_workers(2, method, batch_program(own=False))
    assert capsys.readouterr().err.count(SAME) == 1
    run_workers(2, method, batch_program(own=True))
    run_workers(2, method, batch_program(own=False, distributed=True))
    run_workers(2, method, batch_program(own=False), check_every=0)
    run_workers(1, method, batch_program(own=False))
    assert SAME not in capsys.readouterr().err


@pytest.mark.parametrize("own", [False, True])
def test_same_samples_warn_if_only_parts_are_called(own: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """As a LightningModule, whose training_step() calls its parts."""
    def program(run: Run) -> None:
        model = nn.ModuleDict({"features": nn.Linear(6, 6), "position": nn.Embedding(6, 6), "head": nn.Linear(6, 3)})
        opt = sgd(model)
        run.wrap(model, opt)
        for step in range(4):
            positions = model["position"](torch.arange(6))
            hidden = model["features"](X[6 * step:6 * step + 6] + run.rank * own) + positions
            nn.functional.cross_entropy(model["head"](hidden), Y[:6]).backward()
            opt.step()
            opt.zero_grad()
        assert not any(part._forward_pre_hooks for part in model.values())
    library(2, StrategyConfig("allreduce"), program)
    assert capsys.readouterr().err.count(SAME) == (not own)


class Convolutions(nn.Sequential):
    def __init__(self, last: bool) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 2, bias=False), nn.Flatten(), nn.Linear(4, 3))
        if last:
            self.to(memory_format=torch.channels_last)


def train_convolutions(channels_last: bool, method: StrategyConfig, strides: list[Any] | None = None) -> list[Any]:
    def program(run: Run) -> Any:
        model = Convolutions(channels_last)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        if not attach_or_serve(run, model, opt):
            return None
        generator = torch.Generator().manual_seed(run.rank)
        for _ in range(5):
            opt.zero_grad()
            x = torch.randn(6, 3, 4, 4, generator=generator)
            loss(model, x.to(memory_format=torch.channels_last) if channels_last else x, Y[:6]).backward()
            opt.step()
        if strides is not None:
            strides.append([(tensor.stride(), tensor.grad.stride()) for tensor in model.parameters()])
        return flat(model)
    return run_workers(2, method, program)


@pytest.mark.parametrize("method", [*METHODS, StrategyConfig("gossip"), StrategyConfig("gossip", shared_memory=True),
                                    StrategyConfig("local-sgd", period=2)], ids=method_name)
def test_memory_formats_are_kept(method: StrategyConfig) -> None:
    observed: list[Any] = []
    models, expected = train_convolutions(True, method, observed), train_convolutions(False, method)
    strides = [tensor.stride() for tensor in Convolutions(True).parameters()]
    assert strides[0] == (27, 1, 9, 3), "channels_last, or this tests nothing"
    assert observed == [[(stride, stride) for stride in strides]] * 2
    for model, expected_model in zip(models, expected, strict=True):
        assert torch.allclose(model, expected_model, rtol=0, atol=1e-5)


def test_parameters_with_memory_gaps_become_contiguous() -> None:
    def program(run: Run) -> Any:
        model = nn.Linear(4, 3)
        model.weight = nn.Parameter(torch.randn(3, 8)[:, ::2])
        run.wrap(model, sgd(model))
        return model.weight.stride(), model.weight.is_contiguous()
    assert run_workers(2, StrategyConfig("allreduce"), program) == [((4, 1), True)] * 2
