"""Allreduce on the GPUs of the ranks, by collectives of torch.distributed; allreduce.Allreduce for other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np

from slurmdl import comm_layout
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.process_group import collective_timeout
from slurmdl.train.side_stream import SideStream
from slurmdl.train.strategies.allreduce import Allreduce
from slurmdl.train.strategies.strategy import Strategy, StrategyContext
from slurmdl.train.tags import Tag
from slurmdl.train.transports.torch_distributed import naming_lost_rank


def make_allreduce(ctx: StrategyContext) -> Strategy:
    """Allreduce where the gradients are: on the GPUs if `ctx.device_gradients` is set, else on the host.

    The gradients of an only worker are the mean, wherever they are.
    """
    return Allreduce(ctx) if ctx.device_gradients is None or len(ctx.workers) == 1 else DeviceAllreduce(ctx)


class DeviceAllreduce(Strategy):
    """As allreduce.Allreduce of several workers, but the gradients stay on the GPU.

    In each step every worker also sends an empty message to the next one. By these messages the watchdog knows on
    whom a rank waits, a worker that has ended detects that others continue, and waiting is measured. NCCL does none
    of this.
    """

    averages_gradients = identical_at_end = overlaps_backward = True

    def __init__(self, ctx: StrategyContext) -> None:
        super().__init__(ctx)
        self._mean = DeviceMean(ctx.device_gradients, ctx.p2p, ctx.allreduce_groups, ctx.device_backend)
        multiple = self._mean.shards
        starts = [start // multiple * multiple for start in comm_layout.bucket_starts(ctx.parameters.size)]
        self._buckets = [slice(*bounds) for bounds in pairwise([*starts, ctx.parameters.size])][::-1]
        self._num_started = 0
        self._token: Future[Any] | None = None

    def on_gradients_ready(self, start: int) -> bool:
        while self._num_started < len(self._buckets) and self._buckets[self._num_started].start >= start:
            self._token = self._token or self._ctx.comm_thread.submit(self._exchange_token)
            self._mean.start(self._buckets[self._num_started])
            self._num_started += 1
        return self._num_started > 0

    def _exchange_token(self) -> None:
        workers, position, empty = self._ctx.workers, self._ctx.worker_rank, np.empty(0, np.uint8)
        self._ctx.p2p.exchange([(workers[(position + 1) % len(workers)], empty)], [(workers[position - 1], empty)],
                               Tag.STEP)

    def before_optimizer_step(self, step: int, skip_update: bool = False) -> None:
        self.on_gradients_ready(0)
        assert self._token
        self._ctx.comm_thread.wait(self._token)
        self._mean.wait()
        self._num_started, self._token = 0, None
        self.exchanges += 1


class DeviceMean:
    """Replaces slices of a tensor by their mean over the ranks of all groups, bitwise equal on all of them.

    If the groups have the same size, this is a reduce-scatter in each group, an allreduce of each shard between the
    groups, and an allgather in each group, as in collectives.AllreduceOp; else one allreduce of all ranks. On a GPU
    the collectives run in the order of the calls, on a stream of their own. Values are added in float32. Collective.

    Args:
        vector: one-dimensional, equally long on all ranks.
        p2p: counts the bytes, as those of rings in the order of the ranks; NCCL may choose another algorithm.
        groups: disjoint groups of ranks; the same on every rank.
        backend: of torch.distributed, for tensors on this device.

    Attributes:
        shards: slices that begin at multiples of this number are fastest.
    """

    def __init__(self, vector: Any, p2p: MeteredP2P, groups: Sequence[Sequence[int]], backend: str) -> None:
        from torch import distributed

        self._distributed, self._vector, self._p2p = distributed, vector, p2p
        watchdog = p2p.transport.watchdog
        timeout = collective_timeout(watchdog.limit_s if watchdog else 0.0)

        def new_group(ranks: Sequence[int]) -> tuple[Any, Sequence[int]]:
            return distributed.new_group(list(ranks), timeout, backend, use_local_synchronization=True), ranks

        own = next(group for group in groups if p2p.rank in group)
        everyone = sorted(rank for group in groups for rank in group)
        self._count = len(everyone)
        self.shards = len(own) if len(groups) > 1 and len({len(group) for group in groups}) == 1 else 1
        self._all = new_group(everyone)
        if self.shards > 1:
            self._inside = new_group(own)
            self._between = new_group([group[own.index(p2p.rank)] for group in groups])
        self._stream = SideStream(vector.device)

    def start(self, part: slice) -> None:
        """Replace a slice by its mean, after the work that the current stream has queued so far."""
        with self._stream.use(), naming_lost_rank():
            values = self._vector[part]
            total = values.float()  # the same tensor if it is float32
            whole = total.numel() // self.shards * self.shards if self.shards > 1 else 0
            if whole:
                shard = total.new_empty(whole // self.shards)
                self._call(self._distributed.reduce_scatter_tensor, shard, total[:whole], group=self._inside)
                self._call(self._distributed.all_reduce, shard, group=self._between)
                self._call(self._distributed.all_gather_into_tensor, total[:whole], shard, group=self._inside)
            if whole < total.numel():
                self._call(self._distributed.all_reduce, total[whole:], group=self._all)
            total /= self._count
            if total is not values:
                values.copy_(total)

    def wait(self) -> None:
        """Let the current stream wait for all slices; on the CPU they are complete."""
        self._stream.join()

    def _call(self, collective: Callable[..., Any], output: Any, *inputs: Any,
              group: tuple[Any, Sequence[int]]) -> None:
        """Call a collective, and count its bytes: a tensor travels around the ring once, in an allreduce twice."""
        process_group, ranks = group
        collective(output, *inputs, group=process_group)
        largest = max(tensor.numel() * tensor.element_size() for tensor in (output, *inputs))
        turns = (1 if inputs else 2) * (len(ranks) - 1)
        self._p2p.count_bytes(ranks[(ranks.index(self._p2p.rank) + 1) % len(ranks)], largest * turns // len(ranks))
