"""Consistency between ranks: collective checks, identical initial models, and the final average."""

from __future__ import annotations

import gc
import io
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InvalidOptionsError, InvalidRunError, SlurmdlError, TrainError, UsageError
from slurmdl.train import optimizer_hooks
from slurmdl.train.collectives import AllreduceOp
from slurmdl.train.library import shard_optimizer
from slurmdl.train.library.checkpoint import save_state
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.transports.transport import Tag, decode_object, encode_object
from slurmdl.train.world import World

T = TypeVar("T")


def call_on_all(world: World, function: Callable[[], T]) -> T:
    """Run `function` on every rank and return its result. Collective.

    Raises InvalidRunError on all ranks if it raises on some; InvalidOptionsError if the first rejects options.
    """
    results: list[T] = []
    message, is_of_options = "", False
    try:
        results.append(function())
    except (UsageError, InvalidOptionsError) as error:
        message, is_of_options = str(error), True
    except SlurmdlError as error:
        message = str(error)
    outcomes = world.transport.allgather((message, is_of_options))
    for rank, (message, is_of_options) in enumerate(outcomes):
        if message:
            prefix = "" if len(set(outcomes)) == 1 else f"{world.format_rank(rank)}: "
            raise (InvalidOptionsError if is_of_options else InvalidRunError)(f"{prefix}{message}")
    return results[0]


def check_same_on_ranks(world: World, items: Sequence[tuple[str, str]]) -> None:
    """Raise InvalidRunError if a rank's (name, value) items differ from rank 0's; it names the first. Collective."""
    checksums = world.transport.allgather(zlib.crc32(repr(items).encode()))
    if len(set(checksums)) == 1:
        return
    lists = world.transport.allgather(list(items))
    for rank, own in enumerate(lists):
        for first, other in zip_longest(lists[0], own, fillvalue=("nothing",)):
            if first != other:
                raise InvalidRunError(f"{world.format_rank(rank)} has {' '.join(other)} where rank 0 has "
                                      f"{' '.join(first)}: all ranks need the same model, optimizer and data")


def check_same_data(world: World, p2p: MeteredP2P, fingerprint: tuple[int, ...]) -> None:
    """Raise TrainError on workers whose data differ from the first one's; by messages, as servers may be serving."""
    workers = world.ranks_with_role("worker")
    own = np.array(fingerprint, np.int64)
    first = own.copy()
    pipelined_broadcast(p2p, workers, first)
    if not np.array_equal(own, first):
        raise TrainError(f"the data differs from that of {world.format_rank(workers[0])}: all workers need the same")


def fail_if_others_continue(world: World, message: Callable[[int], str]) -> None:
    """Raise TrainError if another worker has started a further step; `message` takes its rank. For barriers."""
    peer = world.transport.iprobe(Tag.STEP)
    if peer is not None:
        raise TrainError(message(peer))


def pipelined_broadcast(p2p: MeteredP2P, ranks: Sequence[int], vector: npt.NDArray[Any]) -> None:
    """Replace the vector of these ranks by that of the first; it passes from rank to rank in chunks."""
    index = ranks.index(p2p.rank)
    following = ranks[index + 1:index + 2]
    if index == 0:
        p2p.exchange_chunked([(peer, vector) for peer in following], [])
        return
    send_requests = []
    for _, chunk in p2p.iter_chunks([], [(ranks[index - 1], vector)]):
        send_requests += [p2p.isend(peer, vector[chunk]) for peer in following]
    p2p.transport.waitall(send_requests)


def gather_messages(p2p: MeteredP2P, ranks: Sequence[int], obj: Any) -> list[Any]:
    """Gather an object from these ranks, in their order, by messages. Collective over them.

    The first one collects the objects and passes them on.
    """
    own, first, others = np.frombuffer(encode_object(obj), np.uint8), ranks[0], range(1, len(ranks))
    sizes = np.full(len(ranks), own.size, np.int64)
    p2p.exchange(*([], [(ranks[index], sizes[index:index + 1]) for index in others]) if p2p.rank == first else
                 ([(first, sizes[:1])], []))
    pipelined_broadcast(p2p, ranks, sizes)
    ends = np.cumsum(sizes)
    packed = np.empty(int(ends[-1]), np.uint8)
    packed[:own.size] = own
    p2p.exchange_chunked(*([], [(ranks[index], packed[ends[index - 1]:ends[index]]) for index in others])
                         if p2p.rank == first else ([(first, own)], []))
    pipelined_broadcast(p2p, ranks, packed)
    return [decode_object(part) for part in np.split(packed, ends[:-1])]


