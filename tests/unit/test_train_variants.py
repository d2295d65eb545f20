"""Strategies with models in bfloat16, host buffers that are copies (as for a GPU), gradient scalers, and checkpoints.

Strategies exchange bfloat16 models in float32, and servers keep them in it. Copies are from CPU to CPU here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_harness import fix_threshold
from torch import nn
from user_scripts import X, Y, make_mlp
from virtual_ranks import attach_or_serve, flat, library

from slurmdl.train.library.replica import Replica
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig

RANKS, STEPS = 4, 24
SIZE = flat(make_mlp()).numel()
METHODS = {
    "allreduce": StrategyConfig("allreduce"), "fp16": StrategyConfig("allreduce", compression="fp16"),
    "ps": StrategyConfig("ps", ps=2), "ps --async": StrategyConfig("ps", asynchronous=True),
    "gossip": StrategyConfig("gossip", "base-2"), "every third": StrategyConfig("gossip", period=3),
    "drift": StrategyConfig("adaptive-gossip", "base-2", compression="int4", comm_budget=0.02),
    "push": StrategyConfig("gossip", asynchronous=True, compression="fp16"),
    "shared": StrategyConfig("gossip", shared_memory=True, period=2),
    "shared --async": StrategyConfig("gossip", shared_memory=True, asynchronous=True),
    "local-sgd": StrategyConfig("local-sgd", period=3)}
SYNCHRONOUS = [name for name, config in METHODS.items() if not config.asynchronous]


def scaler() -> Any:
    """Make a scaler whose first scales overflow float32."""
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** 127, backoff_factor=2.0 ** -30, growth_interval=4)


def loss_of(model: Any, step: int, worker: int, workers: int) -> Any:
    """Loss of a worker in a step, on samples of its own."""
    x, y = (data[25 * (step % 4):25 * (step % 4 + 1)][worker::workers] for data in (X, Y))
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def program(dtype: Any = torch.float32, scaled: bool = False, steps: int = STEPS, finishes: bool = True,
            on_step: Callable[[Run], None] = lambda run: None) -> Callable[[Run], Any]:
    """Train; return model, scale and steps of a worker, None on a server."""
    def rank(run: Run) -> Any:
        model = make_mlp().to(dtype)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if not attach_or_serve(run, model, opt):
            return None
        grad_scaler = scaler() if scaled else torch.amp.GradScaler("cpu", enabled=False)
        if scaled:
            run.register_for_checkpointing("scaler", grad_scaler)
        while run.step < steps:
            with run.data_phase():
                worker, workers = run.worker_rank or 0, run.worker_count
            opt.zero_grad()
            grad_scaler.scale((16 if scaled else 1) * loss_of(model, run.step, worker, workers)).backward()
            grad_scaler.step(opt)
            grad_scaler.update()
            on_step(run)
        if finishes:
            run.finish()
        assert {tensor.dtype for tensor in model.parameters()} == {dtype}
        return flat(model), grad_scaler.get_scale(), run.step
    return rank


def results_of(case: str, *words: Any, checkpoints: Path | None = None, **options: Any) -> list[Any]:
    kept = {"checkpoint_dir": str(checkpoints), "checkpoint_every": 4} if checkpoints else {}
    results = library(RANKS, METHODS[case], program(*words, **options), **kept)
    return [result for result in results if result]


def assert_equal(results: list[Any], expected: list[Any]) -> None:
    for (model, *facts), (expected_model, *expected_facts) in zip(results, expected, strict=True):
        assert torch.equal(model, expected_model) and facts == expected_facts


def stage_replicas(monkeypatch: pytest.MonkeyPatch, is_staged: Callable[[int], bool]) -> None:
    """Give the n-th created replica staged buffers if `is_staged(n)`; n counts from 0."""
    init_replica, index = Replica.__init__, iter(range(100))
    monkeypatch.setattr(Replica, "__init__", lambda self, module, chosen, **options: init_replica(
        self, module, chosen, staged=is_staged(next(index)), **options))


@pytest.mark.parametrize("case", METHODS)
def test_copies_give_same_models(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks, or every second rank, use copies; without `finish`, so that models may differ."""
    expected = results_of(case, finishes=False)
    for is_staged in (lambda number: True, lambda number: number % 2 == 0):
        with monkeypatch.context() as patched:
            stage_replicas(patched, is_staged)
            assert_equal(results_of(case, finishes=False), expected)


