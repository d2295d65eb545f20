"""Run scripts that use the library on virtual ranks, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from slurmdl.train import init
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train
from slurmdl.train.transports import virtual


def library(count: int, method: StrategyConfig, program: Callable[[Run], Any], own_nodes: bool = False,
            **options: Any) -> list[Any]:
    """Run `program` on `count` virtual ranks, parameter servers included; return its result for each rank.

    All are on one node, or with `own_nodes` each on another one. `options` are passed to `init`.
    """
    def rank(transport: virtual.VirtualTransport) -> Any:
        environ = {"SLURMD_NODENAME": f"n{transport.rank}"} if own_nodes else {}
        run = init(method, environ=environ, transport=transport, **options)
        result = program(run)
        run.close()
        return result
    return virtual.run_virtual_ranks(count, rank)


def on_zones(zones: str, config: StrategyConfig, program: Callable[[Run], Any], nodes: str = "",
             **options: Any) -> list[Any]:
    """Run `program` on one virtual rank per letter of `zones`, on nodes of their own or those of `nodes`."""
    def rank(transport: virtual.VirtualTransport) -> Any:
        own = transport.rank
        environ = {"SLURMD_NODENAME": nodes[own] if nodes else f"n{own}", "SLURM_TOPOLOGY_ADDR": f"{zones[own]}.n",
                   "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
        run = init(config, environ=environ, transport=transport, **options)
        result = program(run)
        run.close()
        return result
    return virtual.run_virtual_ranks(len(zones), rank)


@contextmanager
def process_group() -> Iterator[Any]:
    """A process group of torch.distributed, with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def attach_or_serve(run: Run, model: Any, opt: Any) -> bool:
    """Attach model and optimizer, and serve on a parameter server; return True on a worker, False on a server."""
    run.attach(model, opt)
    if run.is_server:
        run.serve()
    return not run.is_server


def flat(model: Any) -> Any:
    """Return a copy of all parameters of a model, shape (D,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()]).clone()


def train_summary(*words: str, **options: object) -> dict[str, Any]:
    """Summary of a run of the trainer with these words, and further options by name."""
    arguments = [argument for text in words for argument in text.split()]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    summary = train(parse_train_options(arguments, {}))
    assert summary is not None
    return summary
