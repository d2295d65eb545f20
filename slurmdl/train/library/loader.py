"""Data loaders: each worker's batches of a data set."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.library.batch_boundary import BatchBoundary
from slurmdl.train.library.sampling import BatchSlice, GlobalBatches, SliceSampler

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


class EpochPosition:
    """Position of a loader, for checkpoints.

    Attributes:
        epoch: number of the next epoch; incremented by each iteration.
    """

    def __init__(self) -> None:
        self.epoch = self._cursor = 0
        self._position, self._restored = (0, 0), False

    def state_dict(self) -> dict[str, int]:
        """The epoch, and its `cursor`, the number of its samples assigned to all workers so far.

        With --load-balance local-steps it is exact after an exchange, and with --async on the first worker only.
        """
        return dict(zip(("epoch", "cursor"), self._position, strict=True))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a position with the next iteration; the number of workers may have changed."""
        self._position = self.epoch, self._cursor = state["epoch"], state["cursor"]
        self._restored = True

    def _start_epoch(self) -> tuple[int, int, bool]:
        """Return an epoch's number, the cursor to start from, and whether this is a restored position."""
        started = self.epoch, self._cursor, self._restored
        # the previous iteration need not have passed its last batch: Lightning counts batches
        self._position = started[:2]
        self.epoch, self._cursor, self._restored = self.epoch + 1, 0, False
        return started


class Loader(EpochPosition):
    """This worker's batches; each iteration is an epoch, whose number determines the order of the samples.

    Attributes:
        dataset: as of a DataLoader: all samples, not this worker's alone.
        batch_size: as of a DataLoader: samples per worker and step, as the mean over the workers.
    """

    def __init__(self, global_batches: GlobalBatches, sampler: SliceSampler, data_source: DataSource,
                 boundary: BatchBoundary) -> None:
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


def make_data_source(data: Any, options: dict[str, Any]) -> DataSource:
    """Make a source from the data and options of `Run.loader`; batches of a tuple are tuples of tensors."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    if isinstance(data, DataLoader):
        raise TrainError("run.loader(DataLoader): expected its data set: "
                         "run.loader(loader.dataset, batch_size, num_workers=...)")
    if options.get("drop_last"):
        raise TrainError("run.loader(drop_last=True): the last batches of an epoch are small, and weighted by their "
                         "size; expected drop_last=False, or a Dataset whose length is a multiple of all batches")
    if not hasattr(data, "__len__"):
        raise TrainError(f"{type(data).__name__} has no length or no samples by index; expected a Dataset with "
                         "__len__ and __getitem__, an IterableDataset, arrays, tensors")
    single = _is_array(data)
    arrays = data.tensors if isinstance(data, TensorDataset) else (data,) if single else data
    if isinstance(arrays, Sequence) and arrays and all(map(_is_array, arrays)) and not (
            options and isinstance(data, TensorDataset)):
        if isinstance(arrays, list):
            raise TrainError(f"a list of {len(arrays)} arrays, which may be samples or columns; expected "
                             "torch.stack(samples), or a tuple of columns, e.g. (images, labels)")
        if options:
            raise TrainError(f"{', '.join(options)}: valid for a Dataset only, not for arrays")
        if len({len(array) for array in arrays}) > 1:
            raise TrainError(f"arrays of {', '.join(str(len(array)) for array in arrays)} samples; expected "
                             "equal lengths")
        tensors = [torch.as_tensor(array) for array in arrays]

        def batches(indices: Iterator[IntArray]) -> Iterator[Any]:
            for index in indices:
                chosen = torch.from_numpy(index)
                batch = tuple(tensor[chosen] for tensor in tensors)
                yield batch[0] if single else batch

        checked = np.arange(0, len(tensors[0]), len(tensors[0]) // 5 or 1)
        fingerprint = zlib.crc32(repr([tensor[checked] for tensor in tensors]).encode())
        return DataSource(len(tensors[0]), fingerprint, batches, dataset=data if
                          single or isinstance(data, TensorDataset) else TensorDataset(*tensors))

    def load(indices: Iterator[IntArray]) -> Iterator[Any]:
        return iter(DataLoader(data, batch_sampler=(index.tolist() for index in indices), **options))

    # without worker processes a DataLoader does not prefetch
    prefetch = options.get("num_workers", 0) * (options.get("prefetch_factor") or 2)
    return DataSource(len(data), 0, load, prefetch, data)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0
