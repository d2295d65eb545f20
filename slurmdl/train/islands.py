"""Islands of a script on torch.distributed: groups of ranks that DistributedDataParallel or FSDP2 keeps together.

A communication hook averages gradients, compressed between islands::

    from slurmdl.train import HierarchicalState, hierarchical_hook

    model = DistributedDataParallel(network)
    model.register_comm_hook(HierarchicalState(group, "int8"), hierarchical_hook)     # on all ranks

Or islands exchange models::

    from slurmdl.train import sync_islands

    model = DistributedDataParallel(network, process_group=group)      # or fully_shard(network, mesh=mesh["fsdp"])
    sync = sync_islands(model, optimizer, group)                        # on all ranks
    ...                                                                 # training
    sync.finish()                                                       # the mean of all islands
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pickle import UnpicklingError
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from slurmdl.comm_layout import COMPRESSION_NAMES
from slurmdl.errors import InvalidOptionsError, InvalidRunError, TrainError, UnavailableError, warn
from slurmdl.plan import default_pattern
from slurmdl.train import optimizer_hooks
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.library import consistency, startup
from slurmdl.train.library.checkpoint import save_state
from slurmdl.train.library.consistency import find_ddp
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.strategies.islands import OUTER_STRATEGIES
from slurmdl.train.strategies.local_sgd import make_reducer
from slurmdl.train.strategies.strategy import DeviceCopies, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig, check_compatibility, resolve, run_options
from slurmdl.train.transports.torch_distributed import TorchTransport, collective_timeout
from slurmdl.train.transports.transport import Tag
from slurmdl.train.world import message_levels, node_name, zone_path


class IslandGroup:
    """This rank's island and its messages to others. Collective over all ranks.

    Raises UnavailableError without torch.distributed, and InvalidRunError on all ranks unless the groups have the
    same size, each rank is in one of them, and `contents` of the ranks at the same position are equal.

    Args:
        caller: function that the user called, for errors.
        group: process group of this rank's island.
        contents: description of what this rank exchanges with its peers.
        expected: what makes the contents equal, for errors.

    Attributes:
        islands: global ranks of each island, in the order of their first ranks.
        group: process group of this rank's island.
        position: this rank's index in its island.
        size: ranks of an island.
        peers: the ranks at this position in all islands.
        p2p: messages of this rank; `p2p.bytes_sent` counts their bytes by distance.
        comm_thread: thread that exchanges messages.
    """

    def __init__(self, caller: str, group: Any, contents: object, expected: str) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise UnavailableError(f"{caller}(): torch.distributed is not initialized; expected init_process_group() "
                                   "before")
        # a group of its own: the messages of the framework stay as they are, and gloo leaves GPUs alone
        limit_s = run_options(os.environ).timeout
        self._transport = TorchTransport(dist.new_group(timeout=collective_timeout(limit_s), backend="gloo"))
        startup.watch_waits(self._transport, limit_s)
        self.group, own_ranks = group, tuple(dist.get_process_group_ranks(group))
        places = self._transport.allgather((own_ranks, contents, node_name(), "".join(zone_path()[-1:])))
        self.islands = _islands(caller, [place[0] for place in places])
        self.position, self.size = own_ranks.index(self._transport.rank), len(own_ranks)
        self.peers = tuple(island[self.position] for island in self.islands)
        for peer in self.peers:
            if places[peer][1] != places[self.peers[0]][1]:
                raise InvalidRunError(f"{caller}(): ranks {self.peers[0]} and {peer} do not exchange the same; "
                                      f"expected {expected}")
        self._nodes, self._zones = (tuple(place[index] for place in places) for index in (2, 3))
        self.p2p = MeteredP2P(self._transport, message_levels(self._transport.rank, self._nodes, self._zones))
        self.comm_thread = CommThread(True)

    def context(self, vector: npt.NDArray[np.float32], config: StrategyConfig, seed: int,
                learning_rate: Callable[[], float] = float, device_copies: DeviceCopies | None = None,
                ) -> StrategyContext:
        """Context of exchanges of `vector`, shape (elements,), with the peers."""
        return StrategyContext(
            self.p2p, self.comm_thread, self.peers, (), vector, np.empty(0, np.float32), (vector.size,), config, seed,
            self._nodes, self._zones, {}, learning_rate, _no_servers, device_copies=device_copies or DeviceCopies())

    def gather(self, part: Any) -> Any:
        """Concatenate the parts of the island's ranks, one-dimensional tensors of equal size. Collective in it."""
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.clone(), group=self.group)
        return torch.cat(parts)

    def close(self) -> None:
        """End the exchanges. Collective over all ranks."""
        self.comm_thread.close()
        self._transport.close()


