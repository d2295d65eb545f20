"""Library API with various models and optimizers, on virtual ranks in this process."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from strategy_harness import global_batches
from torch import nn
from user_scripts import Net, X, Y, backward, make_mlp, sgd
from virtual_ranks import attach_or_serve, flat, library

from slurmdl.errors import TrainError
from slurmdl.train.library.run import Run
from slurmdl.train.library.sampling import GlobalBatches
from slurmdl.train.strategy_config import StrategyConfig

SAMPLES, BATCH, EPOCHS = 100, 7, 2


def groups(model: Any) -> Any:
    return torch.optim.Adam([{"params": model.one.parameters(), "lr": 0.02, "betas": (0.8, 0.9)},
                             {"params": [*model.out.parameters(), *model.two.parameters()]}], lr=0.01)


def method_name(value: Any) -> str | None:
    return f"{value.strategy}{value.ps or ''}" if isinstance(value, StrategyConfig) else None


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": sgd, "groups": groups, "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)}


def train(model: Any, opt: Any, batches: Callable[[], Any], none: bool = True, fill: bool = False) -> Any:
    """Train as a user script does; return all parameters in one vector.

    With `fill`, unused trained parameters have a gradient of 0, as in the library if gradients are sent.
    """
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
    for _ in range(EPOCHS):
        for x, y in batches():
            opt.zero_grad(set_to_none=none)
            nn.functional.cross_entropy(model(x), y).backward()
            for tensor in model.parameters() if fill else ():
                if tensor.requires_grad and tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)
            opt.step()
            schedule.step()
    return flat(model)


def script(optimizer: str, none: bool = True, net: Callable[[Run], Any] = lambda run: Net()) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        model = net(run)
        opt = OPTIMIZERS[optimizer](model)
        run.attach(model, opt)
        loader = run.loader((X, Y), BATCH)
        if run.is_server:
            run.serve()
            return None
        return train(model, opt, lambda: loader, none)
    return program


def train_in_one_process(optimizer: str, workers: int, fill: bool) -> Any:
    """Reference training on the workers' joined batches, with torch alone; for `fill` see `train`."""
    model = Net()
    distribution = GlobalBatches(SAMPLES, workers, BATCH, True, 1)
    epochs = iter(range(EPOCHS))

    def batches() -> Any:
        for index in global_batches(distribution, number):
            yield X[index], Y[index]

    def next_epoch() -> Any:
        nonlocal number
        number = next(epochs)
        return batches()

    number = 0
    return train(model, OPTIMIZERS[optimizer](model), next_epoch, fill=fill)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method, ranks", [
    (StrategyConfig("allreduce"), 1), (StrategyConfig("allreduce"), 3), (StrategyConfig("allreduce"), 4),
    (StrategyConfig("ps", ps=1), 3), (StrategyConfig("ps", ps=2), 5),
    (StrategyConfig("ps", ps=3), 4)], ids=method_name)
