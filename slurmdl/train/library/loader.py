"""Data loaders: each worker's batches of a data set; the boundary between two steps, when a batch is requested."""

from __future__ import annotations

import inspect
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import Preempted, TrainError
from slurmdl.train.library import checkpointer, shutdown
from slurmdl.train.library.checkpointer import Checkpointer
from slurmdl.train.library.context import Context, Counters, EpochPosition
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.library.load_balance import SampleAssignment
from slurmdl.train.library.replica_check import ReplicaCheck
from slurmdl.train.library.sampling import BatchSlice, GlobalBatches, SliceSampler
from slurmdl.train.library.training_step import TrainingStep
from slurmdl.train.slow_ranks import SlowRankMonitor


class StepBoundary:
    """Callbacks of the loaders. Before `bind`, i.e. without a model, only the work assignment is updated."""

    def __init__(self, state: Counters, sample_assignment: SampleAssignment) -> None:
        self._state, self._sample_assignment = state, sample_assignment
        self._hooks: TrainingStep | None = None
        self._checkpointer: Checkpointer | None = None
        self._ctx: Context
        self._recovery: FailureRecovery
        self._replica_check: ReplicaCheck
        self._slow_rank_monitor: SlowRankMonitor

    def bind(self, ctx: Context, recovery: FailureRecovery, hooks: TrainingStep, replica_check: ReplicaCheck,
             slow_rank_monitor: SlowRankMonitor, checkpointer: Checkpointer | None) -> None:
        self._ctx, self._recovery, self._hooks = ctx, recovery, hooks
        self._replica_check, self._slow_rank_monitor = replica_check, slow_rank_monitor
        self._checkpointer = checkpointer

    @property
    def _active_hooks(self) -> TrainingStep | None:
        return None if self._state.finished else self._hooks

    def on_fetch(self) -> None:
        """A batch is requested."""
        if self._active_hooks:
            self.checkpoint_if_due()
            self._active_hooks.timer.enter("data")
            self._sample_assignment.start_fetch()

    def checkpoint_if_due(self, last: bool = False) -> None:
        """Write a checkpoint between two steps if due; `last` after the last step."""
        if not self._checkpointer or not self._hooks or self._ctx.world.is_server:
            return
        start, self._state.last_checkpoint_check = self._ctx.world.transport.now(), self._state.step
        with self._recovery.recovering(self._state.step):
            due = self._checkpointer.due_checkpoint(last)
            if due:
                stops = self._checkpointer.save(*due)
                self._hooks.timer.add_checkpoint(start)
                if stops:
                    self._stop(self._checkpointer, due[0])

    def serve_checkpoint(self, number: int) -> None:
        """Write a checkpoint that the workers have requested from this server."""
        if self._checkpointer and self._checkpointer.save(number):
            self._stop(self._checkpointer, number)

    def _stop(self, checkpointer: Checkpointer, number: int) -> None:
        """End all ranks after a checkpoint. Collective.

        Returns only if the stop was to leave slow nodes, and the job cannot be requeued without them.
        """
        cause = f"train: stopped on request: checkpoint of step {number} in {checkpointer.path}"
        left_nodes = self._leave_slow_nodes(cause)
        if left_nodes and not left_nodes[0]:
            self._slow_rank_monitor.continue_with_all_nodes(left_nodes[1])
            return
        self._state.finished = self._state.closed = True
        self._replica_check.close()
        transport = self._ctx.world.transport
        self._ctx.comm_thread.close()
        transport.barrier()
        job_ending, outcome = left_nodes or transport.broadcast(
            shutdown.requeue_job(cause) if self._ctx.world.rank == 0 else None)
        raise Preempted(f"{cause}; {outcome}", job_ending)

    def _leave_slow_nodes(self, cause: str) -> tuple[bool, str] | None:
        """If the stop was to leave slow nodes: whether the job is requeued without them, and why not. Collective.

        None if there was another reason, too: a signal means that the job ends.
        """
        ctx, nodes = self._ctx, self._slow_rank_monitor.nodes_to_leave
        reasons = ctx.all_gather_object((checkpointer.has_received_signal(), bool(nodes)))
        if any(signaled for signaled, _ in reasons) or not any(leaves for _, leaves in reasons):
            return None
        outcomes = ctx.all_gather_object(shutdown.requeue_job_without(nodes, cause) if nodes else None)
        job_ending, text = next(outcome for outcome in outcomes if outcome)
        return job_ending, text

    def on_resume(self) -> None:
        """The iteration has reached the restored position, so random numbers follow."""
        if self._checkpointer:
            self._checkpointer.restore_rng()

    def on_epoch_end(self) -> None:
        """No batch follows the last request."""
        if self._active_hooks:
            self._active_hooks.timer.discard_empty_step()

    def on_batch(self, batch_slice: BatchSlice) -> None:
        """The batch of a slice is ready."""
        self.start_forward()
        self._sample_assignment.begin_step(batch_slice)
        if self._active_hooks:
            self._active_hooks.set_gradient_weight(batch_slice.gradient_weight)

    def start_forward(self) -> None:
        self.on_resume()
        if self._active_hooks:
            self._active_hooks.timer.enter("forward")
            self._sample_assignment.end_fetch()


IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DataSource:
    """A data set.

    Attributes:
        fingerprint: checksum of some samples; 0 if samples are random, as possible with a Dataset.
        make_batches: turns an iterator of sample indices into an iterator of batches.
        prefetch: maximum batches requested ahead.
        dataset: sequence of all samples.
    """

    num_samples: int
    fingerprint: int
    make_batches: Callable[[Iterator[IntArray]], Iterator[Any]]
    prefetch: int = 0
    dataset: Any = None


class Loader(EpochPosition):
    """This worker's batches; each iteration is an epoch, whose number determines the order of the samples.

    Attributes:
        dataset: as of a DataLoader: all samples, not this worker's alone.
        batch_size: as of a DataLoader: samples per worker and step, as the mean over the workers.
    """

    def __init__(self, global_batches: GlobalBatches, sampler: SliceSampler, data_source: DataSource,
                 boundary: StepBoundary) -> None:
        super().__init__()
        self._global_batches, self._sampler, self._boundary = global_batches, sampler, boundary
        self._make_batches = data_source.make_batches
        self.dataset, self.batch_size = data_source.dataset, global_batches.batch_size

    def __len__(self) -> int:
        """Steps in an epoch, as the mean over the workers."""
        return self._global_batches.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return self._iterate_epoch(None)

    def batches_until(self, step: int) -> Iterator[Any]:
        """Batches, epoch after epoch, up to a step of the run."""
        while not self._sampler.exhausted(step):
            yield from self._iterate_epoch(step)

    def _iterate_epoch(self, until: int | None) -> Iterator[Any]:
        number, cursor, restored = self._start_epoch()
        order = self._global_batches.order(number)
        pending: deque[BatchSlice] = deque()

        def indices() -> Iterator[IntArray]:
            for batch_slice in self._sampler.slices(number, cursor, until):
                pending.append(batch_slice)
                yield order[batch_slice.start:batch_slice.stop]

        if restored and not cursor:
            self._boundary.on_resume()
        self._boundary.on_fetch()
        batches = self._make_batches(indices())
        if restored and cursor:
            self._boundary.on_resume()  # after a DataLoader has drawn its random number
        for batch in batches:
            batch_slice = pending.popleft()
            self._position = number, batch_slice.cursor
            self._boundary.on_batch(batch_slice)
            yield batch
            self._boundary.on_fetch()
        if not self._global_batches.size_at(self._position[1]):
            self._position = number + 1, 0
        self._boundary.on_epoch_end()


def is_iterable_dataset(data: Any) -> bool:
    """Whether the samples are a stream, without indices."""
    from torch.utils.data import IterableDataset

    return isinstance(data, IterableDataset)