def _islands(caller: str, group_of_rank: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The distinct groups, in the order of their first ranks.

    Raises InvalidRunError unless they have the same size, and each rank is in one of them.
    """
    islands = sorted(set(group_of_rank))
    members = sorted(rank for island in islands for rank in island)
    if members != list(range(len(group_of_rank))) or len({len(island) for island in islands}) != 1:
        raise InvalidRunError(f"{caller}(): groups of the ranks {', '.join(map(str, islands))}; expected groups of "
                              f"equal size that divide the ranks 0 to {len(group_of_rank) - 1}")
    return islands


def _no_servers(part: slice) -> NoReturn:
    raise TrainError("these exchanges have no parameter servers")


Vector = npt.NDArray[np.float32]


# without annotations, since DistributedDataParallel rejects those that are strings
def hierarchical_hook(state, bucket):  # type: ignore[no-untyped-def]
    """Average a bucket of gradients over all ranks: the communication hook of DistributedDataParallel.

    The ranks of an island average a bucket, each exchanges a shard of it with its peers in the other islands, and the
    island gathers the shards. Buckets overlap with the backward pass, one after the other. Returns the future that
    `register_comm_hook` expects. Raises TrainError if the gradients are not on the CPU.

    Args:
        state: a HierarchicalState.
        bucket: a torch.distributed.GradBucket.

    Reference: PyTorch documentation, "DDP communication hooks".
    """
    import torch

    future, buffer, index = torch.futures.Future(), bucket.buffer(), bucket.index()
    if buffer.device.type != "cpu":
        raise TrainError(f"hierarchical_hook: gradients on {buffer.device}; expected a model on the CPU")

    def average() -> None:
        try:
            state.average(index, buffer)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(buffer)

    state.islands.comm_thread.submit(average)
    return future


class HierarchicalState:
    """State of `hierarchical_hook` on one rank. Collective over all ranks.

    The compression error of a shard is added to its next gradient (error feedback), so it is delayed, not lost. When
    DistributedDataParallel rebuilds its buckets after the first step, the errors of that step are dropped.

    Raises UnavailableError without torch.distributed, InvalidOptionsError for an unknown compression, InvalidRunError
    on all ranks if the groups do not fit.

    Args:
        group: process group of this rank's island, e.g. the ranks of a zone; all islands have the same size.
        compression: of messages between islands, a name of `slurmdl train --compression`.
        seed: of stochastic rounding.

    Attributes:
        islands: the groups; `islands.p2p.bytes_sent` counts the bytes between islands by distance.
    """

    def __init__(self, group: Any, compression: str = "int8", seed: int = 1) -> None:
        if compression not in COMPRESSION_NAMES:
            raise InvalidOptionsError(f"HierarchicalState(): compression {compression!r}; expected one of "
                                      f"{', '.join(COMPRESSION_NAMES)}")
        self.islands = IslandGroup("HierarchicalState", group, compression,
                                   "the same compression on all ranks")
        self._config = StrategyConfig("local-sgd", "ring", compression=compression)
        self._seed = seed
        #: index and size of a bucket -> its shard of this rank
        self._shards: dict[tuple[int, int], _Shard] = {}

    def average(self, index: int, buffer: Any) -> None:
        """Replace a bucket, a one-dimensional tensor on the CPU, by its mean over all ranks. Collective."""
        import torch
        import torch.distributed as dist

        islands, key = self.islands, (index, buffer.numel())
        if islands.size > 1:
            dist.all_reduce(buffer, group=islands.group)
            buffer /= islands.size
        if len(islands.peers) == 1:
            return
        if key not in self._shards:
            for old in [other for other in self._shards if other[0] == index]:
                del self._shards[old]
            self._shards[key] = _Shard(islands, buffer.numel(), self._config, self._seed + index)
        mean = torch.from_numpy(self._shards[key].average(buffer.float().numpy()))
        if islands.size > 1:
            mean = islands.gather(mean)
        buffer.copy_(mean[:buffer.numel()])

    def close(self) -> None:
        """End the hook's thread, after the last backward pass. Collective over all ranks."""
        self.islands.close()


class _Shard:
    """The part of a bucket that this rank averages with its peers, with the error of its compression."""

    def __init__(self, islands: IslandGroup, elements: int, config: StrategyConfig, seed: int) -> None:
        size = -(-elements // islands.size)
        self._p2p, self._steps = islands.p2p, 0
        self._slice = slice(islands.position * size, (islands.position + 1) * size)
        self._vector, self._residual = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._decay = np.float32(COMPRESSORS[config.compression].feedback_decay)
        ctx = islands.context(self._vector, config, seed)
        self._weights = (1.0,) * len(ctx.workers)
        self._reducer = make_reducer(ctx)

    def average(self, bucket: Vector) -> Vector:
        """Return the mean of this shard of the bucket over the peers."""
        part = bucket[self._slice]
        self._vector[:part.size] = part
        self._vector += self._decay * self._residual
        self._p2p.run_to_completion(self._reducer.reduce(self._vector, self._steps, self._weights, Tag.STEP))
        np.subtract(self._vector, self._reducer.contribution, out=self._residual)
        self._vector[part.size:] = 0
        self._steps += 1
        return self._reducer.mean


_STRATEGIES = ("local-sgd", "gossip")


def sync_islands(model: Any, optimizer: Any, group: Any, config: StrategyConfig | None = None, *,
                 seed: int = 1) -> IslandSync:
    """Exchange the models of islands from now on, after steps of the optimizer. Collective over all ranks.

    An island is the group of ranks that DistributedDataParallel or FSDP2 keeps together, so that their models are
    equal or shards of one. All islands have the same number of ranks, and each rank exchanges a shard of the model
    with the ranks at its position in the other islands: FSDP2's own shards, or with DistributedDataParallel an equal
    part of the parameters, after which its group gathers the parts. All islands start with the model of the first
    one. A DistributedDataParallel of all ranks gets a communication hook that averages gradients in the island only.
    Buffers, e.g. BatchNorm statistics, and the optimizers' states remain local to an island.

    All ranks make the same number of optimizer steps. A step that a torch.amp.GradScaler skips, perhaps on one island
    only, counts as a step without a change.

    Raises UnavailableError without torch.distributed, and InvalidOptionsError, InvalidRunError or TrainError on all
    ranks if the strategy, the groups or the model do not fit.

    Args:
        model: a DistributedDataParallel, or a model after `fully_shard`.
        optimizer: of the model's parameters.
        group: process group of this rank's island.
        config: strategy local-sgd (default) or gossip; None: from the variables SLURMDL_TRAIN_*.
        seed: of random partners and of compression.
    """
    return IslandSync(model, optimizer, group, config or resolve({}, os.environ), seed)


class IslandSync:
    """One rank's part in the exchanges.

    Attributes:
        islands: global ranks of each island, in the order of their first ranks.
        is_sharded: whether each rank holds a shard of its island's model.
        strategy: the exchanges of this rank's part of the model.
        p2p: its messages; `p2p.bytes_sent` counts their bytes by distance.
    """

    def __init__(self, model: Any, optimizer: Any, group: Any, config: StrategyConfig, seed: int) -> None:
        config = _checked_config(config)
        tensors = [tensor for group_ in optimizer.param_groups for tensor in group_["params"] if tensor.requires_grad]
        self.is_sharded = any(_is_sharded(tensor) for tensor in tensors)
        self._islands = islands = IslandGroup(
            "sync_islands", group, (self.is_sharded, [_local(tensor).numel() for tensor in tensors]),
            "the same model, sharded in the same way, in each island")
        self.islands, self.p2p = islands.islands, islands.p2p
        self._ddp = find_ddp(tensors)
        for ddp in self._ddp:
            _average_gradients_inside(ddp, islands)
        self._part = _ModelPart(tensors, islands, self.is_sharded)
        self._part.copy_to_host()
        vector = self._part.vector
        islands.comm_thread.call(lambda: consistency.pipelined_broadcast(self.p2p, islands.peers, vector))
        self._part.copy_to_device()
        self.strategy = OUTER_STRATEGIES[config.strategy or ""](islands.context(
            vector, config, seed, lambda: float(optimizer.param_groups[0]["lr"]), self._part))
        self._step = 0
        self._tensors, self._skipped_gradients = tensors, list[Any]()
        self._remove_hooks = optimizer_hooks.install(optimizer, self._before_step, lambda *_: self._after_step())

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._step and len(find_ddp(self._tensors)) > len(self._ddp):
            raise InvalidRunError("sync_islands(): a DistributedDataParallel was made of the model afterwards; "
                                  "expected it before sync_islands()")
        if optimizer_hooks.apply_grad_scaler(optimizer, self._tensors):
            self._skipped_gradients = optimizer_hooks.stash_gradients(self._tensors)

    def _after_step(self) -> None:
        if self._skipped_gradients:
            optimizer_hooks.restore_gradients(self._tensors, self._skipped_gradients)
            self._skipped_gradients = []
        self.strategy.after_optimizer_step(self._step)
        self._step += 1

    def state_dict(self) -> dict[str, bytes]:
        """State of this rank's exchanges, without model and optimizer, between two steps. Collective over all ranks.

        The key is the rank in the island: torch.distributed.checkpoint saves each island in a directory of its own,
        as models of islands differ.
        """
        self.strategy.drain(self._step)
        buffer = io.BytesIO()
        save_state("sync_islands()", {"step": self._step, "strategy": self.strategy.state_dict(),
                               "rounding": self._part.rounding}, buffer)
        return {self._state_key: buffer.getvalue()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue after a saved step, in place of the first one; model and optimizer are loaded by the caller.

        Raises InvalidRunError if the state is not one of this rank of an island, with the same options.
        """
        import torch

        try:
            saved = torch.load(io.BytesIO(state[self._state_key]), weights_only=True)
            self.strategy.load_state_dict(saved["strategy"])
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, EOFError, UnpicklingError) as error:
            raise InvalidRunError(f"sync_islands(): the state has no exchanges of {self._state_key} with this "
                                  "strategy and model; expected a state of the same island and options") from error
        self._step, self._part.rounding = saved["step"], saved["rounding"]

    @property
    def _state_key(self) -> str:
        return f"rank {self._islands.position}"

    def finish(self) -> None:
        """Replace the models of all islands by their mean, after the last step. Collective over all ranks."""
        if not self._step and self.p2p.rank == 0 and any(tensor.grad is not None for tensor in self._tensors):
            warn("train: the model has gradients, but no step was made; expected steps of the optimizer that "
                 "sync_islands() got")
        self._remove_hooks()
        self.strategy.finish()
        self._part.copy_to_host()
        peers = self._islands.peers
        self._islands.comm_thread.call(lambda: consistency.average_models(
            self.p2p, peers, self._part.vector, 1 / len(peers)))
        self._part.copy_to_device()
        self._islands.close()


class _ModelPart(DeviceCopies):
    """The part of the model that this rank exchanges, as a vector in host memory.

    Attributes:
        vector: shape (elements,), float32: this rank's shards, or its part of all parameters, padded with zeros.
        rounding: shape (elements,), float32: what the vector has beyond parameters of a lower precision, which is
            added when they are read again; None for float32.
    """

    def __init__(self, tensors: list[Any], islands: IslandGroup, is_sharded: bool) -> None:
        self._tensors, self._islands, self._is_sharded = tensors, islands, is_sharded
        total = sum(_local(tensor).numel() for tensor in tensors)
        size = total if is_sharded else -(-total // islands.size)
        self._slice = slice(islands.position * size, (islands.position + 1) * size)
        self.vector = np.zeros(size, np.float32)
        self.rounding: Any = None

    def _own_part(self) -> Any:
        """This rank's part of the parameters, as a float32 tensor on the host."""
        import torch

        with torch.no_grad():
            flat = torch.cat([_local(tensor).reshape(-1).float() for tensor in self._tensors])
            return (flat if self._is_sharded else flat[self._slice]).cpu()

    def copy_to_host(self) -> None:
        part = self._own_part()
        self.vector[:part.numel()] = part.numpy()
        if self.rounding is not None:
            self.vector += self.rounding.numpy()

    def copy_to_device(self) -> None:
        import torch

        with torch.no_grad():
            part = torch.from_numpy(self.vector).to(_local(self._tensors[0]).device)
            if not self._is_sharded:
                part = self._islands.gather(part)
            begin = 0
            for tensor in map(_local, self._tensors):
                tensor.copy_(part[begin:begin + tensor.numel()].view(tensor.shape))
                begin += tensor.numel()
        if any(tensor.dtype != torch.float32 for tensor in self._tensors):
            own = self._own_part()
            self.rounding = torch.zeros(self.vector.size)
            self.rounding[:own.numel()] = torch.from_numpy(self.vector[:own.numel()]) - own


def _checked_config(config: StrategyConfig) -> StrategyConfig:
    strategy = config.strategy or "local-sgd"
    if strategy not in _STRATEGIES:
        raise InvalidOptionsError(f"sync_islands(): strategy {strategy}; expected {' or '.join(_STRATEGIES)}, since "
                                  "no rank sees the whole model")
    config = replace(config, strategy=strategy, islands="zone",
                     comm_pattern=config.comm_pattern or default_pattern(strategy, False))
    check_compatibility(config)
    return config


def _average_gradients_inside(model: Any, islands: IslandGroup) -> None:
    """Make a DistributedDataParallel of more ranks than an island average its gradients in the island only."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    own, averaged = (set(dist.get_process_group_ranks(group)) for group in (islands.group, model.process_group))
    if not own <= averaged:
        raise InvalidRunError(f"sync_islands(): the model averages gradients over the ranks {sorted(averaged)}; "
                              f"expected the ranks of the island {sorted(own)}, or all ranks")
    if own < averaged:
        try:
            model.register_comm_hook(islands.group, default_hooks.allreduce_hook)
        except RuntimeError as error:
            raise InvalidRunError("sync_islands(): the model has a communication hook already; expected "
                                  "DistributedDataParallel(..., process_group=group)") from error


def _is_sharded(tensor: Any) -> bool:
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def _local(tensor: Any) -> Any:
    """This rank's part of a parameter."""
    return optimizer_hooks.local_part(tensor).detach()
