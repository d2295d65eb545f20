"""What ranks agree on: the same model at the start, the same data, one model at the end."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InvalidOptionsError, InvalidRunError, SlurmdlError, TrainError, UsageError
from slurmdl.train.library import shard_optimizer
from slurmdl.train.mixing.collectives import AllreduceOp
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.world import World

FloatArray = npt.NDArray[np.float32]
T = TypeVar("T")


def call_on_all(world: World, function: Callable[[], T]) -> T:
    """What `make` gives, where it gives something on all ranks; a collective call of all ranks.

    Raises
    ------
    Refused : it raises on one rank or more; BadOptions when the first of them finds the options at fault.
    """
    found: list[T] = []
    fault, refused = "", InvalidRunError
    try:
        found.append(function())
    except (UsageError, InvalidOptionsError) as error:
        fault, refused = str(error), InvalidOptionsError
    except SlurmdlError as error:
        fault = str(error)
    faults = world.transport.allgather((fault, refused))
    for rank, (its, error_type) in enumerate(faults):
        if its:
            where = "" if len(set(faults)) == 1 else f"rank {rank} on {world.nodes[rank]}: "
            raise error_type(f"{where}{its}")
    return found[0]


def check_same_on_ranks(world: World, items: Sequence[tuple[str, str]]) -> None:
    """Refuse ranks that differ; a collective call of all ranks.

    Parameters
    ----------
    mine : (name, what belongs to it), e.g. of each parameter, in the same order on all ranks.

    Raises
    ------
    Refused : names the rank and the first thing in which it differs from rank 0.
    """
    marks = world.transport.allgather(zlib.crc32(repr(items).encode()))
    if len(set(marks)) == 1:
        return
    lists = world.transport.allgather(list(items))
    for rank, theirs in enumerate(lists):
        for index in range(max(len(theirs), len(lists[0]))):
            first, other = (" ".join(its[index]) if index < len(its) else "nothing" for its in (lists[0], theirs))
            if first != other:
                raise InvalidRunError(f"rank {rank} on {world.nodes[rank]} has {other} where rank 0 has {first}: "
                              "all ranks need the same model, optimizer and data")


def check_same_on_workers(world: World, p2p: MeteredP2P, what: str, fingerprint: tuple[int, ...]) -> None:
    """Refuse workers whose marks differ from the first worker's; by messages, since servers may be serving.

    Raises
    ------
    TrainError : on the first worker that differs.
    """
    workers = world.ranks_with_role("worker")
    mine = np.array(fingerprint, np.int64)
    first = mine.copy()
    pipelined_broadcast(p2p, workers, first)
    if not np.array_equal(mine, first):
        raise TrainError(f"its {what} is not that of rank {workers[0]} on {world.nodes[workers[0]]}: "
                         "all workers need the same")


def pipelined_broadcast(p2p: MeteredP2P, ranks: Sequence[int], vector: npt.NDArray[Any]) -> None:
    """Replace the vector of all these ranks by that of the first of them; it goes from rank to rank in chunks."""
    place = ranks.index(p2p.rank)
    right = ranks[place + 1] if place + 1 < len(ranks) else None
    if place == 0:
        p2p.exchange_chunked([(right, vector)] if right is not None else [], [])
        return
    leaving = []
    for _, part in p2p.iter_chunks([], [(ranks[place - 1], vector)]):
        if right is not None:
            leaving.append(p2p.isend(right, vector[part]))
    p2p.transport.waitall(leaving)


def broadcast_if_different(world: World, p2p: MeteredP2P, vector: npt.NDArray[Any]) -> None:
    """Give all ranks rank 0's vector where any differ; a collective call of all ranks."""
    if len(set(world.transport.allgather(zlib.crc32(vector)))) > 1:
        pipelined_broadcast(p2p, range(len(world.nodes)), vector)


def average_models(p2p: MeteredP2P, workers: Sequence[int], parameters: FloatArray, weight: float) -> float:
    """Replace the workers' models by their mean; a call of all workers.

    Parameters
    ----------
    share : of this rank's model in the mean; those of all workers are 1 together.

    Returns
    -------
    The distance of this rank's model from the mean, relative to the mean's norm.
    """
    mean = parameters * np.float32(weight)
    AllreduceOp(p2p, [workers], mean).run()
    norm = float(np.linalg.norm(mean))
    distance = float(np.linalg.norm(parameters - mean)) / norm if norm else 0.0
    parameters[:] = mean
    return distance


def broadcast_untrained(world: World, p2p: MeteredP2P, model: Any, trained_tensors: Sequence[Any]) -> None:
    """Give parameters that are not trained, and buffers, rank 0's values; `chosen` are those that are trained."""
    import torch

    others = list(untrained_tensors(model, trained_tensors).values())
    if not others:
        return
    blob = torch.cat([tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in others])
    broadcast_if_different(world, p2p, blob.numpy())
    start = 0
    with torch.no_grad():
        for tensor in others:
            end = start + tensor.numel() * tensor.element_size()
            tensor.copy_(blob[start:end].clone().view(tensor.dtype).view(tensor.shape))
            start = end


def untrained_tensors(model: Any, trained_tensors: Sequence[Any]) -> dict[str, Any]:
    """Parameters that are not trained, and buffers, by name."""
    its = {id(tensor) for tensor in trained_tensors}
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if id(tensor) not in its}


def trained_parameter_ids(model: Any, optimizer: Any) -> set[int]:
    """Ids of the parameters that are trained."""
    its = {id(tensor) for tensor in model.parameters()}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in its:
                raise TrainError(f"the optimizer trains a tensor of shape {tuple(tensor.shape)} that is no parameter "
                                 "of the model; valid: one model that holds all (torch.nn.ModuleList)")
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"] if tensor.requires_grad}


def model_signature(model: Any, optimizer: Any) -> list[tuple[str, str]]:
    """What all ranks must have alike, by name; devices may differ."""
    import torch

    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainError(f"wrap({type(model).__name__}, {type(optimizer).__name__}): not valid; valid: a "
                         "torch.nn.Module and a torch.optim.Optimizer")
    tensors = [*((f"parameter {name}", tensor) for name, tensor in model.named_parameters()),
               *((f"buffer {name}", tensor) for name, tensor in model.named_buffers())]
    return [*((name, f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
               f"{'' if tensor.is_contiguous() else f' strides {tensor.stride()}'}"
               f"{' trained' if tensor.requires_grad else ''}") for name, tensor in tensors),
            ("optimizer", type(optimizer).__name__),
            *((f"{key} of parameter group {index}", str(value)) for index, key, value in
              shard_optimizer.hyperparameter_entries(optimizer))]