def test_synchronous_training_equals_one_process(optimizer: str, method: StrategyConfig, ranks: int) -> None:
    workers = ranks - (method.ps or 0)
    expected = train_in_one_process(optimizer, workers, fill=ranks > 1)
    assert (expected - flat(Net())).abs().max() > 1e-2, "the reference did not learn"
    for model in library(ranks, method, script(optimizer)):
        if model is not None:
            assert torch.allclose(model, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_gossip_finish_averages_models(ranks: int) -> None:
    def program(run: Run) -> Any:
        model = Net()
        opt = sgd(model)
        run.wrap(model, opt)
        train(model, opt, lambda: run.loader((X, Y), BATCH))
        run.finish()
        return flat(model), run.consensus_distance
    models = library(ranks, StrategyConfig("gossip"), program)
    assert all(torch.equal(model, models[0][0]) for model, _ in models)
    assert (max(consensus for _, consensus in models) > 0) == (ranks > 1)


def test_wrap_broadcasts_rank_0_state() -> None:
    def program(run: Run) -> Any:
        model = nn.Sequential(Net(run.rank), nn.BatchNorm1d(3))
        model[1].running_mean += run.rank
        run.wrap(model, sgd(model))
        return flat(model), model[1].running_mean.clone(), model[1].num_batches_tracked.clone()
    for model, mean, tracked in library(3, StrategyConfig("gossip"), program):
        assert torch.equal(model, flat(nn.Sequential(Net(0), nn.BatchNorm1d(3))))
        assert not mean.any()
        assert tracked == 0


@pytest.mark.parametrize("method", [StrategyConfig("allreduce"), StrategyConfig("ps", ps=1)], ids=method_name)
def test_passes_over_a_smaller_last_batch_are_weighted_by_samples(method: StrategyConfig) -> None:
    """The last of four global batches has 3 samples: 2 of one worker, 1 of the other."""
    passes, ranks, count = 2, 2, 33

    def train(batches: Any, model: Any, opt: Any) -> Any:
        for number, (batch, target) in enumerate(batches):
            nn.functional.cross_entropy(model(batch), target).div(passes).backward()
            if number % passes == passes - 1:
                opt.step()
                opt.zero_grad()
        return flat(model)

    def program(run: Run) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(6, 3)
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        if not attach_or_serve(run, model, opt):
            return None
        return train(run.loader((X[:count], Y[:count]), batch_size=5, shuffle=False), model, opt)

    results = library(ranks + (method.ps or 0), method, program, backward_passes_per_step=passes)
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    expected = train(zip(X[:count].split(10), Y[:count].split(10), strict=True), model,
                     torch.optim.SGD(model.parameters(), lr=0.5))
    for result in filter(lambda result: result is not None, results):
        assert torch.allclose(result, expected, rtol=0, atol=1e-6)


def test_samples_of_all_batches_of_a_step_are_counted() -> None:
    def program(run: Run) -> int:
        model = Net()
        opt = sgd(model)
        run.wrap(model, opt)
        for number, (batch, target) in enumerate(run.loader((X, Y), batch_size=5)):
            nn.functional.cross_entropy(model(batch), target).backward()
            if number % 2:
                opt.step()
                opt.zero_grad()
        run.finish()
        return int(run.meter.samples.total)

    assert library(2, StrategyConfig("allreduce"), program, backward_passes_per_step=2) == [50, 50]


@pytest.mark.parametrize(("method", "ranks", "sends"), [
    (StrategyConfig("allreduce"), 1, False), (StrategyConfig("gossip"), 2, False),
    (StrategyConfig("local-sgd"), 2, False), (StrategyConfig("allreduce"), 2, True)], ids=method_name)
def test_gradients_are_copied_only_for_sending(method: StrategyConfig, ranks: int, sends: bool) -> None:
    def program(run: Run) -> tuple[int, bool]:
        model, opt = wrap_net(run)
        model(X).sum().backward()
        opt.step()
        opt.zero_grad()
        model(X).sum().backward()
        sent = run.replica.device_gradients
        offset = model.one.weight.grad.data_ptr() - sent.data_ptr()
        own = not 0 <= offset < sent.numel() * sent.element_size()
        opt.step()
        return run.replica.gradients.size, own
    size = sum(tensor.numel() for tensor in Net().parameters() if tensor.requires_grad)
    assert library(ranks, method, program) == [(size if sends else 0, not sends)] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_sparse_gradients_of_a_local_optimizer(ranks: int) -> None:
    """They stay sparse, as SparseAdam requires; a NaN in one is found."""
    def program(run: Run) -> None:
        model = nn.Embedding(9, 4, sparse=True)
        opt = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        run.wrap(model, opt)
        model(torch.tensor([1, 1, 3])).sum().backward()
        opt.step()
        opt.zero_grad()
        (model(torch.tensor([2])).sum() * float("nan")).backward()
        with pytest.raises(TrainError, match="step 2: the gradient of weight has infinite or NaN entries"):
            opt.step()
        opt.zero_grad()
        model(torch.tensor([2])).sum().backward()
        opt.step()
    library(ranks, StrategyConfig("gossip"), program)


def wrap_net(run: Run) -> tuple[Any, Any]:
    model = Net()
    return run.wrap(model, sgd(model))


def step(model: Any, opt: Any) -> None:
    model(X).sum().backward()
    opt.step()


def test_wrap_keeps_classes_and_state() -> None:
    def program(run: Run) -> None:
        model, opt = Net(), sgd(Net())
        opt = sgd(model)
        wrapped_model, wrapped_opt = run.wrap(model, opt)
        assert wrapped_model is model and wrapped_opt is opt and type(wrapped_opt) is torch.optim.SGD
        model.load_state_dict(Net(5).state_dict())  # in place
        step(model, opt)
        assert model.again.weight is model.two.weight
    library(2, StrategyConfig("allreduce"), program)


def test_ps_serves_until_last_worker_ends() -> None:
    def program(run: Run) -> int:
        model = Net()
        opt = sgd(model)
        run.attach(model, opt)
        if run.is_server:
            run.serve()
        for _ in range(run.worker_rank or 0):
            step(model, opt)
        return run.step
    assert library(4, StrategyConfig("ps"), program) == [0, 0, 1, 2]


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "local-sgd"])
def test_all_ranks_start_with_the_optimizer_state_of_rank_0(strategy: str) -> None:
    def train(model: Any, opt: Any, x: Any, y: Any) -> Any:
        for _ in range(4):
            opt.zero_grad()
            backward(model, x, y)
            opt.step()
        return flat(model)

    def adam(model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.1)

    earlier = make_mlp()
    saved = adam(earlier)
    train(earlier, saved, X[:24], Y[:24])

    def program(ranks: int) -> Callable[[Run], Any]:
        def rank_program(run: Run) -> Any:
            model = make_mlp()
            opt = adam(model)
            if run.rank < ranks:
                opt.load_state_dict(deepcopy(saved.state_dict()))
            run.wrap(model, opt)
            return train(model, opt, X[run.rank:24:2], Y[run.rank:24:2])
        return rank_program

    loaded, loaded_by_all, loaded_by_none = (
        library(2, StrategyConfig(strategy), program(ranks)) for ranks in (1, 2, 0))
    assert all(torch.equal(*models) for models in zip(loaded, loaded_by_all, strict=True))
    assert not torch.equal(loaded[1], loaded_by_none[1])
