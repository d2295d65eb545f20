"""Loader of the library: which samples each worker gets, and the data that it accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from strategy_harness import even_slices
from virtual_ranks import library

from slurmdl.errors import TrainError
from slurmdl.train.library.run import Run
from slurmdl.train.library.sampling import GlobalBatches
from slurmdl.train.strategy_config import StrategyConfig


@pytest.mark.parametrize("count, workers, batch", [(100, 3, 7), (9, 3, 3), (10, 3, 3), (11, 3, 3), (3, 3, 50),
                                                   (1437, 8, 32), (5, 1, 2), (17, 16, 1)])
def test_epoch_assigns_every_sample_once(count: int, workers: int, batch: int) -> None:
    batches = GlobalBatches(count, workers, batch, True, 4)
    all_parts = [list(even_slices(batches, worker)) for worker in range(workers)]
    assert {len(parts) for parts in all_parts} == {batches.steps_per_epoch}
    indices = [index for parts in all_parts for part in parts for index in range(part.start, part.stop)]
    assert sorted(indices) == list(range(count))
    for number in range(batches.steps_per_epoch):
        sizes = [parts[number].stop - parts[number].start for parts in all_parts]
        assert [parts[number].gradient_weight for parts in all_parts] == [
            size * workers / sum(sizes) for size in sizes]
        is_last = number == batches.steps_per_epoch - 1
        assert sizes == [batch] * workers or (is_last and max(sizes) - min(sizes) <= 1 <= min(sizes)
                                              and max(sizes) <= batch + 1)
    assert sorted(batches.order(2)) == list(range(count))
    assert not np.array_equal(batches.order(2), batches.order(3))
    assert np.array_equal(GlobalBatches(count, workers, batch, False, 4).order(0), np.arange(count))


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


@pytest.mark.parametrize("data", [Squares(), (np.arange(10), np.arange(10) ** 2), torch.utils.data.TensorDataset(
    torch.arange(10), torch.arange(10) ** 2)], ids=["dataset", "arrays", "tensors"])
def test_loader_supports_datasets_arrays_and_tensors(data: Any) -> None:
    def program(run: Run) -> Any:
        loader = run.loader(data, 2, shuffle=False)
        assert (len(loader), len(loader.dataset), loader.batch_size) == (3, 10, 2), "as scripts with a DataLoader log"
        assert [int(value) for value in loader.dataset[3]] == [3, 9]
        return [pair for x, y in loader for pair in zip(x.tolist(), y.tolist(), strict=True)]
    results = library(2, StrategyConfig("allreduce"), program)
    assert sorted(results[0] + results[1]) == [(number, number * number) for number in range(10)]


def test_loader_accepts_random_samples() -> None:
    """E.g. a Dataset with data augmentation."""
    class Noise(Squares):
        def __getitem__(self, index: int) -> tuple[int, int]:
            return index, int(np.random.default_rng().integers(1 << 60))
    assert library(2, StrategyConfig("allreduce"), lambda run: len(run.loader(Noise(), 5))) == [1, 1]


@pytest.mark.parametrize("data, batch, words", [
    (iter([1]), 2, "has no length or no samples by index"), ((np.zeros(4), np.zeros(5)), 2, "arrays of 4, 5 samples"),
    (np.zeros(1), 2, "1 sample for 2 workers"), (np.zeros(4), 0, "a batch of 0 samples"),
    ([torch.ones(4)] * 6, 2, "a list of 6 arrays, which may be samples or columns"),
    ([np.ones((4, 2)), np.ones(4)], 2, "a list of 2 arrays, which may be samples or columns"),
    ((torch.ones(4, 2), [0, 1, 0, 1]), 2, r"a tuple with a list, which may .*; expected arrays or tensors"),
    (([1.0, 2.0, 3.0], [0, 1, 0]), 1, r"a tuple with a list, which may .*; expected arrays or tensors"),
    ({"x": torch.ones(4)}, 2, "dict has no length or no samples by index"),
    (torch.ones(()), 1, "Tensor has no length or no samples by index"),
    (np.array(["a", "b"]), 1, "an array of <U1; expected one of numbers"),
    (torch.eye(4).to_sparse(), 2, r"a sparse tensor \(sparse_coo\); expected a dense one")])
def test_loader_rejects_unsupported_data(data: Any, batch: int, words: str) -> None:
    with pytest.raises(TrainError, match=words):
        library(2, StrategyConfig("allreduce"), lambda run: run.loader(data, batch))


@pytest.mark.parametrize("data", [torch.utils.data.TensorDataset(torch.arange(10)), (torch.arange(10),),
                                  (np.arange(10),), torch.arange(10), np.arange(10)])
def test_loader_passes_options_with_arrays_to_a_data_loader(data: Any) -> None:
    def program(run: Run) -> Any:
        batches = list(run.loader(data, 4, shuffle=False, num_workers=0, pin_memory=False, drop_last=False))
        return [batch.tolist() for batch in (batches if len(batches[0]) == 4 else [batch[0] for batch in batches])]
    assert library(1, StrategyConfig("allreduce"), program) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]


@pytest.mark.parametrize("data, options, words", [
    (torch.utils.data.DataLoader(Squares()), {}, "expected its data set"),
    (Squares(), {"num_worker": 1}, r"^run.loader\(num_worker=...\): not an option; expected shuffle, num_workers, "),
    (torch.ones(4), {"sampler": [1]}, r"^run.loader\(sampler=...\): run.loader itself chooses the samples"),
    (Squares(), {"drop_last": True}, "expected drop_last=False")])
def test_loader_rejects_data_loaders_and_drop_last(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainError, match=words):
        library(2, StrategyConfig("allreduce"), lambda run: run.loader(data, 2, **options))


def test_loader_rejects_different_data() -> None:
    with pytest.raises(TrainError, match="the data differs from that of rank 0"):
        library(3, StrategyConfig("allreduce"), lambda run: run.loader(np.zeros(4 + (run.rank == 2)), 2))
