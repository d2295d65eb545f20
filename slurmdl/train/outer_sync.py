"""Exchanges of models between islands that another framework keeps together: DistributedDataParallel or FSDP2.

    from slurmdl.train import outer

    model = DistributedDataParallel(network, process_group=group)      # or fully_shard(network, mesh=mesh["fsdp"])
    sync = outer(model, optimizer, group)                               # on all ranks
    ...                                                                 # training
    sync.finish()                                                       # the mean of all islands
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from slurmdl.errors import InvalidOptionsError, InvalidRunError, TrainError, UnavailableError
from slurmdl.plan import default_pattern
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.compatibility import check_compatibility
from slurmdl.train.library import consistency, shutdown
from slurmdl.train.library.startup import DEFAULT_TIMEOUT_S
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies.islands import OUTER_STRATEGIES
from slurmdl.train.strategies.strategy import DeviceCopies, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig, resolve
from slurmdl.train.transports.torch_distributed import TorchTransport
from slurmdl.train.transports.watchdog import Watchdog
from slurmdl.train.world import message_levels, node_name, zone_path

_STRATEGIES = ("local-sgd", "gossip")


def outer(model: Any, optimizer: Any, group: Any, config: StrategyConfig | None = None, *,
          seed: int = 1) -> OuterSync:
    """Exchange the models of islands from now on, after steps of the optimizer. Collective over all ranks.

    An island is the group of ranks that DistributedDataParallel or FSDP2 keeps together, so that their models are
    equal or shards of one. All islands have the same number of ranks, and each rank exchanges a shard of the model
    with the ranks at its position in the other islands: FSDP2's own shards, or with DistributedDataParallel an equal
    part of the parameters, after which its group gathers the parts. All islands start with the model of the first
    one. Buffers, e.g. BatchNorm statistics, and the optimizers' states remain local to an island.

    All ranks make the same number of optimizer steps. A torch.amp.GradScaler may skip a step on one island only, and
    the others would wait; use bfloat16.

    Raises UnavailableError without torch.distributed, and InvalidOptionsError, InvalidRunError or TrainError on all
    ranks if the strategy, the groups or the model do not fit.

    Args:
        model: a DistributedDataParallel, or a model after `fully_shard`.
        optimizer: of the model's parameters.
        group: process group of this rank's island.
        config: strategy local-sgd (default) or gossip, with a period; None: from the variables SLURMDL_TRAIN_*.
        seed: of random partners and of compression.
    """
    return OuterSync(model, optimizer, group, config or resolve({}, os.environ), seed)


class OuterSync:
    """One rank's part in the exchanges.

    Attributes:
        islands: global ranks of each island, in the order of their first ranks.
        is_sharded: whether each rank holds a shard of its island's model.
        strategy: the exchanges of this rank's part of the model.
        p2p: its messages; `p2p.bytes_sent` counts their bytes by distance.
    """

    def __init__(self, model: Any, optimizer: Any, group: Any, config: StrategyConfig, seed: int) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise UnavailableError("outer(): torch.distributed is not initialized; expected init_process_group() "
                                   "before")
        config = _checked_config(config)
        # a group of its own: the messages of the framework stay as they are, and gloo leaves GPUs alone
        self._transport = TorchTransport(dist.new_group(backend="gloo"))
        self._transport.watch(Watchdog(self._transport, DEFAULT_TIMEOUT_S),
                              lambda error: shutdown.exit_process(shutdown.report_failure(error)))
        tensors = [tensor for group_ in optimizer.param_groups for tensor in group_["params"] if tensor.requires_grad]
        self._group, own_ranks = group, tuple(dist.get_process_group_ranks(group))
        self.is_sharded = any(_is_sharded(tensor) for tensor in tensors)
        local = [_local(tensor).numel() for tensor in tensors]
        places = self._transport.allgather((own_ranks, self.is_sharded, local, node_name(),
                                            "".join(zone_path()[-1:])))
        self.islands = _islands([place[0] for place in places])
        position = own_ranks.index(self._transport.rank)
        peers = tuple(island[position] for island in self.islands)
        for peer in peers:
            if places[peer][1:3] != places[peers[0]][1:3]:
                raise InvalidRunError(f"outer(): ranks {peers[0]} and {peer} hold different parts of the model; "
                                      "expected the same model, sharded in the same way, in each island")
        self._part = _ModelPart(tensors, group, position, len(own_ranks), self.is_sharded)
        nodes, zones = (tuple(place[index] for place in places) for index in (3, 4))
        self.p2p = MeteredP2P(self._transport, message_levels(self._transport.rank, nodes, zones))
        self._peers = peers
        self._comm_thread = CommThread(True)
        self._part.copy_to_host()
        self._comm_thread.call(lambda: consistency.pipelined_broadcast(self.p2p, peers, self._part.vector))
        self._part.copy_to_device()
        vector = self._part.vector
        self.strategy = OUTER_STRATEGIES[config.strategy or ""](StrategyContext(
            self.p2p, self._comm_thread, peers, (), vector, np.empty(0, np.float32), (vector.size,), config, seed,
            nodes, zones, {}, lambda: float(optimizer.param_groups[0]["lr"]), _no_servers, device_copies=self._part))
        self._step = 0
        self._hook = optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        self.strategy.after_optimizer_step(self._step)
        self._step += 1

    def finish(self) -> None:
        """Replace the models of all islands by their mean, after the last step. Collective over all ranks."""
        self._hook.remove()
        self.strategy.finish()
        self._part.copy_to_host()
        self._comm_thread.call(lambda: consistency.average_models(
            self.p2p, self._peers, self._part.vector, 1 / len(self._peers)))
        self._part.copy_to_device()
        self._comm_thread.close()
        self._transport.close()


class _ModelPart(DeviceCopies):
    """The part of the model that this rank exchanges, as a vector in host memory.

    Attributes:
        vector: shape (elements,), float32: this rank's shards, or its part of all parameters, padded with zeros.
    """

    def __init__(self, tensors: list[Any], group: Any, position: int, count: int, is_sharded: bool) -> None:
        self._tensors, self._group, self._is_sharded = tensors, group, is_sharded
        total = sum(_local(tensor).numel() for tensor in tensors)
        size = total if is_sharded else -(-total // count)
        self._slice, self._count = slice(position * size, (position + 1) * size), count
        self.vector = np.zeros(size, np.float32)

    def copy_to_host(self) -> None:
        import torch

        with torch.no_grad():
            flat = torch.cat([_local(tensor).reshape(-1).float() for tensor in self._tensors])
            part = flat if self._is_sharded else flat[self._slice]
            self.vector[:part.numel()] = part.cpu().numpy()

    def copy_to_device(self) -> None:
        import torch
        import torch.distributed as dist

        with torch.no_grad():
            part = torch.from_numpy(self.vector).to(_local(self._tensors[0]).device)
            if not self._is_sharded:
                parts = [torch.empty_like(part) for _ in range(self._count)]
                dist.all_gather(parts, part.clone(), group=self._group)
                part = torch.cat(parts)
            begin = 0
            for tensor in map(_local, self._tensors):
                tensor.copy_(part[begin:begin + tensor.numel()].view(tensor.shape))
                begin += tensor.numel()


def _checked_config(config: StrategyConfig) -> StrategyConfig:
    strategy = config.strategy or "local-sgd"
    if strategy not in _STRATEGIES or config.trigger_name != "period":
        raise InvalidOptionsError(f"outer(): strategy {strategy}, trigger {config.trigger_name}; expected "
                                  f"{' or '.join(_STRATEGIES)} with a period, since no rank sees the whole model")
    config = replace(config, strategy=strategy, inside="zone",
                     comm_pattern=config.comm_pattern or default_pattern(strategy, False))
    check_compatibility(config)
    return config


def _islands(group_of_rank: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The distinct groups, in the order of their first ranks.

    Raises InvalidRunError unless they have the same size, and each rank is in one of them.
    """
    islands = sorted(set(group_of_rank))
    members = sorted(rank for island in islands for rank in island)
    if members != list(range(len(group_of_rank))) or len({len(island) for island in islands}) != 1:
        raise InvalidRunError(f"outer(): groups of the ranks {', '.join(map(str, islands))}; expected groups of "
                              f"equal size that divide the ranks 0 to {len(group_of_rank) - 1}")
    return islands


def _is_sharded(tensor: Any) -> bool:
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def _local(tensor: Any) -> Any:
    """This rank's part of a parameter."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _no_servers(part: slice) -> NoReturn:
    raise TrainError("outer() has no parameter servers")
