"""Replicas whose host buffers are copies, as for a GPU; these tests copy from CPU to CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strategy_harness import fix_threshold
from torch import nn

from slurmdl.train import init
from slurmdl.train.library.replica import Replica
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import virtual

SAMPLES, BATCH = 128, 4
random = np.random.default_rng(7)
X = torch.from_numpy(random.standard_normal((SAMPLES, 6)).astype(np.float32))
Y = torch.from_numpy(random.integers(0, 3, SAMPLES))
torch.set_num_threads(1)

METHODS = {
    "allreduce": StrategyConfig("allreduce"), "ps": StrategyConfig("ps", ps=2),
    "ps --async": StrategyConfig("ps", asynchronous=True),
    "gossip": StrategyConfig("gossip", period=3),
    "drift": StrategyConfig("adaptive-gossip", "base-2", compression="int4", comm_budget=0.02),
    "push": StrategyConfig("gossip", asynchronous=True, compression="fp16"),
    "shared": StrategyConfig("gossip", shared_memory=True, period=2),
    "shared --async": StrategyConfig("gossip", shared_memory=True, asynchronous=True),
    "local-sgd": StrategyConfig("local-sgd", period=3)}


def make_net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


SIZE = sum(tensor.numel() for tensor in make_net().parameters())


def stage_replicas(monkeypatch: pytest.MonkeyPatch, is_staged: Callable[[int], bool]) -> None:
    """Give the n-th created replica staged buffers if `is_staged(n)`; n counts from 0."""
    init_replica, index = Replica.__init__, iter(range(100))
    monkeypatch.setattr(Replica, "__init__", lambda self, module, chosen, **options: init_replica(
        self, module, chosen, staged=is_staged(next(index)), **options))


def train(transport: virtual.VirtualTransport, method: StrategyConfig, steps: int = 24,
          on_step: Callable[[Run], None] = lambda run: None, **options: Any) -> Any:
    run = init(method, environ={"SLURMD_NODENAME": f"n{transport.rank // 2}"}, transport=transport, **options)
    model = make_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, opt)
    loader = run.loader((X, Y), BATCH)
    if run.is_server:
        run.serve()
        run.close()
        return None
    while run.step < steps:
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            on_step(run)
            if run.step == steps:
                break
    run.close()
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])


@pytest.mark.parametrize("case", METHODS)
def test_copies_give_same_models(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks, or every second rank, use copies."""
    method = METHODS[case]
    expected = virtual.run_virtual_ranks(4, lambda transport: train(transport, method))
    for is_staged in (lambda number: True, lambda number: number % 2 == 0):
        with monkeypatch.context() as patched:
            stage_replicas(patched, is_staged)
            for model, expected_model in zip(virtual.run_virtual_ranks(
                4, lambda transport: train(transport, method)), expected, strict=True):
                assert model is expected_model is None or torch.equal(model, expected_model)


@pytest.mark.parametrize("case", ["allreduce", "ps", "ps --async", "push", "local-sgd"])
def test_copies_with_checkpoints_give_same_models(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints read host buffers, which are newer on a server."""
    def run(folder: str) -> Any:
        return virtual.run_virtual_ranks(4, lambda transport: train(
            transport, METHODS[case], checkpoint_dir=str(tmp_path / folder), checkpoint_every=5))
    expected = run("one")
    stage_replicas(monkeypatch, lambda number: True)
    results = run("other")
    for model, expected_model in zip(results, expected, strict=True):
        assert model is expected_model is None or torch.equal(model, expected_model)


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
        virtual.run_virtual_ranks(2, lambda transport: train(transport, method, count, on_step))
        return step_copies[1:]  # recording starts during the first step

    to_host, to_device = (False, SIZE), (True, SIZE)
    assert steps(StrategyConfig("local-sgd"), 40) == [[to_host, to_device]
                 if number == 32 else [] for number in range(2, 41)]
    assert steps(StrategyConfig("gossip", "base-2", period=4), 12) == [
        [to_host, to_device] if number % 4 == 0 else [] for number in range(2, 13)]
    assert steps(StrategyConfig("allreduce"), 4) == [[to_host, to_device]] * 3, "gradients alone"
    fix_threshold(1e9, 0, monkeypatch.setattr)
    measurements = steps(StrategyConfig("adaptive-gossip", "base-2"), 12)
    assert measurements == [[to_host] if number % 4 == 2 else []
                            for number in range(2, 13)], "two steps before each due one"
