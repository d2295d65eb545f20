"""Detects replicas that differ although they must be equal, and workers that train with the same samples."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmdl.errors import InvalidRunError, warn
from slurmdl.train.library import consistency
from slurmdl.train.library.context import Context, Counters
from slurmdl.train.library.failure_recovery import FailureRecovery

#: batches whose checksums each worker keeps
_COMPARED_BATCHES = 2
#: maximum ranks listed in a message
_MAX_LISTED_RANKS = 4
#: optimizers of all runs of this process
_wrapped_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


class ReplicaCheck:
    """One rank's part in the comparisons.

    Replicas are compared within the groups that must be equal (Strategy.replica_groups): every `every` steps, after
    the steps 1, 2, 4, 8, ... below that, and at the end of the run. The batches of the first steps are compared
    unless `run.loader` provides them; with other strategies only at the end of the run. `every` 0 disables all.
    """

    def __init__(self, ctx: Context, state: Counters, recovery: FailureRecovery, every: int) -> None:
        self._ctx, self._state, self._world = ctx, state, ctx.world
        self._every = every if ctx.world.worker_count > 1 else 0
        self._recovery = recovery
        self._expects_equal = any(len(group) > 1 for group in self._groups)
        self._batch_crc32 = 0
        self._batch_checksums: list[int] = []
        self._part_hooks: list[Any] = []
        self._step, self._version = 0, 0
        self._warned_of_batches = self._warned_of_optimizer = False
        self._thread, self._optimizer_hook = threading.current_thread(), self._hook_other_optimizers()

    @property
    def _groups(self) -> Sequence[Sequence[int]]:
        """Groups of workers whose replicas must be equal; a rank failure changes them."""
        return self._recovery.strategy.replica_groups

    def record_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the arguments of a training call of the model, or of one of its parts if it is not called itself."""
        if self._every and len(self._batch_checksums) < _COMPARED_BATCHES:
            for tensor in _iter_tensors([args, kwargs]):
                self._batch_crc32 = zlib.crc32(consistency.tensor_bytes(tensor.detach()).numpy(), self._batch_crc32)

    def after_step(self, step: int) -> None:
        """Compare if due after a number of completed steps. Collective over the workers."""
        if not self._every:
            return
        if len(self._batch_checksums) < _COMPARED_BATCHES:
            self._end_batch()
        if self._expects_equal:
            self._step, self._version = step, self._ctx.replica.version
            if step % self._every == 0 or (step < self._every and step & (step - 1) == 0):
                self._compare()

    def _end_batch(self) -> None:
        """Keep the checksum of a step's batch; if there is none, record the calls of the model's parts from now on.

        A LightningModule is not called: its training_step() calls its parts.
        """
        if self._batch_crc32 or self._part_hooks or self._state.loaders:
            self._batch_checksums.append(self._batch_crc32)
            self._batch_crc32 = 0
        else:
            self._part_hooks = [part.register_forward_pre_hook(self._before_part)
                                for part in self._ctx.model.children()]
        if len(self._batch_checksums) == _COMPARED_BATCHES:
            self._remove_part_hooks()

    def _before_part(self, part: Any, args: Any) -> None:
        import torch

        if torch.is_grad_enabled():
            self.record_batch(args, {})

    def _remove_part_hooks(self) -> None:
        for hook in self._part_hooks:
            hook.remove()

    def finish(self) -> None:
        """Compare after the last step. Collective."""
        if self._every:
            self._compare()

    def close(self) -> None:
        self._remove_part_hooks()
        if self._optimizer_hook:
            self._optimizer_hook.remove()
            self._optimizer_hook = None

    def _compare(self) -> None:
        replica = self._ctx.replica
        # changes by the script after the last step are permitted
        checksum = replica.checksum() if self._expects_equal and replica.version == self._version else None
        results = self._all_gather((checksum, tuple(self._batch_checksums)))
        workers = [results[rank] for rank in self._world.alive_with_role("worker")]
        batches = {batch_checksums for _, batch_checksums in workers}
        if len(workers) > 1 and len(batches) == 1 and len(self._batch_checksums) == _COMPARED_BATCHES \
                and all(self._batch_checksums) and not self._warned_of_batches:
            self._warned_of_batches = True
            if self._world.is_main:
                warn("train: all workers train with the same samples; expected batches of run.loader(), or a "
                     "DataLoader with sampler=DistributedSampler(dataset, run.worker_count, run.worker_rank)")
        for group in self._groups:
            checksums = {results[rank][0] for rank in group}
            if len(checksums) > 1 and None not in checksums:
                self._report_difference(group)

    def _all_gather(self, obj: Any) -> list[Any]:
        return self._ctx.all_gather_object(obj, self._fail_if_others_continue)

    def _fail_if_others_continue(self) -> None:
        if self._expects_equal and not self._state.finished:
            consistency.fail_if_others_continue(self._world, lambda peer: (
                f"step {self._step}: rank {peer} makes more backward passes before opt.step() than this rank; "
                "expected the same number on all ranks"))

    def _report_difference(self, group: Sequence[int]) -> None:
        """Reject replicas that differ; only warn if the ranks' hardware or software may round differently."""
        replica, nodes = self._ctx.replica, self._world.nodes
        results = self._all_gather((_numerics_description(replica.tensors[0].device), replica.checksums()))
        first, (first_numerics, first_checksums) = group[0], results[group[0]]
        for rank in group:
            numerics, _ = results[rank]
            if numerics != first_numerics:
                self._expects_equal = False
                if self._world.is_main:
                    warn(f"train: step {self._step}: the replicas are not bitwise equal, and are not compared any "
                         f"more: rank {rank} on {nodes[rank]} has {numerics}, rank {first} {first_numerics}, which "
                         "may round differently")
                return
        for index, name in enumerate(replica.names):
            others = [rank for rank in group if results[rank][1][index] != first_checksums[index]]
            if others:
                listed = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in others[:_MAX_LISTED_RANKS])
                more = f" and {len(others) - _MAX_LISTED_RANKS} more" if len(others) > _MAX_LISTED_RANKS else ""
                raise InvalidRunError(
                    f"step {self._step}: parameter {name} is not the same on all ranks"
                    f"{' of an island' * (len(self._groups) > 1)}: rank {first} on {nodes[first]} differs from "
                    f"{listed}{more}; expected changes of parameters by opt.step() only, or equal on all ranks "
                    "(check_every=0 disables this check)")

    def _hook_other_optimizers(self) -> Any:
        """Warn if another optimizer trains parameters outside the replica."""
        ctx, world = self._ctx, self._world
        if world.is_server or world.worker_count == 1:
            return None
        try:
            from torch.optim.optimizer import register_optimizer_step_pre_hook
        except ImportError:  # PyTorch before 2.0
            return None

        def before_step(optimizer: Any, arguments: Any, kwargs: Any) -> None:
            # virtual ranks are threads of one process
            if optimizer in _wrapped_optimizers or self._warned_of_optimizer \
                    or threading.current_thread() is not self._thread:
                return
            others = [tensor for group in optimizer.param_groups for tensor in group["params"]
                      if id(tensor) not in ctx.replica.trained_ids]
            if others:
                self._warned_of_optimizer = True
                if world.is_main:
                    warn(f"train: {type(optimizer).__name__} trains {len(others)} parameters outside run.wrap(), "
                         "which diverge between ranks; expected one model that holds all (torch.nn.ModuleList), and "
                         "one optimizer of its parameters")
        _wrapped_optimizers.add(ctx.optimizer)
        return register_optimizer_step_pre_hook(before_step)


def _iter_tensors(nested: Any) -> Iterator[Any]:
    """All tensors in nested sequences and mappings."""
    import torch

    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, (list, tuple, Mapping)):
        for value in nested.values() if isinstance(nested, Mapping) else nested:
            yield from _iter_tensors(value)


def _numerics_description(device: Any) -> str:
    """Hardware and software that determine the rounding of an update."""
    import torch

    if device.type == "cuda":
        return f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    processor = getattr(torch.backends, "cpu", None)
    return f"PyTorch {torch.__version__}, {processor.get_cpu_capability() if processor else 'a CPU'}, " \
           f"{torch.get_num_threads()} threads"
