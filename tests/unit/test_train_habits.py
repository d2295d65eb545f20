"""Habits of PyTorch users with a wrapped model: copies of it, and files with a part of it."""

from __future__ import annotations

import copy
import io
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from virtual_ranks import attach_or_serve, flat, library, process_group

from slurmdl.errors import InvalidRunError, TrainError
from slurmdl.train import init, sync_islands
from slurmdl.train.library.checkpoint import CheckpointDir
from slurmdl.train.library.context import Counters
from slurmdl.train.library.replica import Replica
from slurmdl.train.library.run import Run
from slurmdl.train.library.training_step import GradientTracker
from slurmdl.train.strategy_config import StrategyConfig


def file_size(content: Any) -> int:
    file = io.BytesIO()
    torch.save(content, file)
    return file.tell()


@pytest.mark.parametrize("method", ["allreduce", "gossip"])
def test_wrapped_model_can_be_copied_and_saved(method: str) -> None:
    def program(run: Run) -> None:
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(model, opt)
        for x in run.loader(torch.ones(12, 300), 3):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module, loaded):
            assert torch.equal(other(x), model(x))
            with torch.no_grad():
                other[1].bias += 1
            assert not torch.equal(other[1].bias, model[1].bias)
        assert file_size(model[1].state_dict()) < 10_000 < file_size(model.state_dict())
    library(2, StrategyConfig(method), program)


def test_error_in_an_interactive_interpreter_does_not_end_it() -> None:
    lines = "from slurmdl.train import init\nrun = init()\ntypo\nprint(run.step + 41)\n"
    result = subprocess.run([sys.executable, "-i"], input=lines, text=True, capture_output=True, check=False)
    assert "NameError" in result.stderr and result.stdout == "41\n"


def test_error_of_a_script_starts_the_interactive_interpreter_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from slurmdl.train import init\nrun = init()\ntypo\n")
    result = subprocess.run([sys.executable, "-i", str(tmp_path / "script.py")], input="print(run.step + 41)\n",
                            text=True, capture_output=True, check=False)
    assert "NameError" in result.stderr and result.stdout == "41\n"


def train_with_checkpoints(run: Run, opt: Any, model: Any, steps: int) -> None:
    for x in run.loader(torch.ones(60, 3), 3).batches_until(steps):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("method", [
    StrategyConfig("allreduce"), StrategyConfig("gossip"), StrategyConfig("ps", ps=2)], ids=lambda it: it.strategy)
def test_run_with_numpy_scalars_resumes(method: StrategyConfig, tmp_path: Path) -> None:
    def program(steps: int) -> Any:
        def rank(run: Run) -> Any:
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            opt = torch.optim.SGD(model.parameters(), lr=np.float64(0.1), momentum=np.float32(0.5))
            opt.state[model.bias]["counted"] = np.int64(1)
            if attach_or_serve(run, model, opt):
                run.register_for_checkpointing("schedule", torch.optim.lr_scheduler.StepLR(opt, 2, np.float32(0.5)))
                train_with_checkpoints(run, opt, model, steps)
            return run.state.first_step, flat(model)
        return rank
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    library(4, method, program(4), **options)
    (first_step, resumed), *_ = library(4, method, program(6), **options)
    (_, uninterrupted), *_ = library(4, method, program(6))
    assert first_step == 4
    assert torch.allclose(resumed, uninterrupted, atol=1e-6)


