"""Deals out the samples of a data set to the workers, batch by batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError

IntArray = npt.NDArray[np.int64]


class Deal:
    """Which samples each worker takes in each step: every sample once in an epoch, over all workers together.

    All workers make the same number of steps. Batches are full but for the last step's, where the workers share what
    is left as evenly as can be; where that is less than one sample each, the step before takes it.

    Parameters
    ----------
    count : samples of an epoch, or what is left of it.
    batch : samples per worker and step.
    shuffle : in an order drawn anew for each epoch from the seed, the same on all workers; else in the data's.

    Raises
    ------
    TrainError : fewer samples than workers.
    """

    def __init__(self, count: int, workers: int, batch: int, shuffle: bool, seed: int) -> None:
        if batch < 1:
            raise TrainError(f"a batch of {batch} samples; valid: 1 or more")
        if count < workers:
            raise TrainError(f"{count} samples for {workers} workers; each needs at least one")
        self._count, self._workers, self._batch = count, workers, batch
        self._shuffle, self._seed = shuffle, seed
        rest = count % (workers * batch)
        self.steps = count // (workers * batch) + (rest >= workers or count < workers * batch)

    def total(self, step: int) -> int:
        """Samples of all workers in a step."""
        whole = self._workers * self._batch
        return self._count - step * whole if step == self.steps - 1 else whole

    def size(self, step: int, worker: int) -> int:
        """Samples of one worker in a step."""
        start, stop = self._span(step, worker)
        return stop - start

    def epoch(self, number: int, worker: int, cursor: int = 0) -> Iterator[IntArray]:
        """Indices of one worker's samples, for each step of an epoch of which `cursor` samples have been dealt."""
        order = np.random.default_rng((self._seed, number)).permutation(self._count + cursor) if self._shuffle \
            else np.arange(self._count + cursor)
        for step in range(self.steps):
            start, stop = self._span(step, worker)
            yield order[cursor + start:cursor + stop]

    def after(self, cursor: int) -> Deal | None:
        """Deals what is left of an epoch of which so many samples have been dealt; None for less than one each."""
        left = self._count - cursor
        return Deal(left, self._workers, self._batch, self._shuffle, self._seed) if left >= self._workers else None

    def _span(self, step: int, worker: int) -> tuple[int, int]:
        begin, total = step * self._workers * self._batch, self.total(step)
        return begin + total * worker // self._workers, begin + total * (worker + 1) // self._workers


@dataclass(frozen=True)
class Told:
    """Whom a Loader tells.

    Attributes
    ----------
    asked : a batch is asked for.
    there : it is there; with its weight, the worker's share of the step's samples times the number of workers.
    over : there was none, the epoch is over.
    resumed : all is as it was when the position was taken that was restored.
    """

    asked: Callable[[], None]
    there: Callable[[float], None]
    over: Callable[[], None]
    resumed: Callable[[], None]


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes
    ----------
    count : samples.
    mark : a checksum of some of them; 0 where a sample may be another one each time, as in a Dataset.
    batches : makes the batches of the samples whose indices it is given, one after the other.
    """

    count: int
    mark: int
    batches: Callable[[Iterator[IntArray]], Iterator[Any]]


class Loader:
    """This worker's batches; each iteration over it is an epoch.

    Parameters
    ----------
    batches : makes the batches of the samples whose indices it is given, one after the other.
    told : is told when a batch is asked for and when it is there.

    Attributes
    ----------
    epoch : number of the next epoch, from which its order is drawn; counts by itself.
    """

    def __init__(self, deal: Deal, worker: int, workers: int, batches: Callable[[Iterator[IntArray]], Iterator[Any]],
                 told: Told) -> None:
        self._deal, self._worker, self._workers = deal, worker, workers
        self._batches, self._told = batches, told
        self.epoch = 0
        self._at = {"epoch": 0, "cursor": 0}
        self._restored = False

    def __len__(self) -> int:
        """Steps in an epoch, the same for all workers."""
        return self._deal.steps

    def __iter__(self) -> Iterator[Any]:
        number, self.epoch = self.epoch, self.epoch + 1
        cursor = self._at["cursor"] if self._restored else 0
        deal = self._deal.after(cursor)
        if self._restored and not cursor:
            self._told.resumed()
        self._at = {"epoch": number, "cursor": cursor}
        self._told.asked()
        batches = self._batches(deal.epoch(number, self._worker, cursor)) if deal else ()
        if self._restored and cursor:
            self._told.resumed()  # only now: a DataLoader draws a random number when it begins
        self._restored = False
        for step, batch in enumerate(batches):
            assert deal
            total = deal.total(step)
            self._told.there(deal.size(step, self._worker) * self._workers / total)
            yield batch
            self._at["cursor"] += total
            self._told.asked()
        self._told.over()

    def state(self) -> dict[str, int]:
        """The position: the epoch, and its `cursor`, the samples that are dealt to all workers and trained on."""
        return dict(self._at)

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a position with the next iteration; there may be more or fewer workers than before."""
        self._at, self._restored = dict(state), True
        self.epoch = state["epoch"]


def source(data: Any, options: dict[str, Any]) -> Source:
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
        return Source(len(tensors[0]), zlib.crc32(repr([tensor[some] for tensor in tensors]).encode()), batches)

    def loaded(indices: Iterator[IntArray]) -> Iterator[Any]:
        return iter(DataLoader(data, batch_sampler=[index.tolist() for index in indices], **options))

    return Source(len(data), 0, loaded)


def _is_array(thing: Any) -> bool:
    return hasattr(thing, "shape") and hasattr(thing, "dtype") and len(thing.shape) > 0
