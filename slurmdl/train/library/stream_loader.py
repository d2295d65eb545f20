"""Batches of a torch IterableDataset: each worker takes its part of every group of batches.

All ranks read the whole stream, in the same order. Worker r of R takes samples r * B to (r + 1) * B - 1 of each
R * B samples, with B samples per batch. An incomplete group at the end is dropped, so all workers make the same
number of steps without a message. This module imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from slurmdl.errors import TrainError
from slurmdl.text import pluralize
from slurmdl.train.library.context import EpochPosition
from slurmdl.train.library.loader import StepBoundary
from slurmdl.train.library.sampling import BatchSlice


class WorkerBatches(IterableDataset[Any]):  # type: ignore[misc]
    """Lists of the samples of one worker.

    In a process of a DataLoader the stream is what the dataset yields there: splitting it among these processes is
    up to the dataset (torch.utils.data.get_worker_info), as in plain PyTorch.
    """

    def __init__(self, dataset: Any, worker: int, worker_count: int, batch_size: int) -> None:
        super().__init__()
        self._dataset, self._worker, self._worker_count, self._batch_size = dataset, worker, worker_count, batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        samples, size = iter(self._dataset), self._batch_size
        while len(group := list(islice(samples, size * self._worker_count))) == size * self._worker_count:
            yield group[size * self._worker:size * (self._worker + 1)]


class StreamLoader(EpochPosition):
    """This worker's batches of an IterableDataset; each iteration is an epoch, i.e. one pass through the stream.

    The dataset's `set_epoch`, if any, is called with its number. After a restart the samples before the position are
    read and skipped.

    Attributes:
        dataset: as of a DataLoader: all samples, not this worker's alone.
        batch_size: samples per worker and step.
    """

    def __init__(self, dataset: Any, worker: int, worker_count: int, batch_size: int, options: Mapping[str, Any],
                 boundary: StepBoundary) -> None:
        super().__init__()
        if batch_size < 1:
            raise TrainError(f"a batch of {batch_size} samples; expected 1 or more")
        self.dataset, self.batch_size = dataset, batch_size
        self._group_size, self._boundary = worker_count * batch_size, boundary
        # without automatic batching a DataLoader collates what the dataset yields, here one list per batch
        self._batches = DataLoader(WorkerBatches(dataset, worker, worker_count, batch_size), batch_size=None, **{
            "collate_fn": default_collate, **{name: value for name, value in options.items() if name != "drop_last"}})

    def __len__(self) -> int:
        """Steps in an epoch; TypeError if the dataset has no length."""
        return len(self.dataset) // self._group_size

    def __iter__(self) -> Iterator[Any]:
        number, cursor, restored = self._start_epoch()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(number)
        if restored and not cursor:
            self._boundary.on_resume()
        self._boundary.on_fetch()
        batches = islice(self._batches, cursor // self._group_size, None)
        is_first = restored and bool(cursor)
        for batch in batches:
            if is_first:
                self._boundary.on_resume()  # after the random numbers that skipped samples draw
                is_first = False
            cursor += self._group_size
            self._position = number, cursor
            self._boundary.on_batch(BatchSlice(0, self.batch_size, cursor, 1))
            yield batch
            self._boundary.on_fetch()
        if not cursor:
            raise TrainError(f"{type(self.dataset).__name__} yields fewer than "
                             f"{pluralize(self._group_size, 'sample')}; expected "
                             f"{self.batch_size} for each of "
                             f"{pluralize(self._group_size // self.batch_size, 'worker')}")
        self._position = number + 1, 0
        self._boundary.on_epoch_end()
