"""Hierarchical allreduce for DistributedDataParallel, compressed between islands: a communication hook.

    from slurmdl.train import HierarchicalState, hierarchical_hook

    model = DistributedDataParallel(network)
    model.register_comm_hook(HierarchicalState(group, "int8"), hierarchical_hook)     # on all ranks
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.comm_layout import COMPRESSION_NAMES
from slurmdl.errors import InvalidOptionsError, TrainError
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.island_group import IslandGroup
from slurmdl.train.strategies.local_sgd import make_reducer
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.transport import Tag

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
