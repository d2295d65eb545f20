"""Finds out on the way whether replicas that must be equal are, and whether workers train with the same samples."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmdl.errors import InvalidRunError, TrainError, warn

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run

#: steps from one comparison of the replicas to the next where nothing is said
DEFAULT_CHECK_EVERY = 100
#: batches of which each worker keeps a checksum
_COMPARED_BATCHES = 2
#: ranks that a message names
_MAX_LISTED_RANKS = 4


class ReplicaCheck:
    """One rank's part in the comparisons.

    Replicas are compared where each worker's own optimizer applies the mean of all gradients: after `every` steps,
    after 1, 2, 4, 8, ... of the first of them, and at the end of the run. Batches are those of the first steps, where
    they are not dealt out by `run.loader`; with other strategies they are compared at the end of the run only.

    Parameters
    ----------
    every : steps from one comparison to the next; 0 for none.
    """

    def __init__(self, run: Run, every: int) -> None:
        self._run, self._every = run, every if run.worker_count > 1 else 0
        self._expects_equal = run.strategy.averages_gradients and run.strategy.updates_locally
        self._batch_crc32 = 0
        self._batch_checksums: list[int] = []
        self._step, self._version = 0, 0
        self._warned_of_batches = self._warned_of_optimizer = False
        self._trained_ids = {id(tensor) for tensor in run.replica.tensors}
        self._thread, self._optimizer_hook = threading.current_thread(), self._hook_other_optimizers()

    def record_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The model is called with these, in a step of the training."""
        if self._every and len(self._batch_checksums) < _COMPARED_BATCHES:
            for tensor in _iter_tensors([args, kwargs]):
                self._batch_crc32 = zlib.crc32(_tensor_bytes(tensor), self._batch_crc32)

    def after_step(self, step: int) -> None:
        """So many steps have been made; a call of all workers."""
        if not self._every:
            return
        if len(self._batch_checksums) < _COMPARED_BATCHES:
            self._batch_checksums.append(self._batch_crc32)
            self._batch_crc32 = 0
        if self._expects_equal:
            self._step, self._version = step, self._run.replica.version
            if step % self._every == 0 or (step < self._every and step & (step - 1) == 0):
                self._compare()

    def finish(self) -> None:
        """After the last step of all; a call of all ranks."""
        if self._every:
            self._compare()

    def close(self) -> None:
        """No step can follow."""
        if self._optimizer_hook:
            self._optimizer_hook.remove()
            self._optimizer_hook = None

    def _compare(self) -> None:
        run = self._run
        # what the script has changed by hand after the last step is its own business
        replica = run.replica.checksum() if self._expects_equal and run.replica.version == self._version else None
        told = self._all_gather((replica, tuple(self._batch_checksums)))
        workers = [told[rank] for rank in run.world.alive_with_role("worker")]
        batches = {its for _, its in workers}
        if len(batches) == 1 and len(self._batch_checksums) == _COMPARED_BATCHES and all(
            self._batch_checksums) and len(workers) > 1:
            self._warn_same_batches()
        replicas = {its for its, _ in workers}
        if len(replicas) > 1 and None not in replicas:
            self._report_difference()

    def _all_gather(self, obj: Any) -> list[Any]:
        transport = self._run.world.transport

        def errand() -> list[Any]:
            transport.barrier(self._fail_if_others_continue)
            return transport.allgather(obj)
        return list(self._run.comm_thread.call(errand))

    def _fail_if_others_continue(self) -> None:
        peer = self._run.world.transport.iprobe(0) if self._expects_equal and not self._run.finished else None
        if peer is not None:
            raise TrainError(f"step {self._step}: rank {peer} makes more backward passes before opt.step() than this "
                             "rank; valid: as many on all ranks")

    def _report_difference(self) -> None:
        """Refuse replicas that differ; where the ranks do not compute alike they may differ by rounding."""
        run = self._run
        told = self._all_gather((_numerics_description(run.replica.tensors[0].device), run.replica.checksums()))
        nodes, (first, checksums) = run.world.nodes, told[0]
        for rank, (arithmetic, _) in enumerate(told):
            if arithmetic != first:
                self._expects_equal = False
                if run.is_main:
                    warn(f"train: step {self._step}: the replicas are not the same to the last bit, and are not "
                         f"compared any more: rank {rank} on {nodes[rank]} has {arithmetic}, rank 0 {first}, which "
                         "may round differently")
                return
        for index, name in enumerate(run.replica.names):
            others = [rank for rank, (_, its) in enumerate(told) if its[index] != checksums[index]]
            if others:
                shown = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in others[:_MAX_LISTED_RANKS])
                more = f" and {len(others) - _MAX_LISTED_RANKS} more" if len(others) > _MAX_LISTED_RANKS else ""
                raise InvalidRunError(f"step {self._step}: parameter {name} is not the same on all ranks: rank 0 on "
                              f"{nodes[0]} differs from {shown}{more}; valid: parameters that change in opt.step() "
                              "alone, or alike on all ranks (check_every=0 turns this comparison off)")

    def _warn_same_batches(self) -> None:
        if self._run.is_main and not self._warned_of_batches:
            warn("train: all workers train with the same samples; valid: batches of run.loader(), or a DataLoader "
                 "with sampler=DistributedSampler(dataset, run.worker_count, run.worker_rank)")
        self._warned_of_batches = True

    def _hook_other_optimizers(self) -> Any:
        """Say so where an optimizer trains parameters that are not kept together."""
        if self._run.is_server or self._run.worker_count == 1:
            return None
        try:
            from torch.optim.optimizer import register_optimizer_step_pre_hook
        except ImportError:  # PyTorch before 2.0
            return None

        def stepped(optimizer: Any, arguments: Any, named: Any) -> None:
            # virtual ranks are threads of one process
            if optimizer is self._run.optimizer or self._warned_of_optimizer or \
                    threading.current_thread() is not self._thread:
                return
            others = [tensor for group in optimizer.param_groups for tensor in group["params"]
                      if id(tensor) not in self._trained_ids]
            if others:
                self._warned_of_optimizer = True
                if self._run.is_main:
                    warn(f"train: {type(optimizer).__name__} trains {len(others)} parameters that run.wrap() was not "
                         "given, so that each rank trains its own; valid: one model that holds all "
                         "(torch.nn.ModuleList), and one optimizer of its parameters")
        return register_optimizer_step_pre_hook(stepped)


def _iter_tensors(nested: Any) -> Iterator[Any]:
    """All tensors in sequences and mappings."""
    import torch

    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from _iter_tensors(value)
    elif isinstance(nested, (list, tuple)):
        for value in nested:
            yield from _iter_tensors(value)


def _tensor_bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _numerics_description(device: Any) -> str:
    """On what the rounding of an update depends, in words."""
    import torch

    if device.type == "cuda":
        return f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    processor = getattr(torch.backends, "cpu", None)
    return f"PyTorch {torch.__version__}, {processor.get_cpu_capability() if processor else 'a CPU'}, " \
           f"{torch.get_num_threads()} threads"
