"""Deals out the samples of a data set to the workers, batch by batch."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.library.sampling import BatchSlice, GlobalBatches, SliceSampler

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LoaderCallbacks:
    """Whom a Loader tells.

    Attributes
    ----------
    asked : a batch is asked for.
    there : it is there, what was dealt.
    over : there was none, the epoch is over.
    resumed : all is as it was when the position was taken that was restored.
    """

    on_fetch: Callable[[], None]
    on_batch: Callable[[BatchSlice], None]
    on_epoch_end: Callable[[], None]
    on_resume: Callable[[], None]


@dataclass(frozen=True)
class DataSource:
    """A data set.

    Attributes
    ----------
    count : samples.
    mark : a checksum of some of them; 0 where a sample may be another one each time, as in a Dataset.
    batches : makes the batches of the samples whose indices it is given, one after the other.
    ahead : how many more indices than it has given batches it may ask for.
    dataset : has as many entries as there are samples.
    """

    num_samples: int
    fingerprint: int
    make_batches: Callable[[Iterator[IntArray]], Iterator[Any]]
    prefetch: int = 0
    dataset: Any = None


class Loader:
    """This worker's batches; each iteration over it is an epoch.

    Parameters
    ----------
    source : the data set.
    told : is told when a batch is asked for and when it is there.

    Attributes
    ----------
    epoch : number of the next epoch, from which its order is drawn; counts by itself.
    dataset : as a DataLoader has it: all samples, not those of this worker alone.
    batch_size : as a DataLoader has it: samples per worker and step, in the mean over the workers.
    """

    def __init__(self, global_batches: GlobalBatches, sampler: SliceSampler,
                 data_source: DataSource, callbacks: LoaderCallbacks) -> None:
        self._global_batches, self._sampler, self._make_batches, self._callbacks = global_batches, sampler, data_source.make_batches, callbacks
        self.dataset, self.batch_size = data_source.dataset, global_batches.batch_size
        self.epoch = self._cursor = 0
        self._position, self._restored = (0, 0), False

    def __len__(self) -> int:
        """Steps in an epoch, in the mean over the workers."""
        return self._global_batches.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return self._iterate_epoch(None)

    def batches_until(self, step: int) -> Iterator[Any]:
        """Batches, epoch after epoch, up to a step of the run."""
        while not self._sampler.exhausted(step):
            yield from self._iterate_epoch(step)

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and its `cursor`, the samples of it that are dealt to all workers so far.

        With --load-balance local-steps it is exact for all workers where an exchange is over, and without waiting (--async) on
        the first worker alone.
        """
        return dict(zip(("epoch", "cursor"), self._position, strict=True))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position with the next iteration, on all workers; there may be more or fewer than before."""
        self._position = self.epoch, self._cursor = state["epoch"], state["cursor"]
        self._restored = True

    def _iterate_epoch(self, until: int | None) -> Iterator[Any]:
        number, cursor, order = self.epoch, self._cursor, self._global_batches.order(self.epoch)
        self.epoch, self._cursor = number + 1, 0
        restored, self._restored = self._restored, False
        dealt: deque[BatchSlice] = deque()

        def indices() -> Iterator[IntArray]:
            for hand in self._sampler.slices(number, cursor, until):
                dealt.append(hand)
                yield order[hand.start:hand.stop]

        if restored and not cursor:
            self._callbacks.on_resume()
        self._callbacks.on_fetch()
        batches = self._make_batches(indices())
        if restored and cursor:
            self._callbacks.on_resume()  # only now: a DataLoader draws a random number when it begins
        for batch in batches:
            hand = dealt.popleft()
            self._position = number, hand.cursor
            self._callbacks.on_batch(hand)
            yield batch
            self._callbacks.on_fetch()
        if not self._global_batches.size_at(self._position[1]):
            self._position = number + 1, 0
        self._callbacks.on_epoch_end()


def make_data_source(data: Any, options: dict[str, Any]) -> DataSource:
    """What deals with a data set.

    Parameters
    ----------
    data : a torch Dataset with a length, an array or tensor, or a sequence of them with the same length; of arrays
        a batch is the same sequence of tensors.
    options : of torch.utils.data.DataLoader, for a Dataset.

    Raises
    ------
    TrainError : data that cannot be dealt out.
    """
    import torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise TrainError(f"{type(data).__name__} has no length and no samples by number; valid: a Dataset with "
                         "__len__ and __getitem__, arrays, tensors")
    alone = _is_array(data)
    arrays = data.tensors if isinstance(data, TensorDataset) else (data,) if alone else data
    if isinstance(arrays, Sequence) and arrays and all(map(_is_array, arrays)):
        if options:
            raise TrainError(f"{', '.join(options)}: for a Dataset, not for arrays")
        if len({len(array) for array in arrays}) > 1:
            raise TrainError(f"arrays of {', '.join(str(len(array)) for array in arrays)} samples; valid: as many in "
                             "each")
        tensors = [torch.as_tensor(array) for array in arrays]

        def batches(indices: Iterator[IntArray]) -> Iterator[Any]:
            for index in indices:
                chosen = torch.from_numpy(index)
                batch = tuple(tensor[chosen] for tensor in tensors)
                yield batch[0] if alone else batch

        some = np.arange(0, len(tensors[0]), len(tensors[0]) // 5 or 1)
        return DataSource(len(tensors[0]), zlib.crc32(repr([tensor[some] for tensor in tensors]).encode()), batches,
                      dataset=data if alone or isinstance(data, TensorDataset) else TensorDataset(*tensors))

    def loaded(indices: Iterator[IntArray]) -> Iterator[Any]:
        return iter(DataLoader(data, batch_sampler=(index.tolist() for index in indices), **options))

    # without processes of its own a DataLoader asks for indices when it is asked for a batch
    return DataSource(len(data), 0, loaded, options.get("num_workers", 0)
                      * (options.get("prefetch_factor") or 2), data)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0
