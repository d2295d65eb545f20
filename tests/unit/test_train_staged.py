"""Replicas whose host buffers are copies, as for a GPU; here from CPU to CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    "global": StrategyConfig("gossip", period=4, global_average_every=5),
    "drift": StrategyConfig("adaptive-gossip", "base-2", compression="int4", drift_threshold=0.01, trigger_warmup=2),
    "quasi-global": StrategyConfig("gossip", quasi_global_momentum=True),
    "push": StrategyConfig("gossip", asynchronous=True, compression="fp16"),
    "shared": StrategyConfig("gossip", shared_memory=True, period=2),
    "shared --async": StrategyConfig("gossip", shared_memory=True, asynchronous=True),
    "local-sgd": StrategyConfig("local-sgd", period=3),
    "local-sgd, drift": StrategyConfig("local-sgd", trigger="drift", trigger_warmup=2)}


def net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


SIZE = sum(tensor.numel() for tensor in net().parameters())


def staged(monkeypatch: pytest.MonkeyPatch, which: Callable[[int], bool]) -> None:
    """Let every n-th replica that is made, counted from 0, be one where `which(n)`."""
    made, count = Replica.__init__, iter(range(100))
    monkeypatch.setattr(Replica, "__init__", lambda self, module, chosen: made(
        self, module, chosen, staged=which(next(count))))


def trained(transport: virtual.VirtualTransport, method: StrategyConfig, steps: int = 24,
            each: Callable[[Run], None] = lambda run: None, **options: Any) -> Any:
    run = init(method, environ={"SLURMD_NODENAME": f"n{transport.rank // 2}"}, transport=transport, **options)
    model = net()
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
            each(run)
            if run.step == steps:
                break
    run.close()
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])


@pytest.mark.parametrize("case", METHODS)
def test_copies_give_same_models(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also mixed with ranks without copies."""
    method = METHODS[case]
    expected = virtual.run_virtual_ranks(4, lambda transport: trained(transport, method))
    for which in (lambda number: True, lambda number: number % 2 == 0):
        with monkeypatch.context() as patched:
            staged(patched, which)
            for mine, its in zip(virtual.run_virtual_ranks(
                4, lambda transport: trained(transport, method)), expected, strict=True):
                assert mine is its is None or torch.equal(mine, its)


@pytest.mark.parametrize("case", ["allreduce", "ps", "ps --async", "push", "local-sgd", "quasi-global"])
def test_copies_with_checkpoints_give_same_models(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints read host buffers, which are newer on a server."""
    def run(folder: str) -> Any:
        return virtual.run_virtual_ranks(4, lambda transport: trained(
            transport, METHODS[case], checkpoint_dir=str(tmp_path / folder), checkpoint_every=5))
    expected = run("one")
    staged(monkeypatch, lambda number: True)
    found = run("other")
    for mine, its in zip(found, expected, strict=True):
        assert mine is its is None or torch.equal(mine, its)


def test_only_buffers_needed_by_exchange_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements copied between device and host per step: a whole buffer, or none."""
    copied: list[tuple[bool, int]] = []

    def counted(replica: Replica, target: Any, source: Any) -> None:
        if watched and replica is watched[0]:
            back = source.data_ptr() in (replica._host_flat.data_ptr(), replica._host_grad.data_ptr())
            copied.append((back, source.numel()))
        copy(replica, target, source)

    copy, watched = Replica._copy, list[Any]()
    monkeypatch.setattr(Replica, "_copy", counted)
    staged(monkeypatch, lambda number: True)

    def steps(method: StrategyConfig, count: int) -> list[list[tuple[bool, int]]]:
        """Copies in each step of rank 0."""
        found: list[list[tuple[bool, int]]] = []
        watched.clear()

        def each(run: Run) -> None:
            if run.rank == 0:
                watched[:] = [run.replica]
                found.append(list(copied))
                copied.clear()
        virtual.run_virtual_ranks(2, lambda transport: trained(transport, method, count, each))
        return found[1:]  # the first one begins before it is watched

    there, back = (False, SIZE), (True, SIZE)
    assert steps(StrategyConfig("local-sgd"), 40) == [[there, back]
                 if number == 32 else [] for number in range(2, 41)]
    assert steps(StrategyConfig("gossip", "base-2", period=4), 12) == [
        [there, back] if number % 4 == 0 else [] for number in range(2, 13)]
    assert steps(StrategyConfig("allreduce"), 4) == [[there, back]] * 3, "gradients alone"
    looks = steps(
    StrategyConfig(
        "local-sgd",
        trigger="drift",
        trigger_warmup=0,
        drift_threshold=1e9,
        max_interval=1000),
         12)
    assert looks == [[there] if number % 4 == 2 else [] for number in range(2, 13)], "two steps before each due one"


def test_gradient_bucket_is_copied_when_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a communication thread: each element once, not only at the end."""
    monkeypatch.setattr("slurmdl.comm_layout.MAX_BUCKET_ELEMENTS", 16)
    monkeypatch.setattr(virtual.VirtualTransport, "supports_comm_thread", True)
    staged(monkeypatch, lambda number: True)
    copy, copies, ready = Replica._copy, list[tuple[int, int]](), list[str]()
    monkeypatch.setattr(Replica, "_copy", lambda its, target, source: (
        copies.append((source.numel(), len(ready))), copy(its, target, source)))

    def program(transport: virtual.VirtualTransport) -> list[tuple[int, int]]:
        run = init(StrategyConfig("allreduce"), environ={}, transport=transport)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for name, tensor in model.named_parameters():
            tensor.register_post_accumulate_grad_hook(lambda its, name=name: ready.append(name))
        copies.clear()
        model(torch.ones(1, 4)).sum().backward()
        return copies[:]
    [found] = virtual.run_virtual_ranks(1, program)
    *there, back = found
    assert sum(size for size, _ in there) == 80
    assert back == (80, 8)
    assert min(gradients for _, gradients in there) < 4, "of eight gradients"
