"""Equality of replicas: late gradients, memory formats, and detection of differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_ranks import attach_or_serve, flat, library

from slurmdl.train.library.replica import Replica
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig

torch.set_num_threads(1)
torch.manual_seed(5)
X, Y = torch.randn(24, 6), torch.randint(0, 3, (24,))
METHODS = [StrategyConfig("allreduce"), StrategyConfig("ps", ps=1)]


def method_name(value: Any) -> str | None:
    return value.strategy if isinstance(value, StrategyConfig) else None


def run_workers(count: int, method: StrategyConfig, program: Callable[[Run], Any], **options: Any) -> list[Any]:
    """Return the results of `program` on `count` virtual workers."""
    return [result for result in library(count + (method.ps or 0), method, program, **options) if result is not None]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Blocks(nn.Module):
    """Model of blocks; `checkpointed` blocks use re-entrant activation checkpoints."""

    def __init__(self, checkpointed: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.blocks.append(nn.Linear(6, 3))
        self.checkpointed = checkpointed

    def forward(self, x: Any) -> Any:
        x = x.clone().requires_grad_()
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=True) if index in self.checkpointed else block(x)
        return x


def loss(model: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(model(x), y)


def in_one_pass(model: Any, x: Any, y: Any) -> None:
    loss(model, x, y).backward()


def in_overlapping_passes(model: Any, x: Any, y: Any) -> None:
    """Two passes over different parameters, then a third over all."""
    last = list(model.blocks[3:].parameters())
    first = [parameter for parameter in model.parameters() if all(parameter is not other for other in last)]
    for inputs in (last, first):
        loss(model, x, y).backward(inputs=inputs)
    loss(model, x, y).backward()


def in_two_passes(model: Any, x: Any, y: Any) -> None:
    for part in (slice(0, 5), slice(5, None)):
        loss(model, x[part], y[part]).backward()


def train(model: Any, opt: Any, passes: Callable[[Any, Any, Any], None], x: Any, y: Any, steps: int = 5) -> Any:
    for _ in range(steps):
        opt.zero_grad()
        passes(model, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return flat(model)


def reference(passes: Callable[[Any, Any, Any], None], workers: int) -> Any:
    """Train with torch alone, on the mean of the workers' gradients."""
    model = Blocks()
    opt = sgd(model)

    def average_gradients(model: Any, x: Any, y: Any) -> None:
        for worker in range(workers):
            passes(model, x[worker::workers], y[worker::workers])
        for tensor in model.parameters():
            tensor.grad /= workers
    return train(model, opt, average_gradients, X, Y)


def worker_samples(run: Run) -> tuple[Any, Any]:
    return X[run.worker_rank::run.worker_count], Y[run.worker_rank::run.worker_count]


def training_program(passes: Callable[[Any, Any, Any], None],
                     net: Callable[[], Any] = Blocks) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        model = net()
        opt = sgd(model)
        if not attach_or_serve(run, model, opt):
            return None
        return train(model, opt, passes, *worker_samples(run)), run.strategy.exchanges
    return program


@pytest.mark.parametrize("passes", [in_overlapping_passes, in_two_passes])
def test_gradients_of_extra_passes_add_up(passes: Callable[[Any, Any, Any], None]) -> None:
    expected = reference(passes, 3)
    assert (expected - flat(Blocks())).abs().max() > 1e-2, "the reference did not learn"
    results = run_workers(3, StrategyConfig("allreduce"), training_program(passes))
    assert all(torch.equal(model, results[0][0]) for model, _ in results)
    assert torch.allclose(results[0][0], expected, rtol=0, atol=2e-6)


