"""Loaders of an IterableDataset: who gets which samples, and where a resumed run continues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from virtual_ranks import flat, library

from slurmdl.errors import TrainError
from slurmdl.train.library.run import Run
from slurmdl.train.library.stream_loader import WorkerBatches
from slurmdl.train.strategy_config import StrategyConfig

ALLREDUCE = StrategyConfig("allreduce")


class Numbers(IterableDataset):
    """0, 1, ..., in processes of a DataLoader every n-th; each epoch begins with another number."""

    def __init__(self, count: int) -> None:
        self.count, self.first = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.first = 1000 * epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, stride = (info.id, info.num_workers) if info else (0, 1)
        for number in range(self.first + start, self.first + self.count, stride):
            yield torch.full((2,), float(number))


def build() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-9)


def seen(run: Run, loader: Any, epochs: int = 1) -> list[list[float]]:
    """Train; return the samples of each step."""
    model, opt = build()
    run.wrap(model, opt)
    batches = []
    for _ in range(epochs):
        for batch in loader:
            opt.zero_grad()
            model(batch).square().mean().backward()
            opt.step()
            batches.append(batch[:, 0].tolist())
    run.finish()
    return batches


def test_workers_share_each_step_and_drop_the_incomplete_last_one() -> None:
    results = library(3, ALLREDUCE, lambda run: seen(run, run.loader(Numbers(29), batch_size=4), epochs=2))
    for worker, batches in enumerate(results):
        assert batches == [[float(1000 * epoch + 12 * step + 4 * worker + index) for index in range(4)]
                           for epoch in range(2) for step in range(2)]


def test_model_equals_one_process_on_all_samples() -> None:
    def program(run: Run) -> Any:
        model, opt = build()
        run.wrap(model, opt)
        for batch in run.loader(Numbers(24), batch_size=4):
            opt.zero_grad()
            model(batch).square().mean().backward()
            opt.step()
        run.finish()
        return flat(model)

    model, opt = build()
    for batch in DataLoader(Numbers(24), batch_size=12):
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()
    for result in library(3, ALLREDUCE, program):
        torch.testing.assert_close(result, flat(model), rtol=0, atol=1e-6)


def test_processes_of_a_data_loader_split_the_stream_as_in_plain_pytorch() -> None:
    """Two ranks with two processes each: every sample once, without those of incomplete groups of a process."""
    taken = []
    for rank in range(2):
        loader = DataLoader(WorkerBatches(Numbers(40), rank, 2, 3), batch_size=None, collate_fn=torch.stack,
                            num_workers=2)
        taken.append([batch[:, 0].tolist() for batch in loader])
    assert taken[0][0] == [0.0, 2.0, 4.0] and taken[1][0] == [6.0, 8.0, 10.0] and taken[0][1] == [1.0, 3.0, 5.0]
    assert len(taken[0]) == len(taken[1]) == 6
    numbers = sorted(number for batches in taken for batch in batches for number in batch)
    assert numbers == [float(number) for number in range(36)]


def test_resumed_run_continues_in_the_stream(tmp_path: Path) -> None:
    def program(run: Run, stop_after: int) -> list[list[float]]:
        model, opt = build()
        run.wrap(model, opt)
        loader, batches = run.loader(Numbers(20), batch_size=2), []
        for _ in range(loader.epoch, 2):
            for batch in loader:
                if len(batches) == stop_after:
                    return batches
                opt.zero_grad()
                model(batch).square().mean().backward()
                opt.step()
                batches.append(batch[:, 0].tolist())
        return batches

    def run_once(folder: Path, stop_after: int) -> list[Any]:
        return library(2, ALLREDUCE, lambda run: program(run, stop_after), checkpoint_dir=str(folder),
                       checkpoint_every=1)

    uninterrupted = run_once(tmp_path / "a", 100)
    assert len(uninterrupted[0]) == 10
    for stop in (0, 3, 5, 7):
        folder = tmp_path / str(stop)
        first, second = run_once(folder, stop), run_once(folder, 100)
        assert [a + b for a, b in zip(first, second, strict=True)] == uninterrupted, stop


@pytest.mark.parametrize(("count", "batch_size", "config", "message"), [
    (7, 4, ALLREDUCE, "Numbers yields fewer than 8 samples; expected 4 for each of 2 workers"),
    (20, 0, ALLREDUCE, "a batch of 0 samples; expected 1 or more"),
    (20, 2, StrategyConfig("allreduce", load_balance=True),
     "--load-balance: not valid with an IterableDataset, whose samples have no index")])
def test_unusable_streams_are_rejected(count: int, batch_size: int, config: StrategyConfig, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        library(2, config, lambda run: seen(run, run.loader(Numbers(count), batch_size=batch_size)))


def test_length_is_that_of_the_dataset_if_it_has_one() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.count

    def program(run: Run) -> int:
        with pytest.raises(TypeError, match="has no len"):
            len(run.loader(Numbers(9), batch_size=2))
        return len(run.loader(Sized(9), batch_size=2, drop_last=True))

    assert library(2, ALLREDUCE, program) == [2, 2]