def broadcast_if_different(world: World, p2p: MeteredP2P, vector: npt.NDArray[Any],
                           check: Callable[[], None] = lambda: None) -> None:
    """Replace the vector of all ranks by rank 0's unless all are equal. Collective.

    `check` is called before on those that are to change, and may raise a SlurmdlError.
    """
    checksums = world.transport.allgather(zlib.crc32(vector))
    if len(set(checksums)) > 1:
        call_on_all(world, check if checksums[world.rank] != checksums[0] else lambda: None)
        pipelined_broadcast(p2p, range(len(world.nodes)), vector)


def reject_copies(optimizer: Any, named: Iterable[tuple[str, Any]]) -> None:
    """Reject an optimizer that has copied parameters, as Lookahead its slow weights: they become those of rank 0.

    Its state does, too. Constant tensors, such as biases of 0, are ignored, as they may not be copies.
    """
    by_shape: dict[Any, list[tuple[str, Any]]] = {}
    for name, tensor in named:
        if tensor.numel() and not bool((tensor == tensor.reshape(-1)[0]).all()):
            by_shape.setdefault(tensor.shape, []).append((name, tensor))
    for attribute, value in _iter_attributes(optimizer, "", set()):
        for name, tensor in by_shape.get(value.shape, ()):
            if value.data_ptr() != tensor.data_ptr() and value.dtype == tensor.dtype \
                    and value.cpu().equal(tensor.cpu()):
                raise TrainError(f"{type(optimizer).__name__}{attribute} is a copy of parameter {name}, which "
                                 "becomes that of rank 0; expected the same model on all ranks, by "
                                 "torch.manual_seed() before it is made, or copies made in the first step")


def _iter_attributes(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Dense tensors, with their paths, in an optimizer without its state, and in its optimizers, lists and dicts."""
    import torch

    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield path, value.detach()
    elif isinstance(value, torch.optim.Optimizer):
        items = ((f".{name}", item) for name, item in vars(value).items() if name != "state")
    elif isinstance(value, (list, tuple)):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        items = ((f"[{key!r}]", item) for key, item in value.items() if key != "params")
    if id(value) not in seen:
        seen.add(id(value))
        for name, item in items:
            yield from _iter_attributes(item, path + name, seen)


def average_models(p2p: MeteredP2P, workers: Sequence[int], parameters: npt.NDArray[np.float32],
                   weight: float) -> float:
    """Replace the workers' models by their weighted mean. Collective over the workers.

    `weight` is this model's share of the mean. Returns its distance from the mean, relative to the mean's norm.
    """
    mean = parameters * np.float32(weight)
    AllreduceOp(p2p, [workers], mean).run()
    norm = float(np.linalg.norm(mean))
    distance = float(np.linalg.norm(parameters - mean)) / norm if norm else 0.0
    parameters[:] = mean
    return distance


def broadcast_optimizer_state(p2p: MeteredP2P, source: int, ranks: Sequence[int], optimizer: Any) -> None:
    """Replace the state of the ranks' optimizers, e.g. momentum, by that of `source`. Collective over them."""
    import torch

    order = [source, *(rank for rank in ranks if rank != source)]
    own = optimizer.state_dict()
    file = io.BytesIO()
    if p2p.rank == source:
        save_state(_optimizer_owner(optimizer), own["state"], file)
    size = np.array([file.tell()], np.int64)
    pipelined_broadcast(p2p, order, size)
    packed = np.frombuffer(file.getvalue() or bytes(int(size[0])), np.uint8).copy()
    pipelined_broadcast(p2p, order, packed)
    if p2p.rank != source:
        state = torch.load(io.BytesIO(packed.tobytes()), map_location="cpu", weights_only=True)
        optimizer.load_state_dict({**own, "state": state})


def broadcast_loaded_optimizer_state(world: World, p2p: MeteredP2P, optimizer: Any) -> None:
    """Replace the state of all ranks' optimizers by rank 0's if one has loaded another. Collective."""
    file = io.BytesIO()
    call_on_all(world, lambda: save_state(_optimizer_owner(optimizer), optimizer.state_dict()["state"], file))
    if len(set(world.transport.allgather(zlib.crc32(file.getbuffer())))) > 1:
        broadcast_optimizer_state(p2p, 0, range(len(world.nodes)), optimizer)


def _optimizer_owner(optimizer: Any) -> str:
    return f"the optimizer {type(optimizer).__name__}"


def broadcast_untrained(world: World, p2p: MeteredP2P, model: Any, trained_ids: set[int]) -> None:
    """Replace untrained parameters and buffers of all ranks by rank 0's. Collective."""
    import torch

    tensors = list(untrained_tensors(model, trained_ids).values())
    if not tensors:
        return
    packed = torch.cat([tensor_bytes(tensor) for tensor in tensors])
    broadcast_if_different(world, p2p, packed.numpy())
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    with torch.no_grad():
        for tensor, data in zip(tensors, packed.split(sizes), strict=True):
            tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))


