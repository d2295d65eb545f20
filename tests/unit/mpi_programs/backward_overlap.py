"""MPI program of test_train_overlap.py: backward passes beside a communication thread; JSON results on each rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from slurmdl import comm_layout
from slurmdl.train import init
from slurmdl.train.library.replica import Replica
from slurmdl.train.strategy_config import StrategyConfig

STEPS, PASSES = 3, 4
torch.set_num_threads(1)
torch.manual_seed(3)
X, Y = torch.randn(80, 6), torch.randint(3, (80,))


def make_net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def train_with_no_sync(run: Any, silent: list[int]) -> dict[str, Any]:
    """Train with the passes `silent` of each step in `no_sync`; the workers have parts of equal size."""
    model = make_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.wrap(model, opt)
    x, y = X[run.rank::run.worker_count], Y[run.rank::run.worker_count]
    for _ in range(STEPS):
        opt.zero_grad()
        for part in range(PASSES):
            with run.no_sync() if part in silent else nullcontext():
                nn.functional.cross_entropy(model(x[part::PASSES]), y[part::PASSES]).div(PASSES).backward()
        opt.step()
    run.finish()
    return {"exchanges": run.strategy.exchanges,
            "parameters": torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()]).tolist()}


def small_layers(run: Any) -> tuple[Any, Any]:
    """Four layers of 20 parameters, with buckets of up to 16."""
    comm_layout.MAX_BUCKET_ELEMENTS = 16
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    wrapped: tuple[Any, Any] = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return wrapped


def record_starts(run: Any) -> list[int]:
    """Start indices that the strategy is told in one backward pass."""
    (model, opt), ready = small_layers(run), list[int]()
    on_ready: Callable[[int], bool] = run.strategy.on_gradients_ready
    run.strategy.on_gradients_ready = lambda start: (ready.append(start), on_ready(start))[1]
    model(torch.ones(1, 4)).sum().backward()
    starts = ready[:]
    opt.step()
    return starts


def record_copies(run: Any) -> list[tuple[int, int]]:
    """Elements of each copy of a staged replica in one backward pass, and how many gradients were ready before."""
    init_replica, copy = Replica.__init__, Replica._copy
    copies, ready = list[tuple[int, int]](), list[str]()
    Replica.__init__ = lambda self, *arguments, **options: init_replica(  # type: ignore[method-assign]
        self, *arguments, **options, staged=True)
    Replica._copy = lambda self, target, source: (  # type: ignore[method-assign, assignment]
        copies.append((source.numel(), len(ready))), copy(self, target, source))
    model, opt = small_layers(run)
    for name, tensor in model.named_parameters():
        tensor.register_post_accumulate_grad_hook(lambda tensor, name=name: ready.append(name))
    copies.clear()
    model(torch.ones(1, 4)).sum().backward()
    in_backward = copies[:]
    opt.step()
    return in_backward


def main() -> None:
    task, argument = sys.argv[1], json.loads(sys.argv[2])
    run = init(StrategyConfig("allreduce"), environ={})
    result = {"no_sync": lambda: train_with_no_sync(run, argument), "starts": lambda: record_starts(run),
              "copies": lambda: record_copies(run)}[task]()
    assert run.world.transport.supports_comm_thread
    run.finish()
    print(json.dumps(result), flush=True)


main()
