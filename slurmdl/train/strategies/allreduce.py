"""Allreduce: every worker updates with the mean gradient, so all replicas stay equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from slurmdl import comm_layout
from slurmdl.errors import TrainError, warn
from slurmdl.plan import group_ranks
from slurmdl.train.collectives import (
    AllreduceOp,
    CollectivePipeline,
    FloatArray,
    NodeAllreduceOp,
    NodeVectors,
    bruck_allgather,
)
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies.strategy import SideStream, Strategy, StrategyContext
from slurmdl.train.transports.torch_distributed import collective_timeout, naming_lost_rank
from slurmdl.train.transports.transport import Tag
from slurmdl.train.world import World

#: buckets in flight: one inside the zones before the exchange between them, one between them, one after it
MAX_BUCKETS_IN_FLIGHT = 3
#: tags in use for buckets, more than are in flight. The last bucket of a step has Tag.STEP, by which a worker that
#: has ended detects that others continue
NUM_BUCKET_TAGS = 100


class Allreduce(Strategy):
    """Equivalent to one process with the workers' batches; pattern `ring` or `hierarchical`.

    Gradients are summed in buckets from last to first, as the backward pass completes them, and in the same order on
    all workers. Several buckets are in flight, so that links between zones are busy while others are summed inside
    zones. With compression, buckets travel as fp16 and are added in fp32; see collectives.AllreduceOp for the error.

    If ranks share a node, the gradients lie in shared memory, where each node sums them; then one rank per node sends
    a part of the sum (node_allreduce.NodeAllreduceOp). If there is no shared memory, all ranks exchange messages.

    Reference: S. Li et al.: PyTorch distributed: experiences on accelerating data parallel training. VLDB 13 (2020).
    doi:10.14778/3415478.3415530
    """

    averages_gradients = identical_at_end = True

    def __init__(self, ctx: StrategyContext) -> None:
        super().__init__(ctx)
        self.overlaps_backward = len(ctx.workers) > 1
        if not self.overlaps_backward:  # the only worker's gradients are the mean
            return
        self._nodes = group_ranks(ctx.workers, ctx.nodes)
        self._wire_dtype = np.float16 if ctx.config.compression == "fp16" else np.float32
        starts = comm_layout.bucket_starts(ctx.parameters.size)
        self._bucket_slices = [slice(*bounds) for bounds in pairwise([*starts, ctx.parameters.size])]
        tags = [Tag.FIRST_BUCKET + index % NUM_BUCKET_TAGS for index in range(len(starts) - 1)]
        self._bucket_tags = [*tags, Tag.STEP]
        self._node_vectors: NodeVectors | None = ctx.comm_thread.call(self._share_gradients)
        if self._node_vectors and ctx.relocate_gradients:
            ctx.relocate_gradients(self._node_vectors.vector)
        self._bucket_ops = [self._make_bucket_op(index) for index in range(len(starts))]
        self._pipeline = CollectivePipeline(ctx.p2p)
        self._futures: list[Future[Any]] = []

    def _share_gradients(self) -> NodeVectors | None:
        """Shared memory for the gradients of this node's ranks, or None. Collective over the workers."""
        ctx, transport = self._ctx, self._ctx.p2p.transport
        if not transport.prefers_shared_memory or len(self._nodes) == len(ctx.workers) or \
                self._first_worker(ctx.relocate_gradients is None) is not None:
            return None
        ranks = next(ranks for ranks in self._nodes if ctx.p2p.rank in ranks)
        vectors, problem = None, ""
        try:
            vectors = NodeVectors(transport.allocate_shared, ctx.p2p.rank, ranks, self._bucket_slices)
        except TrainError as error:
            problem = str(error)
        first = self._first_worker(bool(problem))
        if first == ctx.p2p.rank:
            warn(f"train: the ranks of a node exchange messages instead of shared memory: {problem}")
        return vectors if first is None else None

    def _first_worker(self, condition: bool) -> int | None:
        """The first worker whose condition is true, None without one. Collective over the workers."""
        conditions = bruck_allgather(self._ctx.control_p2p, self._ctx.workers, float(condition))
        return self._ctx.workers[int(conditions.argmax())] if conditions.any() else None

    def _make_bucket_op(self, index: int) -> AllreduceOp | NodeAllreduceOp:
        ctx, bucket = self._ctx, self._bucket_slices[index]

        def make_op(groups: Sequence[Sequence[int]], vector: FloatArray) -> AllreduceOp:
            group = next(group for group in groups if ctx.p2p.rank in group)
            direct = bucket.start < comm_layout.DIRECT_ELEMENTS and comm_layout.uses_direct_exchange(
                [ctx.nodes[rank] for rank in group], [ctx.zones[rank] for rank in group])
            return AllreduceOp(ctx.p2p, groups, vector, self._wire_dtype, direct)

        if self._node_vectors:
            return NodeAllreduceOp(ctx.p2p, self._node_vectors, index, self._nodes, ctx.allreduce_groups, make_op)
        return make_op(ctx.allreduce_groups, ctx.gradients[bucket])

    def on_gradients_ready(self, start: int) -> bool:
        while len(self._futures) < len(self._bucket_ops):
            index = len(self._bucket_ops) - 1 - len(self._futures)
            if self._bucket_slices[index].start < start:
                break
            wait_for_copy = self._ctx.device_copies.copy_gradients_to_host(self._bucket_slices[index])
            self._futures.append(self._ctx.comm_thread.submit(partial(self._start_allreduce, index, wait_for_copy)))
        return bool(self._futures)

    def _start_allreduce(self, index: int, wait_for_copy: Callable[[], None]) -> None:
        """Start a bucket's mean when it is on the host, and advance the others until the next bucket is queued."""
        wait_for_copy()
        self._pipeline.progress(MAX_BUCKETS_IN_FLIGHT - 1)
        self._pipeline.add(self._bucket_ops[index].coroutine(len(self._ctx.workers), self._bucket_tags[index]))
        self._pipeline.progress(should_stop=lambda: self._ctx.comm_thread.has_queued)

    def finish_gradients(self, step: int, skip_update: bool = False) -> None:
        if not self.overlaps_backward:
            return
        self.on_gradients_ready(0)
        self._futures.append(self._ctx.comm_thread.submit(self._pipeline.progress))
        for future in self._futures:
            self._ctx.comm_thread.wait(future)
        self._futures.clear()
        self._ctx.device_copies.copy_gradients_to_device()
        self.exchanges += 1

    def close(self) -> None:
        if self.overlaps_backward and self._node_vectors and self._ctx.relocate_gradients:
            self._ctx.relocate_gradients(np.empty_like(self._node_vectors.vector))
            self._ctx.comm_thread.call(self._node_vectors.close)


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

    def finish_gradients(self, step: int, skip_update: bool = False) -> None:
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


def choose_device_backend(world: World, device: Any) -> str:
    """Backend of torch.distributed that averages gradients on the ranks' GPUs; "" if host memory does. Collective.

    NCCL needs a GPU of its own for each rank. Gradients that parameter servers sum, or that travel compressed, are in
    host memory.
    """
    config, transport = world.config, world.transport
    compressed = config.compression != "none" and not config.islands  # inside of islands nothing is compressed
    if not transport.device_backends or not config.sends_gradients or world.strategy == "ps" or compressed:
        return ""
    own = transport.device_backends.get(device.type, "")
    ranks = transport.allgather((own, _device_id(device)))
    if not any(backend for backend, _ in ranks):
        return ""
    problem = _nccl_problem(world, ranks)
    if problem and world.rank == 0:
        warn(f"train: gradients are averaged in host memory, which is slower: {problem}")
    return "" if problem else own


def _nccl_problem(world: World, ranks: Sequence[tuple[str, str]]) -> str:
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