@pytest.mark.parametrize("case", ["allreduce", "ps", "ps --async", "push", "local-sgd"])
def test_copies_with_checkpoints_give_same_models(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints read host buffers, which are newer on a server."""
    expected = results_of(case, checkpoints=tmp_path / "one")
    stage_replicas(monkeypatch, lambda number: True)
    assert_equal(results_of(case, checkpoints=tmp_path / "other"), expected)


@pytest.mark.parametrize("case", METHODS)
def test_workers_end_with_the_same_trained_bfloat16_model(case: str) -> None:
    models = [model for model, *_ in results_of(case, torch.bfloat16)]
    assert all(torch.equal(model, models[0]) for model in models)
    trained, untrained = make_mlp().bfloat16(), make_mlp().bfloat16()
    nn.utils.vector_to_parameters(models[0], trained.parameters())
    losses = [sum(float(loss_of(model, step, 0, 1).detach()) for step in range(4)) for model in (trained, untrained)]
    assert losses[0] < 0.97 * losses[1]


@pytest.mark.parametrize("variant", [{"dtype": torch.bfloat16}, {"scaled": True}, {"dtype": torch.float32}],
                         ids=["bfloat16", "scaled", "float32"])
@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_resumed_run_gives_the_same_model(case: str, variant: dict[str, Any], tmp_path: Path) -> None:
    """Skipped steps count, so that data and exchanges resume at their positions."""
    uninterrupted = results_of(case, checkpoints=tmp_path / "one", **variant)
    assert all(steps == STEPS for *_, steps in uninterrupted)
    assert not variant.get("scaled") or all(scale < 2.0 ** 127 for _, scale, _ in uninterrupted)
    results_of(case, checkpoints=tmp_path / "other", steps=8, finishes=False, **variant)
    assert_equal(results_of(case, checkpoints=tmp_path / "other", **variant), uninterrupted)


def test_allreduce_of_bfloat16_equals_one_process_but_for_rounding() -> None:
    model = make_mlp().bfloat16()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        opt.zero_grad()
        (sum(loss_of(model, step, worker, RANKS) for worker in range(RANKS)) / RANKS).backward()
        opt.step()
    result, start = results_of("allreduce", torch.bfloat16)[0][0], flat(make_mlp().bfloat16())
    assert (result - flat(model)).norm() < 0.02 * (flat(model) - start).norm()


@pytest.mark.parametrize(("config", "ranks", "lr", "steps", "expected", "tolerance"), [
    # servers keep a float32 copy, in which updates far below the precision add up
    (StrategyConfig("ps", ps=1), 2, -1e-5, 2000, 1 - 1e-5 * 2000, 0.004),
    (StrategyConfig("allreduce"), 1, -1e-5, 2000, 1.0, 0),
    # one of two workers moves by the least change at 1 in each step: the mean moves by half
    (StrategyConfig("gossip", "base-2", period=1), 2, 2.0 ** -7, 8, 1 + 2.0 ** -7 * 8 / 2, 0),
    (StrategyConfig("local-sgd", period=1, outer_lr=1.0, outer_momentum=0.0), 2, 2.0 ** -7, 8, 1 + 2.0 ** -7 * 8 / 2,
     0)])
def test_changes_below_the_precision_of_bfloat16_add_up(config: StrategyConfig, ranks: int, lr: float, steps: int,
                                                        expected: float, tolerance: float) -> None:
    def rank(run: Run) -> Any:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=abs(lr))
        if not attach_or_serve(run, model, opt):
            return expected
        for _ in range(steps):
            opt.zero_grad()
            moves = -1.0 if lr > 0 and run.rank == 0 else 0.0 if lr > 0 else 1.0
            (moves * model(torch.ones(1, 1).bfloat16())).sum().backward()
            opt.step()
        run.finish()
        return float(model.weight.detach())
    assert library(ranks, config, rank) == pytest.approx([expected] * ranks, abs=tolerance, rel=0)


def test_only_buffers_needed_by_exchange_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy between device and host covers a whole buffer."""
    copied: list[tuple[bool, int]] = []

    def record_copy(replica: Replica, target: Any, source: Any) -> None:
        if observed and replica is observed[0]:
            to_device = source.data_ptr() in (replica._host_flat.data_ptr(), replica._host_grad.data_ptr())
            copied.append((to_device, source.numel()))
        copy(replica, target, source)

    copy, observed = Replica._copy, list[Any]()
    monkeypatch.setattr(Replica, "_copy", record_copy)
    stage_replicas(monkeypatch, lambda number: True)

    def steps(method: StrategyConfig, count: int) -> list[list[tuple[bool, int]]]:
        """Return the copies of rank 0 in each step but the first."""
        step_copies: list[list[tuple[bool, int]]] = []
        observed.clear()

        def on_step(run: Run) -> None:
            if run.rank == 0:
                observed[:] = [run.replica]
                step_copies.append(list(copied))
                copied.clear()
        library(2, method, program(steps=count, finishes=False, on_step=on_step))
        return step_copies[1:]  # recording starts during the first step

    to_host, to_device = (False, SIZE), (True, SIZE)
    assert steps(StrategyConfig("local-sgd"), 40) == [[to_host, to_device] if number == 32 else []
                                                      for number in range(2, 41)]
    assert steps(StrategyConfig("gossip", "base-2", period=4), 12) == [
        [to_host, to_device] if number % 4 == 0 else [] for number in range(2, 13)]
    assert steps(StrategyConfig("allreduce"), 4) == [[to_host, to_device]] * 3, "gradients alone"
    fix_threshold(1e9, 0, monkeypatch.setattr)
    assert steps(StrategyConfig("adaptive-gossip", "base-2"), 12) == [
        [to_host] if number % 4 == 2 else [] for number in range(2, 13)], "two steps before each due one"