def test_unreadable_state_leaves_the_former_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def program(run: Run) -> None:
        model = nn.Linear(3, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(model, opt)
        train_with_checkpoints(run, opt, model, 2)
        opt.param_groups[0]["note"] = Path("x")
        train_with_checkpoints(run, opt, model, 4)
        assert run.step == 4
    library(2, StrategyConfig("allreduce"), program, checkpoint_dir=str(tmp_path), checkpoint_every=2)
    assert re.search(r"train: no checkpoint of step 4: rank 0 on \S+: worker-0.pt: optimizer: param_groups: its "
                     r"state holds pathlib\S+; expected numbers, .*; the newest is of step 2\n",
                     capsys.readouterr().err)
    directory = CheckpointDir(str(tmp_path))
    assert list(directory.list_numbers()) == [2]
    assert directory.read_rank_file(directory.read_manifest(2), "worker-0")["step"] == 2


def fail_once(tensor: Any) -> None:
    """Make the next backward pass raise an error at the gradient of a tensor."""
    def fail(gradient: Any) -> None:
        handle.remove()
        raise MemoryError
    handle = tensor.register_hook(fail)


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("method", [
    StrategyConfig("allreduce"), StrategyConfig("gossip"), StrategyConfig("ps", ps=1)], ids=lambda it: it.strategy)
def test_error_in_a_backward_pass_may_be_caught(method: StrategyConfig, no_sync: bool) -> None:
    """On one worker twice in succession."""
    def program(failures: int) -> Any:
        def rank(run: Run) -> Any:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            if not attach_or_serve(run, model, opt):
                return None
            random = torch.Generator().manual_seed(run.rank)
            for step in range(4):
                x = torch.randn(5, 3, generator=random)
                for _ in range(failures if step == 1 and run.rank == 1 else 0):
                    fail_once(model[0].weight)
                    with pytest.raises(MemoryError), run.no_sync() if no_sync else nullcontext():
                        model(x).square().mean().backward()
                    opt.zero_grad()
                model(x).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                opt.step()
                opt.zero_grad()
            return run.step, flat(model)
        return rank
    results = [library(3, method, program(failures)) for failures in (0, 2)]
    for (step, model), (_, expected) in zip(*(filter(None, result) for result in results), strict=True):
        assert step == 4
        assert torch.equal(model, expected)


def test_error_in_a_backward_pass_that_has_sent_gradients_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    GradientTracker(Replica(model), Counters(), 1, True, on_start=lambda: None, on_ready=lambda start: True,
                    on_complete=lambda: None)
    fail_once(model[0].weight)
    with pytest.raises(MemoryError):
        model(torch.ones(2, 3)).sum().backward()
    for _ in range(2):
        with pytest.raises(TrainError, match=r"^step 1: a backward pass raised .*; expected `with run.no_sync"):
            model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_clips_gradients_with_mixed_precision(precision: Any) -> None:
    plugin = pytest.importorskip("lightning.pytorch.plugins").MixedPrecision(precision, "cpu")
    model = nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    run = init(StrategyConfig("allreduce"), environ={})
    run.attach(model, opt)
    before = flat(model)
    loss = 100 * model(torch.ones(1, 3)).sum()
    (plugin.scaler.scale(loss) if plugin.scaler else loss).backward()
    if plugin.scaler:
        plugin.scaler.unscale_(opt)
    plugin.clip_gradients(opt, 0.5)
    plugin.scaler.step(opt) if plugin.scaler else opt.step()
    assert float((flat(model) - before).norm()) == pytest.approx(0.5, rel=1e-3)
    run.close()


def test_different_initial_models_are_replaced_by_that_of_rank_0() -> None:
    """Adam's moments, constants and the parameters themselves are no copies."""
    def program(run: Run) -> Any:
        torch.manual_seed(run.rank)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        opt.zeros, opt.ones, opt.own = torch.zeros(2), [torch.ones(2)], opt  # type: ignore[attr-defined]
        opt.parameters = {"all": list(model.parameters())}  # type: ignore[attr-defined]
        model(torch.ones(2, 3)).sum().backward()
        opt.step()
        opt.zero_grad()
        run.attach(model, opt)
        return flat(model)
    first, second = library(2, StrategyConfig("gossip"), program)
    assert torch.equal(first, second)


@pytest.mark.parametrize("method", [
    StrategyConfig("allreduce"), StrategyConfig("gossip"), StrategyConfig("ps", ps=2),
    StrategyConfig("ps", ps=1, asynchronous=True)], ids=lambda it: f"{it.strategy}{it.asynchronous * '-async'}")
def test_workers_gather_metrics_while_servers_serve(method: StrategyConfig) -> None:
    """Before wrap(), between two steps, after the last one, and after finish()."""
    def program(run: Run) -> Any:
        run.world.transport.emulate_compute(0.001 * run.rank)
        gathered = [run.all_gather_object(run.rank)]
        model = nn.Linear(3, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        if not attach_or_serve(run, model, opt):
            with pytest.raises(TrainError, match=r"^all_gather_object\(\) on a parameter server: valid only before"):
                run.all_gather_object(0)
            return gathered
        for x in run.loader(torch.ones(24, 3), 2):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
            gathered.append(run.all_gather_object({"worker": run.worker_rank, "seen": torch.ones(run.step)}))
        run.finish()
        return [*gathered, run.all_gather_object("x" * run.worker_rank * 100_000)]
    results = library(4, method, program)
    workers = 4 - (method.ps or 0)
    first, *steps, last = results[-1]
    assert first == list(range(4))[-workers:] and all(result[0] == first for result in results)
    assert len(steps) == 12 // workers
    for number, objects in enumerate(steps, 1):
        assert [entry["worker"] for entry in objects] == list(range(workers))
        assert method.asynchronous or all(len(entry["seen"]) == number for entry in objects)
    assert [len(text) for text in last] == [100_000 * worker for worker in range(workers)]


class Normalized(nn.Module):
    """BatchNorm, with further buffers: constant, counted by one rank, not saved, and of a size that differs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("history", torch.zeros(1))

    def state_dict(self) -> Any:  # type: ignore[override]
        """As of scripts that filter entries, without options."""
        return super().state_dict()

    def forward(self, x: Any) -> Any:
        return self.layers(x)


@pytest.mark.parametrize("method", [
    StrategyConfig("allreduce"), StrategyConfig("gossip"), StrategyConfig("ps", ps=1)], ids=lambda it: it.strategy)
def test_buffers_are_equal_after_finish(method: StrategyConfig) -> None:
    def program(run: Run) -> Any:
        torch.manual_seed(0)
        model = Normalized()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        if not attach_or_serve(run, model, opt):
            return None
        assert run.worker_rank is not None
        for step in range(3):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + run.worker_rank))
            opt.zero_grad()
            model(x + run.worker_rank).square().mean().backward()
            opt.step()
        model.flags[0] = not run.worker_rank
        model.layers[1].num_batches_tracked += run.worker_rank
        model.cache += run.worker_rank
        model.history = torch.zeros(1 + run.worker_rank)
        before = copy.deepcopy(model.state_dict())
        run.finish()
        return before, model.state_dict(), model.cache.tolist()
    results = [result for result in library(3, method, program) if result]
    norm = "layers.1."
    for before, after, _ in results:
        for name in (f"{norm}running_mean", f"{norm}running_var"):
            mean = sum(each[name] for each, _, _ in results) / len(results)
            assert not torch.allclose(before[name], mean, rtol=1e-3)
            assert torch.allclose(after[name], mean, rtol=1e-6)
        assert after[f"{norm}num_batches_tracked"] == 3
        assert after["flags"].tolist() == [True, False]
        assert after["mask"].tolist() == [-torch.inf] * 3
        assert after["history"].shape == before["history"].shape
        for name, value in results[0][1].items():
            assert name == "history" or torch.equal(value, after[name])
    assert [cache[0] for _, _, cache in results] == list(range(len(results)))


@pytest.mark.parametrize("method", [
    StrategyConfig("allreduce"), StrategyConfig("gossip"), StrategyConfig("ps", ps=1)], ids=lambda it: it.strategy)
@pytest.mark.parametrize("steps", ["of the wrapped optimizer", "of another one", "none, without gradients"])
def test_run_without_steps_is_reported(method: StrategyConfig, steps: str,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    def program(run: Run) -> None:
        model = nn.Linear(3, 2)
        opt, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        if not attach_or_serve(run, model, opt):
            return
        if steps == "none, without gradients":
            model(torch.ones(2, 3))
        else:
            model(torch.ones(2, 3)).sum().backward()
            (opt if steps == "of the wrapped optimizer" else other).step()
        run.finish()
    library(3, method, program)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("slurmdl: ")]
    assert lines == ["slurmdl: train: the model has gradients, but no step was made; expected SGD.step() of the "
                     "optimizer that run.wrap() got"] * (steps == "of another one")


@pytest.mark.parametrize("steps", [True, False])
def test_outer_without_steps_is_reported(steps: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with process_group() as group:
        model = nn.Linear(3, 2)
        opt, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        sync = sync_islands(model, opt, group)
        model(torch.ones(2, 3)).sum().backward()
        (opt if steps else other).step()
        sync.finish()
    assert capsys.readouterr().err == (not steps) * (
        "slurmdl: train: the model has gradients, but no step was made; expected steps of the optimizer that "
        "sync_islands() got\n")


class BothOptimizers(torch.optim.Optimizer):
    """SparseAdam for embeddings, and Adam for the rest."""

    def __init__(self, model: nn.Module) -> None:
        sparse = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        dense = [tensor for tensor in model.parameters() if all(tensor is not other for other in sparse)]
        self.first, self.second = torch.optim.SparseAdam(sparse, lr=0.1), torch.optim.Adam(dense, lr=0.1)
        super().__init__([*self.first.param_groups, *self.second.param_groups], {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.first.step()
        self.second.step()


SPARSE_OPTIMIZERS = {
    "SparseAdam": lambda model: torch.optim.SparseAdam(list(model[0].parameters()), lr=0.1),
    "both": BothOptimizers, "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def train_embedding(run: Run | None, optimizer: str, workers: int) -> Any:
    """Rows differ between workers, and the first one uses none of the embedding in the third step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Linear(4, 2))
    opt = SPARSE_OPTIMIZERS[optimizer](model)
    if run and not attach_or_serve(run, model, opt):
        return None
    rank = run.worker_rank if run else 0
    assert rank is not None
    for step in range(6):
        opt.zero_grad(set_to_none=step % 2 == 0)
        parts = []
        for worker in range(rank, rank + 1) if run else range(workers):
            rows = torch.randint(3 * worker, 12, (5,), generator=torch.Generator().manual_seed(10 * step + worker))
            parts.append((model[1](torch.ones(5, 4)) if step == 2 and not worker else model(rows)).square().mean())
        (sum(parts) / len(parts)).backward()
        opt.step()
    return flat(model)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("method", [StrategyConfig("allreduce"), StrategyConfig("ps", ps=1)],
                         ids=lambda it: it.strategy)
@pytest.mark.parametrize("optimizer", SPARSE_OPTIMIZERS)
def test_sparse_gradients_equal_one_process(method: StrategyConfig, optimizer: str) -> None:
    workers = 3

    def program(run: Run) -> Any:
        return train_embedding(run, optimizer, workers)
    if method.ps and optimizer in ("SparseAdam", "both"):
        with pytest.raises(InvalidRunError, match=r"^[^\n]*--strategy ps: (SparseAdam|BothOptimizers) [^\n]*$"):
            library(workers + 1, method, program)
        return
    expected = train_embedding(None, optimizer, workers)
    for result in library(workers + (method.ps or 0), method, program):
        assert result is None or torch.allclose(result, expected, atol=1e-5)
    for result in library(1, StrategyConfig("allreduce"), lambda run: train_embedding(run, optimizer, 1)):
        assert torch.allclose(result, train_embedding(None, optimizer, 1), atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", SPARSE_OPTIMIZERS)
def test_sparse_gradients_with_gossip(optimizer: str) -> None:
    """Two workers exchange their models in each step."""
    first, second = library(2, StrategyConfig("gossip"), lambda run: train_embedding(run, optimizer, 2))
    assert torch.allclose(first, second, atol=1e-5)
    assert not torch.allclose(first, train_embedding(None, optimizer, 1))
