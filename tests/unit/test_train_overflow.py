"""Gradient overflow: skipped with torch.amp.GradScaler, else rejected; on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from strategy_harness import global_batches
from torch import nn
from virtual_ranks import attach_or_serve, flat, library

from slurmdl.train import init
from slurmdl.train.library.replica import Replica
from slurmdl.train.library.run import Run
from slurmdl.train.library.sampling import GlobalBatches
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import virtual

SAMPLES, BATCH = 60, 4
random = np.random.default_rng(5)
X = torch.from_numpy(random.standard_normal((SAMPLES, 6)).astype(np.float32))
Y = torch.from_numpy(random.integers(0, 3, SAMPLES))
torch.set_num_threads(1)

ALONE = {"gossip": StrategyConfig("gossip"), "gossip --async": StrategyConfig("gossip", asynchronous=True),
         "local-sgd": StrategyConfig("local-sgd", period=3),
         "ps": StrategyConfig("ps", ps=2),
         "ps --async": StrategyConfig("ps", ps=2, asynchronous=True)}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)}


def make_net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def scaler() -> Any:
    """Make a scaler whose first scales overflow float32."""
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** 127, backoff_factor=2.0 ** -30, growth_interval=4)


def train(model: Any, opt: Any, batches: Any, clip: bool, scales: list[float]) -> Any:
    """As in PyTorch's mixed precision examples."""
    grad_scaler = scaler()
    for x, y in batches:
        opt.zero_grad()
        grad_scaler.scale(16 * nn.functional.cross_entropy(model(x), y)).backward()
        if clip:
            grad_scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        grad_scaler.step(opt)
        grad_scaler.update()
        scales.append(grad_scaler.get_scale())
    return flat(model)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_averaged_gradients_skip_on_all_ranks(optimizer: str, clip: bool) -> None:
    """Equal to one process on the joined batches, including the scale."""
    model, expected_scales = make_net(), list[float]()
    batches = GlobalBatches(SAMPLES, 3, BATCH, True, 1)
    samples = [(X[index], Y[index]) for index in global_batches(batches, 0)]
    expected = train(model, OPTIMIZERS[optimizer](model), samples, clip, expected_scales)
    assert expected_scales[0] < 2.0 ** 127 and expected_scales[-1] > min(expected_scales), "it overflows, and grows"
    assert (expected - flat(make_net())).abs().max() > 1e-3, "the reference did not learn"

    def program(run: Run) -> Any:
        model, scales = make_net(), list[float]()
        opt = OPTIMIZERS[optimizer](model)
        run.wrap(model, opt)
        return train(model, opt, run.loader((X, Y), BATCH), clip, scales), scales, run.step
    for parameters, scales, steps in library(3, StrategyConfig("allreduce"), program):
        assert torch.allclose(parameters, expected, rtol=0, atol=2e-6)
        assert scales == expected_scales
        assert steps == len(scales), "a step that is skipped counts"


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("case", ALONE)
def test_single_worker_skips_update(case: str, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The skipping worker still takes part in exchanges, and sends finite values only."""
    init_replica = Replica.__init__
    monkeypatch.setattr(Replica, "__init__", lambda self, module, chosen, **options: init_replica(
        self, module, chosen, staged=staged, **options))

    def program(run: Run) -> Any:
        model = make_net()
        opt = OPTIMIZERS["sgd"](model)
        if not attach_or_serve(run, model, opt):
            return None
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in enumerate(run.loader((X, Y), BATCH)):
            opt.zero_grad()
            overflow = float("inf") if run.worker_rank == 1 and step in (0, 2) else 1.0
            scaler.scale(nn.functional.cross_entropy(model(x), y) * overflow).backward()
            before = flat(model)
            scaler.step(opt)
            scaler.update()
            if overflow > 1 and case == "local-sgd" and not step:
                assert torch.equal(flat(model), before), "no exchange is due in this step"
        run.finish()
        return flat(model), scaler.get_scale(), run.step
    workers = [result for result in library(5, ALONE[case], program) if result is not None]
    assert len({steps for _, _, steps in workers}) == 1
    assert [scale for _, scale, _ in workers] == [1.0 if worker == 1 else 4.0 for worker in range(len(workers))]
    for model, _, _ in workers:
        assert bool(model.isfinite().all())
        assert torch.equal(model, workers[0][0])
    assert (workers[0][0] - flat(make_net())).abs().max() > 1e-3


def test_servers_ignore_gradients_of_skipping_worker() -> None:
    """Equal to one process without that worker's first batch."""
    def program(run: Run) -> Any:
        model = make_net()
        opt = OPTIMIZERS["adamw"](model)
        if not attach_or_serve(run, model, opt):
            return None
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(X[run.worker_rank::3]), Y[run.worker_rank::3])
            scaler.scale(loss * (float("nan") if not step and run.worker_rank == 1 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
        return flat(model)
    model = make_net()
    opt = OPTIMIZERS["adamw"](model)
    for step in range(3):
        opt.zero_grad()
        for worker in range(3):
            if step or worker != 1:
                nn.functional.cross_entropy(model(X[worker::3]), Y[worker::3]).div(3 if step else 2).backward()
        opt.step()
    for parameters in library(5, StrategyConfig("ps", ps=2), program):
        assert parameters is None or torch.allclose(parameters, flat(model), rtol=0, atol=2e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_add_up_before_skipped_step(passes: int) -> None:
    def rank(transport: virtual.VirtualTransport) -> Any:
        run = init(StrategyConfig("allreduce"), environ={}, transport=transport, backward_passes_per_step=passes)
        model = make_net()
        opt = OPTIMIZERS["sgd"](model)
        run.wrap(model, opt)
        grad_scaler = scaler()
        x, y = X[run.rank::2], Y[run.rank::2]
        for _ in range(6):
            opt.zero_grad()
            for part in range(passes):
                loss = nn.functional.cross_entropy(model(x[part::passes]), y[part::passes])
                grad_scaler.scale(16 * loss / passes).backward()
            grad_scaler.step(opt)
            grad_scaler.update()
        run.finish()
        return flat(model), grad_scaler.get_scale()
    (parameters, scale), (other_parameters, other_scale) = virtual.run_virtual_ranks(2, rank)
    assert torch.equal(parameters, other_parameters) and scale == other_scale < 2.0 ** 127
    model = make_net()
    plain = OPTIMIZERS["sgd"](model)
    train(model, plain, [(X, Y)] * 6, False, [])
    assert torch.allclose(parameters, flat(model), rtol=0, atol=2e-6)
