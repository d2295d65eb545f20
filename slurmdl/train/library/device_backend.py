"""Chooses where gradients on GPUs are averaged: on the GPUs, or in host memory."""

from __future__ import annotations

from collections.abc import Sequence
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
    compressed = config.compression != "none" and not config.islands  # inside of islands nothing is compressed
    if not transport.device_backends or not sends_gradients(config) or world.strategy == "ps" or compressed:
        return ""
    own = transport.device_backends.get(device.type, "")
    ranks = transport.allgather((own, _device_id(device)))
    if not any(backend for backend, _ in ranks):
        return ""
    problem = _problem(world, ranks)
    if problem and world.rank == 0:
        warn(f"train: gradients are averaged in host memory, which is slower: {problem}")
    return "" if problem else own


def _problem(world: World, ranks: Sequence[tuple[str, str]]) -> str:
    """Why NCCL cannot be used; "" if it can. `ranks` : backend and device ID of each rank."""
    owners: dict[tuple[str, str], int] = {}
    for rank, (backend, device_id) in enumerate(ranks):
        if not backend:
            return f"{world.format_rank(rank)} has no GPU for NCCL"
        owner = owners.setdefault((world.nodes[rank], device_id), rank) if device_id else rank
        if owner != rank:
            return f"{world.format_rank(owner)} and rank {rank} share a GPU, which NCCL does not support"
    return ""


def _device_id(device: Any) -> str:
    """What identifies a GPU on its node; "" for the CPU, and if PyTorch is too old to tell."""
    if device.type == "cpu":
        return ""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