def check_options(options: Mapping[str, Any]) -> None:
    """Reject options of `Run.loader` that DataLoader does not have, or that choose the samples of a batch."""
    from torch.utils.data import DataLoader

    accepted = [name for name in inspect.signature(DataLoader.__init__).parameters
                if name not in ("self", "dataset", "batch_size", "sampler", "batch_sampler")]
    for name in options:
        if name in ("sampler", "batch_sampler"):
            raise TrainError(f"run.loader({name}=...): run.loader itself chooses the samples of each worker; "
                             "expected torch.utils.data.Subset for a part of the data, or a DataLoader of your own")
        if name not in accepted:
            raise TrainError(f"run.loader({name}=...): not an option; expected {', '.join(accepted)}")


def make_data_source(data: Any, options: dict[str, Any]) -> DataSource:
    """Make a source from the data and options of `Run.loader`; batches of a tuple are tuples of tensors."""
    from torch.utils.data import DataLoader, TensorDataset

    if isinstance(data, DataLoader):
        raise TrainError("run.loader(DataLoader): expected its data set: "
                         "run.loader(loader.dataset, batch_size, num_workers=...)")
    if options.get("drop_last"):
        raise TrainError("run.loader(drop_last=True): the last batches of an epoch are small, and weighted by their "
                         "size; expected drop_last=False, or a Dataset whose length is a multiple of all batches")
    is_scalar = hasattr(data, "shape") and not len(data.shape)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, Mapping) or is_scalar:
        raise TrainError(f"{type(data).__name__} has no length or no samples by index; expected a Dataset with "
                         "__len__ and __getitem__, an IterableDataset, arrays, tensors")
    single = _is_array(data)
    columns = data.tensors if isinstance(data, TensorDataset) else (data,) if single else data
    if isinstance(columns, list) and columns and all(map(_is_array, columns)):
        raise TrainError(f"a list of {len(columns)} arrays, which may be samples or columns; expected "
                         "torch.stack(samples), or a tuple of columns, e.g. (images, labels)")
    if isinstance(columns, tuple) and any(isinstance(column, list) or _is_array(column) for column in columns):
        tensors = [_column_tensor(column) for column in columns]
        if len({len(tensor) for tensor in tensors}) > 1:
            raise TrainError(f"arrays of {', '.join(str(len(tensor)) for tensor in tensors)} samples; expected "
                             "equal lengths")
        if not isinstance(data, TensorDataset):
            data = tensors[0] if single else TensorDataset(*tensors)
        if not options:
            return _tensor_source(tensors, data, single)

    def load(indices: Iterator[IntArray]) -> Iterator[Any]:
        return iter(DataLoader(data, batch_sampler=(index.tolist() for index in indices), **options))

    # without worker processes a DataLoader does not prefetch
    prefetch = options.get("num_workers", 0) * (options.get("prefetch_factor") or 2)
    return DataSource(len(data), 0, load, prefetch, data)


def _tensor_source(tensors: Sequence[Any], dataset: Any, single: bool) -> DataSource:
    """A source of tensors in memory, without a DataLoader."""
    import torch

    def batches(indices: Iterator[IntArray]) -> Iterator[Any]:
        for index in indices:
            chosen = torch.from_numpy(index)
            batch = tuple(tensor[chosen] for tensor in tensors)
            yield batch[0] if single else batch

    checked = np.arange(0, len(tensors[0]), len(tensors[0]) // 5 or 1)
    fingerprint = zlib.crc32(repr([tensor[checked] for tensor in tensors]).encode())
    return DataSource(len(tensors[0]), fingerprint, batches, dataset=dataset)


def _column_tensor(column: Any) -> Any:
    """One tensor of a tuple of arrays."""
    import torch

    if not _is_array(column):
        raise TrainError(f"a tuple with a {type(column).__name__}, which may be a column or a sample; expected "
                         "arrays or tensors (torch.as_tensor(values)), or a list of samples")
    try:
        tensor = torch.as_tensor(column)
    except TypeError as error:
        raise TrainError(f"an array of {column.dtype}; expected one of numbers, or a Dataset") from error
    if tensor.layout != torch.strided:
        raise TrainError(f"a sparse tensor ({str(tensor.layout).removeprefix('torch.')}); expected a dense one "
                         "(to_dense())")
    return tensor


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0
