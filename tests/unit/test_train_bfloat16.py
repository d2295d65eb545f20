"""Models with bfloat16 parameters: strategies exchange them in float32, and servers keep them in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from virtual_ranks import attach_or_serve, flat, library

from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig

RANKS, SAMPLES, STEPS = 3, 12, 20
torch.set_num_threads(1)
random = np.random.default_rng(9)
X = torch.from_numpy(random.standard_normal((RANKS * SAMPLES, 6)).astype(np.float32))
Y = torch.from_numpy(random.integers(0, 3, RANKS * SAMPLES))

METHODS = {
    "allreduce": StrategyConfig("allreduce"), "fp16": StrategyConfig("allreduce", compression="fp16"),
    "gossip": StrategyConfig("gossip", "base-2"), "async": StrategyConfig("gossip", asynchronous=True),
    "shared": StrategyConfig("gossip", "base-2", shared_memory=True),
    "copies": StrategyConfig("adaptive-gossip", "base-2", compression="int8"),
    "local-sgd": StrategyConfig("local-sgd", period=4), "ps": StrategyConfig("ps", ps=1)}


def make_net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16()


def make_optimizer(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: Any, worker: int, workers: int) -> Any:
    return nn.functional.cross_entropy(model(X[worker::workers].bfloat16()).float(), Y[worker::workers])


def train(run: Run, steps: int = STEPS) -> Any:
    model = make_net()
    opt = make_optimizer(model)
    if not attach_or_serve(run, model, opt):
        return None
    while run.step < steps:
        with run.data_phase():
            worker, workers = run.worker_rank or 0, run.worker_count
        opt.zero_grad()
        loss_of(model, worker, workers).backward()
        opt.step()
    run.finish()
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    return flat(model)


def models_of(method: StrategyConfig, ranks: int = RANKS, **options: Any) -> list[Any]:
    return [model for model in library(ranks, method, train, **options) if model is not None]


@pytest.mark.parametrize("case", METHODS)
def test_all_workers_end_with_the_same_trained_model(case: str) -> None:
    models = models_of(METHODS[case])
    assert all(torch.equal(model, models[0]) for model in models)
    trained, untrained = make_net(), make_net()
    nn.utils.vector_to_parameters(models[0], trained.parameters())
    assert loss_of(trained, 0, 1) < 0.8 * loss_of(untrained, 0, 1)


def test_allreduce_equals_one_process_but_for_rounding() -> None:
    model = make_net()
    opt = make_optimizer(model)
    for _ in range(STEPS):
        opt.zero_grad()
        loss_of(model, 0, 1).backward()
        opt.step()
    result, start = models_of(METHODS["allreduce"])[0], flat(make_net())
    assert (result - flat(model)).norm() < 0.02 * (flat(model) - start).norm()


def test_servers_keep_a_float32_master_copy() -> None:
    """Updates far below the precision of bfloat16 add up, which they do not in the worker's own optimizer."""
    tiny, steps = 1e-5, 2000

    def program(run: Run) -> Any:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.fill_(1.0)
        opt = torch.optim.SGD(model.parameters(), lr=tiny)
        if not attach_or_serve(run, model, opt):
            return None
        for _ in range(steps):
            opt.zero_grad()
            model(torch.ones(1, 1).bfloat16()).sum().backward()
            opt.step()
        run.finish()
        return float(model.weight.detach())

    on_server = library(2, StrategyConfig("ps", ps=1), program)[1]
    local = library(1, StrategyConfig("allreduce"), program)[0]
    assert on_server == pytest.approx(1 - tiny * steps, abs=0.004) and local == 1.0


@pytest.mark.parametrize("strategy", ["gossip", "local-sgd"])
def test_means_below_the_precision_of_bfloat16_add_up(strategy: str) -> None:
    """One of two workers moves by the least change of a bfloat16 number at 1 in each step: the mean moves by half."""
    unit, steps = 2.0 ** -7, 8

    def program(run: Run) -> Any:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.fill_(1.0)
        opt = torch.optim.SGD(model.parameters(), lr=unit)
        run.wrap(model, opt)
        for _ in range(steps):
            opt.zero_grad()
            (-(run.rank == 0) * model(torch.ones(1, 1).bfloat16())).sum().backward()
            opt.step()
        run.finish()
        return float(model.weight.detach())

    config = StrategyConfig("gossip", "base-2", period=1) if strategy == "gossip" else \
        StrategyConfig("local-sgd", period=1, outer_lr=1.0, outer_momentum=0.0)
    assert library(2, config, program) == [1 + unit * steps / 2] * 2


@pytest.mark.parametrize("case", ["allreduce", "gossip", "ps", "local-sgd"])
def test_resumed_run_gives_the_same_model(case: str, tmp_path: Path) -> None:
    def run_once(folder: str, steps: int) -> list[Any]:
        return [model for model in library(RANKS, METHODS[case], lambda run: train(run, steps),
                                           checkpoint_dir=str(tmp_path / folder), checkpoint_every=4)
                if model is not None]

    uninterrupted = run_once("one", STEPS)
    run_once("other", 8)
    resumed = run_once("other", STEPS)
    assert all(torch.equal(one, other) for one, other in zip(uninterrupted, resumed, strict=True))
