"""Finds out on the way whether replicas that must be equal are, and whether workers train with the same samples."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmdl.errors import Refused, TrainError, warn

if TYPE_CHECKING:
    from slurmdl.train.library.run import Run

#: steps from one comparison of the replicas to the next where nothing is said
EVERY = 100
#: batches of which each worker keeps a checksum
_BATCHES = 2
#: ranks that a message names
_SHOWN = 4


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
        self._run, self._every = run, every if run.workers > 1 else 0
        self._equal = run.strategy.in_step and run.strategy.updates
        self._batch = 0
        self._batches: list[int] = []
        self._step, self._version = 0, 0
        self._told_of_batches = self._told_of_optimizer = False
        self._trained = {id(tensor) for tensor in run.replica.tensors}
        self._thread, self._handle = threading.current_thread(), self._watch_optimizers()

    def see(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        """The model is called with these, in a step of the training."""
        if self._every and len(self._batches) < _BATCHES:
            for tensor in _tensors([arguments, named]):
                self._batch = zlib.crc32(_bytes(tensor), self._batch)

    def after(self, step: int) -> None:
        """So many steps have been made; a call of all workers."""
        if not self._every:
            return
        if len(self._batches) < _BATCHES:
            self._batches.append(self._batch)
            self._batch = 0
        if self._equal:
            self._step, self._version = step, self._run.replica.version
            if step % self._every == 0 or (step < self._every and step & (step - 1) == 0):
                self._compare()

    def finish(self) -> None:
        """After the last step of all; a call of all ranks."""
        if self._every:
            self._compare()

    def close(self) -> None:
        """No step can follow."""
        if self._handle:
            self._handle.remove()
            self._handle = None

    def _compare(self) -> None:
        run = self._run
        # what the script has changed by hand after the last step is its own business
        replica = run.replica.checksum() if self._equal and run.replica.version == self._version else None
        told = self._meet((replica, tuple(self._batches)))
        workers = [told[rank] for rank in run.world.living("worker")]
        batches = {its for _, its in workers}
        if len(batches) == 1 and len(self._batches) == _BATCHES and all(self._batches) and len(workers) > 1:
            self._tell_of_batches()
        replicas = {its for its, _ in workers}
        if len(replicas) > 1 and None not in replicas:
            self._name()

    def _meet(self, thing: Any) -> list[Any]:
        transport = self._run.world.transport

        def errand() -> list[Any]:
            transport.meet(self._others_go_on)
            return transport.allgather(thing)
        return list(self._run.courier.do(errand))

    def _others_go_on(self) -> None:
        peer = self._run.world.transport.probe(0) if self._equal and not self._run.finished else None
        if peer is not None:
            raise TrainError(f"step {self._step}: rank {peer} makes more backward passes before opt.step() than this "
                             "rank; valid: as many on all ranks")

    def _name(self) -> None:
        """Refuse replicas that differ; where the ranks do not compute alike they may differ by rounding."""
        run = self._run
        told = self._meet((_arithmetic(run.replica.tensors[0].device), run.replica.checksums()))
        nodes, (first, checksums) = run.world.nodes, told[0]
        for rank, (arithmetic, _) in enumerate(told):
            if arithmetic != first:
                self._equal = False
                if run.first:
                    warn(f"train: step {self._step}: the replicas are not the same to the last bit, and are not "
                         f"compared any more: rank {rank} on {nodes[rank]} has {arithmetic}, rank 0 {first}, which "
                         "may round differently")
                return
        for index, name in enumerate(run.replica.names):
            others = [rank for rank, (_, its) in enumerate(told) if its[index] != checksums[index]]
            if others:
                shown = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in others[:_SHOWN])
                more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
                raise Refused(f"step {self._step}: parameter {name} is not the same on all ranks: rank 0 on "
                              f"{nodes[0]} differs from {shown}{more}; valid: parameters that change in opt.step() "
                              "alone, or alike on all ranks (check_every=0 turns this comparison off)")

    def _tell_of_batches(self) -> None:
        if self._run.first and not self._told_of_batches:
            warn("train: all workers train with the same samples; valid: batches of run.loader(), or a DataLoader "
                 "with sampler=DistributedSampler(dataset, run.workers, run.worker)")
        self._told_of_batches = True

    def _watch_optimizers(self) -> Any:
        """Say so where an optimizer trains parameters that are not kept together."""
        if self._run.serves or self._run.workers == 1:
            return None
        try:
            from torch.optim.optimizer import register_optimizer_step_pre_hook
        except ImportError:  # PyTorch before 2.0
            return None

        def stepped(optimizer: Any, arguments: Any, named: Any) -> None:
            # virtual ranks are threads of one process
            if optimizer is self._run.optimizer or self._told_of_optimizer or \
                    threading.current_thread() is not self._thread:
                return
            others = [tensor for group in optimizer.param_groups for tensor in group["params"]
                      if id(tensor) not in self._trained]
            if others:
                self._told_of_optimizer = True
                if self._run.first:
                    warn(f"train: {type(optimizer).__name__} trains {len(others)} parameters that run.wrap() was not "
                         "given, so that each rank trains its own; valid: one model that holds all "
                         "(torch.nn.ModuleList), and one optimizer of its parameters")
        return register_optimizer_step_pre_hook(stepped)


def _tensors(thing: Any) -> Iterator[Any]:
    """All tensors in sequences and mappings."""
    import torch

    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _tensors(value)


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _arithmetic(device: Any) -> str:
    """On what the rounding of an update depends, in words."""
    import torch

    if device.type == "cuda":
        return f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    processor = getattr(torch.backends, "cpu", None)
    return f"PyTorch {torch.__version__}, {processor.get_cpu_capability() if processor else 'a CPU'}, " \
           f"{torch.get_num_threads()} threads"