def unify_buffers(world: World, p2p: MeteredP2P, model: Any, weight: float) -> None:
    """Replace buffers that differ between the workers, e.g. BatchNorm statistics, by their weighted mean. Collective.

    Buffers without floating point, e.g. counters, become those of the first worker. Buffers that are not in a state
    dict, or of different shapes, remain local. `weight` is this model's share of the mean.
    """
    import torch

    workers, saved = world.alive_with_role("worker"), set(model.state_dict())
    buffers = {} if world.is_server else {name: buffer for name, buffer in model.named_buffers() if name in saved}
    described = world.transport.allgather({
        name: (str(buffer.dtype), tuple(buffer.shape), zlib.crc32(tensor_bytes(buffer.detach()).numpy()))
        for name, buffer in buffers.items()})
    differing = []
    for name, buffer in buffers.items():
        entries = [described[worker].get(name, ()) for worker in workers]
        if len(set(entries)) > 1 == len({entry[:2] for entry in entries}):
            differing.append(buffer)
    with torch.no_grad():
        floating = [buffer for buffer in differing if buffer.is_floating_point()]
        if floating:
            mean = torch.cat([buffer.reshape(-1).float().cpu() for buffer in floating]) * weight
            AllreduceOp(p2p, [workers], mean.numpy()).run()
            for buffer, part in zip(floating, mean.split([buffer.numel() for buffer in floating]), strict=True):
                buffer.copy_(part.view(buffer.shape))
        for buffer in differing:
            if not buffer.is_floating_point():
                data = tensor_bytes(buffer).clone()
                pipelined_broadcast(p2p, workers, data.numpy())
                buffer.copy_(data.view(buffer.dtype).view(buffer.shape))


def tensor_bytes(tensor: Any) -> Any:
    """Bytes of a tensor that needs no gradient, as a torch tensor on the host."""
    import torch

    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def untrained_tensors(model: Any, trained_ids: set[int]) -> dict[str, Any]:
    """Untrained parameters and buffers, by name."""
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if id(tensor) not in trained_ids}


def reject_ddp(tensors: Iterable[Any]) -> None:
    """Reject parameters whose gradients DistributedDataParallel averages, too."""
    if find_ddp(tensors):
        raise InvalidRunError("wrap(): DistributedDataParallel averages the gradients of this model, too; expected a "
                              "model without it, as run.wrap() exchanges gradients or models itself")


