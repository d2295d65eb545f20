"""Chooses where gradients on GPUs are averaged: on the GPUs, or in host memory."""

from __future__ import annotations

from typing import Any

from slurmdl.errors import warn
from slurmdl.train.strategies import sends_gradients
from slurmdl.train.world import World


def choose_device_backend(world: World, device: Any) -> str:
    """Backend of torch.distributed that averages gradients on the ranks' GPUs; "" if host memory does. Collective.

    NCCL needs a GPU of its own for each rank. Gradients that parameter servers sum, or that travel compressed, are in
    host memory.
    """
    config, transport = world.config, world.transport
    compressed = config.compression != "none" and not config.inside  # inside of islands nothing is compressed
    if not transport.device_backends or not sends_gradients(config) or world.strategy == "ps" or compressed:
        return ""
    ranks = transport.allgather((transport.device_backends.get(device.type, ""), _device_id(device)))
    lacking = next((rank for rank, (backend, _) in enumerate(ranks) if not backend), None)
    problem, owners = "", dict[object, int]()
    if lacking is not None:
        problem = f"{world.format_rank(lacking)} has no GPU for NCCL" * any(backend for backend, _ in ranks)
    else:
        for rank, (_, device_id) in enumerate(ranks):
            owner = owners.setdefault((world.nodes[rank], device_id or rank), rank)
            if owner != rank and not problem:
                problem = f"{world.format_rank(owner)} and rank {rank} share a GPU, which NCCL does not support"
    if problem and world.rank == 0:
        warn(f"train: gradients are averaged in host memory, which is slower: {problem}")
    return "" if problem or lacking is not None else str(ranks[world.rank][0])


def _device_id(device: Any) -> str:
    """What identifies a GPU on its node; "" for the CPU."""
    if device.type == "cpu":
        return ""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", f"{device}"))  # no `uuid` before PyTorch 2.4