def test_extra_passes_with_host_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host buffers are copies, as with parameters on a GPU."""
    plain = run_workers(2, StrategyConfig("allreduce"), training_program(in_overlapping_passes))
    init_replica = Replica.__init__
    monkeypatch.setattr(Replica, "__init__", lambda self, module, chosen, **options: init_replica(
        self, module, chosen, staged=True, **options))
    staged = run_workers(2, StrategyConfig("allreduce"), training_program(in_overlapping_passes))
    assert all(torch.equal(*models) for models in zip([model for model, _ in plain], [model for model, _ in staged],
                                                      strict=True))


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_more_passes_than_configured_give_same_model(passes: int) -> None:
    """With the right number, gradients are exchanged once per step."""
    results = run_workers(2, StrategyConfig("allreduce"), training_program(in_overlapping_passes),
                          backward_passes_per_step=passes)
    assert torch.allclose(results[0][0], reference(in_overlapping_passes, 2), rtol=0, atol=2e-6)
    assert results[0][1] == 5 * (4 - passes)


def test_extra_passes_with_uneven_batches_are_weighted() -> None:
    """All gradients, including late gradients, are weighted by the samples of their batch."""
    def program(run: Run) -> Any:
        model = Blocks()
        opt = sgd(model)
        if not attach_or_serve(run, model, opt):
            return None
        for x, y in run.loader((X[:13], Y[:13]), 13, shuffle=False):
            assert len(x) != 13 / 2
            in_overlapping_passes(model, x, y)
            opt.step()
        return flat(model)
    model = Blocks()
    opt = sgd(model)
    in_overlapping_passes(model, X[:13], Y[:13])
    opt.step()
    for method in METHODS:
        for result in run_workers(2, method, program):
            assert torch.allclose(result, flat(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("checkpointed", [(4,), (0,), (0, 1, 2, 3, 4), (1, 2, 4)])
@pytest.mark.parametrize("method", METHODS, ids=method_name)
def test_reentrant_checkpoints_exchange_once_per_step(method: StrategyConfig, checkpointed: tuple[int, ...]) -> None:
    """The number of exchanges does not depend on the number of checkpoints."""
    results = run_workers(2, method, training_program(in_one_pass, lambda: Blocks(checkpointed)))
    plain = run_workers(2, method, training_program(in_one_pass))
    assert [exchanges for _, exchanges in results] == [5, 5]
    for (model, _), (expected, _) in zip(results, plain, strict=True):
        assert torch.equal(model, expected)


def test_whole_model_in_reentrant_checkpoint() -> None:
    def passes(model: Any, x: Any, y: Any) -> None:
        nn.functional.cross_entropy(checkpoint(model, x.clone().requires_grad_(), use_reentrant=True), y).backward()
    results, plain = (run_workers(2, StrategyConfig("allreduce"), training_program(function))
                      for function in (passes, in_one_pass))
    assert results[0][1] == 5
    assert torch.equal(results[1][0], plain[1][0])


def test_replicas_are_equal_without_detection_of_nested_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch before 2.1 cannot detect nested passes: more exchanges, same result."""
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    results = run_workers(2, StrategyConfig("allreduce"), training_program(in_one_pass, lambda: Blocks((2, 4))))
    monkeypatch.undo()
    plain = run_workers(2, StrategyConfig("allreduce"), training_program(in_one_pass))
    assert results[0][1] > 5
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][0], plain[0][0], rtol=0, atol=1e-6)


def test_change_after_last_step_is_permitted_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def program(run: Run) -> Any:
        model = Blocks()
        opt = sgd(model)
        run.wrap(model, opt)
        train(model, opt, in_one_pass, *worker_samples(run), steps=3)
        if run.is_main:
            model.load_state_dict(Blocks().state_dict())  # e.g. the best one
        run.finish()
        return run.step, run.consensus_distance > 1e-3
    assert run_workers(2, StrategyConfig("allreduce"), program) == [(3, True)] * 2
    assert capsys.readouterr().err.count("slurmdl: train: the workers' models differ at the end") == 1


def test_second_optimizer_warns(capsys: pytest.CaptureFixture[str]) -> None:
    def program(run: Run) -> Any:
        model, other = Blocks(), nn.Linear(6, 3)
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
        model = Blocks()
        opt = Outer(model.parameters(), lr=0.1)
        opt.inner = sgd(model)
        run.wrap(model, opt)
        return train(model, opt, in_one_pass, *worker_samples(run))
    assert torch.equal(*run_workers(2, StrategyConfig("allreduce"), program))
    assert "outside run.wrap()" not in capsys.readouterr().err


def batch_program(own: bool, distributed: bool = False, steps: int = 4) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        model = Blocks()
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