def trained_parameter_ids(model: Any, optimizer: Any) -> set[int]:
    """Ids of the trained parameters."""
    reject_ddp(model.parameters())
    model_ids = {id(tensor) for tensor in model.parameters()}
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for tensor in tensors:
        if id(tensor) not in model_ids:
            raise TrainError(f"the optimizer trains a tensor of shape {tuple(tensor.shape)} that is no parameter of "
                             "the model; expected one model that holds all (torch.nn.ModuleList)")
    return {id(tensor) for tensor in tensors if tensor.requires_grad}


def _reject_unsupported(model: Any, optimizer: Any) -> None:
    """Reject parameters and buffers that are not dense tensors with memory of their own, and what shards them."""
    import torch

    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise TrainError("wrap(): FullyShardedDataParallel distributes the model over ranks; expected a model on "
                         "each rank, or fully_shard() and slurmdl.train.sync_islands(model, optimizer, group)")
    if hasattr(optimizer, "consolidate_state_dict"):
        raise TrainError(f"wrap(): {type(optimizer).__name__} distributes its state over ranks; expected the "
                         "optimizer that it wraps")
    optimized_ids = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    tensors = [*((f"parameter {name}", tensor) for name, tensor in model.named_parameters()),
               *((f"buffer {name}", tensor) for name, tensor in model.named_buffers())]
    for name, tensor in tensors:
        if hasattr(tensor, "materialize"):
            raise TrainError(f"{name} has no shape yet; expected a first forward pass of the model before wrap()")
        if hasattr(tensor, "placements"):
            raise TrainError(f"{name} is a DTensor, which fully_shard or tensor parallelism distributes over ranks; "
                             "expected a model on each rank, or slurmdl.train.sync_islands(model, optimizer, group), "
                             "which exchanges models between groups of ranks")
        if tensor.layout != torch.strided:
            raise TrainError(f"{name} is sparse ({str(tensor.layout).removeprefix('torch.')}); expected a dense one "
                             "(to_dense()), or an attribute of the module that is not registered")
        if id(tensor) not in optimized_ids and any(
                size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise TrainError(f"{name} is expanded, so that elements share their memory; expected a copy (clone())")


def model_signature(model: Any, optimizer: Any) -> list[tuple[str, str]]:
    """Properties of model and optimizer that must match on all ranks, by name; devices may differ."""
    import torch

    call = f"wrap({type(model).__name__}, {type(optimizer).__name__})"
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        inner = next((f", as its attribute {name}" for name, value in getattr(optimizer, "__dict__", {}).items()
                      if isinstance(value, torch.optim.Optimizer)), "")
        raise TrainError(f"{call}: expected a torch.nn.Module and a torch.optim.Optimizer{inner}")
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise TrainError(f"{call}: {type(optimizer).__name__} has no param_groups or no state; expected "
                         "super().__init__(), or those of the optimizer that it wraps")
    optimizer_hooks.complete(optimizer)
    _reject_unsupported(model, optimizer)
    tensors = [*((f"parameter {name}", tensor) for name, tensor in model.named_parameters()),
               *((f"buffer {name}", tensor) for name, tensor in model.named_buffers())]
    return [*((name, f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
               f"{'' if tensor.is_contiguous() else f' strides {tensor.stride()}'}"
               f"{' trained' if tensor.requires_grad else ''}") for name, tensor in tensors),
            ("optimizer", type(optimizer).__name__),
            *((f"{key} of parameter group {index}", str(value)) for index, key, value in
              shard_optimizer.hyperparameter_entries(optimizer))]


def find_ddp(tensors: Iterable[Any]) -> list[Any]:
    """All DistributedDataParallel that average gradients of these parameters, whichever module the caller has.

    It may be the model, inside of it (torch.compile), or around it (the caller has `ddp.module`).
    """
    distributed = sys.modules.get("torch.distributed")
    if not distributed or not distributed.is_available() or not distributed.is_initialized():
        return []
    from torch.nn.parallel import DistributedDataParallel

    gc.collect()  # not one that the script has dropped
    ids = {id(tensor) for tensor in tensors}
    # not isinstance, which runs code of proxy objects
    return [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)
            and any(id(tensor) in ids for tensor in found.module.parameters())]
