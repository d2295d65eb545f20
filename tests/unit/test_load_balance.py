"""Load balancing: weights, hysteresis, positions, invalid options, and runs with stragglers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import mpirun, needs_mpi
from strategy_harness import global_batches, noise, run_strategy
from torch import nn
from virtual_ranks import flat, train_summary

from slurmdl.errors import InvalidRunError, TrainError, UsageError
from slurmdl.train import init
from slurmdl.train.library.load_balance import ThroughputEstimator
from slurmdl.train.library.run import Run
from slurmdl.train.library.sampling import MIN_STEPS_BETWEEN_CHANGES, GlobalBatches, WorkShares
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer.options import Straggler, parse_train_options
from slurmdl.train.transports import virtual

SAMPLES, BATCH, EPOCHS = 1000, 10, 3
torch.set_num_threads(1)
random = np.random.default_rng(3)
X = torch.from_numpy(random.standard_normal((SAMPLES, 6)).astype(np.float32))
Y = torch.from_numpy(random.integers(0, 3, SAMPLES))


def make_net() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model: Any, opt: Any, x: Any, y: Any) -> None:
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()


def library(count: int, method: StrategyConfig, program: Callable[[Run, Any, Any], Any], **options: Any) -> list[Any]:
    """Return the results of `program` on `count` virtual ranks; servers only serve."""
    def rank(transport: virtual.VirtualTransport) -> Any:
        run = init(method, environ={}, transport=transport, **options)
        model, opt = make_net()
        run.attach(model, opt)
        result = program(run, model, opt)
        if run.is_server:
            run.serve()
        run.close()
        return result
    return virtual.run_virtual_ranks(count, rank)


def emulate_step(run: Run, samples: int) -> None:
    """Emulate a step; worker 1 takes 4 times as long, except in the second epoch."""
    slow = run.worker_rank == 1 and not 40 <= run.global_step < 80
    run.world.transport.emulate_compute(samples * (4e-3 if slow else 1e-3))


def train_worker(run: Run, model: Any, opt: Any) -> Any:
    """Train on a worker; return the parameters and the batch sizes."""
    if run.is_server:
        run.loader((X, Y), BATCH)
        return None
    sizes, loader = [], run.loader((X, Y), BATCH)
    for _ in range(EPOCHS):
        for x, y in loader:
            emulate_step(run, len(x))
            step(model, opt, x, y)
            sizes.append(len(x))
    run.finish()
    return flat(model), sizes


@pytest.mark.parametrize("method, workers", [(StrategyConfig("allreduce", load_balance=True), 4),
                                             (StrategyConfig("allreduce", load_balance=True), 3),
                                             (StrategyConfig("ps", ps=2, load_balance=True), 4)],
                         ids=["allreduce-4", "allreduce-3", "ps"])
def test_balanced_batches_equal_global_batch(method: StrategyConfig, workers: int) -> None:
    model, opt = make_net()
    first = flat(model)
    batches = GlobalBatches(SAMPLES, workers, BATCH, True, 1)
    for epoch in range(EPOCHS):
        for index in global_batches(batches, epoch):
            step(model, opt, X[index], Y[index])
    assert (flat(model) - first).abs().max() > 1e-2, "the reference did not learn"
    results = [result for result in library(workers + (method.ps or 0), method, train_worker) if result]
    for parameters, _ in results:
        assert torch.allclose(parameters, flat(model), rtol=0, atol=1e-5)
    sizes = np.array([worker_sizes for _, worker_sizes in results])
    assert (sizes[:, :-1].sum(0) == workers * BATCH).sum() >= sizes.shape[1] - EPOCHS
    assert sizes[1, :3].tolist() == [BATCH] * 3
    assert sizes[1].min() <= 0.35 * BATCH


def test_throughput_is_averaged() -> None:
    speed = ThroughputEstimator()
    for samples, seconds in ((8, 1.0), (8, 4.0), (0, 1.0), (8, 0.0)):
        speed.measure(samples, seconds)
    assert speed.value == pytest.approx((8 + 2) / 2)
    for _ in range(60):
        speed.measure(8, 1.0)
    assert speed.value == pytest.approx(8, rel=1e-3)
    speed.measure(0 + 8, 2.0)
    assert speed.value == pytest.approx(0.8 * 8 + 0.2 * 4, rel=1e-3)


def test_shares_change_above_min_speedup_and_not_soon_again() -> None:
    shares = WorkShares(2)
    assert not shares.update([1.0, 0.95], 0)
    assert shares.values == (1.0, 1.0)
    assert shares.update([3.0, 1.0], 5)
    assert shares.values == (1.5, 0.5)
    assert not shares.update([1.0, 1.0], 5 + MIN_STEPS_BETWEEN_CHANGES - 1)
    assert shares.values == (1.5, 0.5)
    assert not shares.update([3.1, 1.0], 5 + MIN_STEPS_BETWEEN_CHANGES)
    assert shares.update([1.0, 1.0], 5 + MIN_STEPS_BETWEEN_CHANGES)
    assert shares.values == (1.0, 1.0)


def test_second_change_corrects_constant_step_cost() -> None:
    """One of eight at a quarter of the speed, 10 of 110 ms constant: the slowest is within 1 % of the optimum."""
    def seconds(shares: WorkShares) -> list[float]:
        return [0.01 + share * 0.1 * slow for share, slow in zip(shares.values, (1,) * 7 + (4,), strict=True)]

    shares, slowest = WorkShares(8), []
    for step in range(0, 100, 5):
        durations = seconds(shares)
        slowest.append(max(durations))
        shares.update([share / duration for share, duration in zip(shares.values, durations, strict=True)], step)
    assert slowest[0] == pytest.approx(0.41)
    assert slowest[-1] < 1.01 * (0.01 + 0.1 * 8 / 7.25)


WEIGHTS = (0.25, 1.25, 1.5, 1.0)


@pytest.mark.parametrize("traffic, compress",
                         [("random-matching", "none"), ("base-2", "int4"), ("one-peer-exponential", "none"),
                                               ("base-2", "fp16"), ("zone-aware", "none")])
def test_gossip_preserves_weighted_sum(traffic: str, compress: str) -> None:
    logs = run_strategy(StrategyConfig("gossip", traffic, compression=compress), 4, 60, model_weights=WEIGHTS,
                        zones="aabb")
    first, last = (sum(weight * np.float64(getattr(log, name)) for weight, log in zip(WEIGHTS, logs, strict=True))
                   for name in ("initial", "final"))
    assert np.abs(first - last).max() < 1e-3 * np.abs(first).max()
    assert [log.strategy.model_weight for log in logs] == pytest.approx(WEIGHTS)


def test_push_sum_preserves_weighted_sum() -> None:
    logs = run_strategy(StrategyConfig("gossip", "random-matching", asynchronous=True), 4, 40,
                        model_weights=WEIGHTS, update=noise(0.1),
                  step_seconds=lambda rank: 1e-3)
    before = sum(weight * np.float64(log.initial) + log.total_update for weight,
                 log in zip(WEIGHTS, logs, strict=True))
    after = sum(log.strategy.model_weight * np.float64(log.final) for log in logs)
    assert np.abs(after - before).max() < 1e-4
    assert sum(log.strategy.model_weight for log in logs) == pytest.approx(sum(WEIGHTS))
    assert all(log.strategy.exchanges for log in logs)


def test_straggler_does_not_accumulate_weight() -> None:
    """One rank is 4 times slower; the others keep more than half of their weight."""
    weights = []
    for steps in range(30, 40):
        logs = run_strategy(StrategyConfig("gossip", "random-matching", asynchronous=True), 8, steps,
                            update=noise(0.1),
                      step_seconds=lambda rank: 4.0 if rank == 0 else 1.0)
        weights.append(sum(log.strategy.model_weight for log in logs[1:]))
    assert np.mean(weights) > 4


@pytest.mark.parametrize("compress", ["none", "int8"])
def test_local_sgd_uses_weighted_mean(compress: str) -> None:
    method = StrategyConfig("local-sgd", "ring", compression=compress, period=5, outer_lr=1.0, outer_momentum=0.0)
    logs = run_strategy(method, 4, 5, model_weights=WEIGHTS)
    mean = sum(weight * np.float64(log.initial) for weight, log in zip(WEIGHTS, logs, strict=True)) / 4
    for log in logs:
        assert np.abs(log.final - mean).max() < (1e-5 if compress == "none" else 0.05)


METHODS = [StrategyConfig("allreduce", load_balance=True),
           StrategyConfig("gossip", "base-2", period=5, load_balance=True),
           StrategyConfig("local-sgd", period=8, load_balance=True),
           StrategyConfig("gossip", "random-matching", asynchronous=True, load_balance=True)]


@pytest.mark.parametrize("method", METHODS, ids=lambda value: f"{value.strategy}-{value.asynchronous}")
@pytest.mark.parametrize("data", ["arrays", "dataset"])
def test_loader_assigns_every_sample_once_and_resumes_at_position(method: StrategyConfig, data: str) -> None:
    """After a restart within an epoch with fewer workers, the remaining samples are assigned."""
    class Numbers(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> int:
            return index

    source: Any = Numbers() if data == "dataset" else np.arange(SAMPLES)

    def program(begin: dict[str, int] | None) -> Callable[[Run, Any, Any], Any]:
        def load_epochs(run: Run, model: Any, opt: Any) -> Any:
            loader, indices, states = run.loader(source, BATCH), [], []
            if begin:
                loader.load_state_dict(begin)
                assert loader.state_dict() == begin
            for _ in range(1 if begin else 2):
                indices.append([])
                for index in loader:
                    emulate_step(run, len(index))
                    step(model, opt, X[index], Y[index])
                    indices[-1] += index.tolist()
                    states.append((run.global_step, loader.state_dict()))
            return indices, states
        return load_epochs

    results = library(4, method, program(None))
    for epoch in range(2):
        assert sorted(sample for indices, _ in results for sample in indices[epoch]) == list(range(SAMPLES))
    assert results[0][1][-1][1]["epoch"] == 1
    # a common step at which rounds of 5 and of 8 steps have ended
    middle = {"epoch": 1, "cursor": 380} if method.asynchronous else next(
        state for steps_done, state in results[0][1] if steps_done == 40)
    resumed = library(3, method, program(middle))
    assigned = sorted(sample for indices, _ in resumed for sample in indices[0])
    rest_of_epoch = GlobalBatches(SAMPLES, 3, BATCH, True, 1).order(middle["epoch"])[middle["cursor"]:]
    assert assigned == sorted(rest_of_epoch.tolist())


def create_no_loader(run: Run, model: Any, opt: Any) -> None:
    step(model, opt, X, Y)


def create_two_loaders(run: Run, model: Any, opt: Any) -> None:
    run.loader((X, Y), BATCH)
    run.loader((X, Y), BATCH)


@pytest.mark.parametrize("program, options, words", [
    (create_no_loader, {}, "step 1: --load-balance requires a batch of run.loader"),
    (create_two_loaders, {}, r"--load-balance: requires one run.loader\(\) for all samples"),
    (create_no_loader, {"backward_passes_per_step": 2},
     "--load-balance: not valid with backward_passes_per_step=2")])
def test_scripts_without_balanced_loader_are_rejected(program: Callable[[Run, Any, Any], None],
                                                      options: dict[str, int],
                                         words: str) -> None:
    with pytest.raises(TrainError, match=words):
        library(2, StrategyConfig("allreduce", load_balance=True), program, **options)


def test_checkpoints_require_common_step(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunError, match="--checkpoint-dir: not valid with --load-balance --async"):
        library(2, StrategyConfig("gossip", asynchronous=True, load_balance=True), create_no_loader,
                checkpoint_dir=str(tmp_path))


def test_load_balance_rejects_dirichlet_alpha() -> None:
    with pytest.raises(UsageError, match="--load-balance: not valid with --dirichlet-alpha"):
        parse_train_options(["--load-balance", "--dirichlet-alpha", "0.3"], {})


def test_straggler_option_parses_step_ranges() -> None:
    options = parse_train_options(["--virtual-ranks", "4", "--straggler", "3=4@100-200,1=2@50,0=1.5"], {})
    assert options.straggler == (Straggler(3, 4.0, 100, 200), Straggler(1, 2.0, 50), Straggler(0, 1.5))
    for text in ("3=4@", "3=4@-5", "3=4@5-5", "3=4@9-5", "3@4", "1=2,1=3@4"):
        with pytest.raises(UsageError, match="--straggler"):
            parse_train_options(["--virtual-ranks", "4", "--straggler", text], {})


@functools.cache
def simulate_run(*arguments: str, slow: str = "5=4") -> dict[str, Any]:
    return train_summary("--virtual-ranks 8 --virtual-zones A:2x2,B:2x2 --steps 240 --model mlp:32 --batch-size 16",
                         f"--straggler {slow}" if slow else "", *arguments)


def balanced_runs() -> Iterator[Any]:
    """Command lines of all balanced strategies."""
    for level in ("messages", "shared", "both"):
        for balance in ("--load-balance", "--async --load-balance"):
            zones = {"messages": "", "shared": "--virtual-zones A:1x8", "both": "--virtual-zones A:2x2,B:1x4"}[level]
            memory = "" if level == "messages" else "--shared-memory"
            few = (level, balance) in (("messages", "--load-balance"), ("both", "--async --load-balance"))
            yield pytest.param(f"--strategy gossip {memory} {zones} {balance}",
                               id=f"{level}-{balance.replace('--', '').replace(' ', '-')}",
                               marks=() if few else pytest.mark.nightly)
    for name, text in (
            ("local-sgd", "local-sgd --period 8 --load-balance"),
            ("allreduce", "allreduce --load-balance"),
            ("drift", "adaptive-gossip --load-balance"),
            ("ps", "ps --ps 1 --load-balance"),
            ("ps-async", "ps --ps 1 --async --load-balance")):
        late = name not in ("allreduce", "ps-async")
        yield pytest.param(f"--strategy {text}", id=name, marks=pytest.mark.nightly if late else ())


@pytest.mark.parametrize("words", list(balanced_runs()))
def test_balanced_run_reaches_accuracy_and_summed_speed(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the virtual clock, compared with the sum of the ranks' speeds."""
    monkeypatch.setattr("slurmdl.train.triggers.MAX_WARMUP_STEPS", 10)
    balanced = simulate_run(*words.split())
    equal = simulate_run(*words.replace("--load-balance", "").split(), slow="")
    workers = balanced["num_workers"]
    ideal_speed = (workers - 0.75) * 16 / 0.01
    assert balanced["samples_per_second"] > 0.8 * ideal_speed
    assert balanced["test_accuracy"] > equal["test_accuracy"] - 0.03
    total = [sum(np.multiply(run["steps_per_worker"], run["batch_size_per_worker"])) for run in (balanced, equal)]
    assert total[0] == pytest.approx(total[1], rel=1e-3)
    slow = 5 - balanced["num_servers"]  # index of the slow rank among the workers
    uneven = balanced["steps_per_worker" if "--async" in words else "batch_size_per_worker"]
    assert uneven[slow] < 0.5 * np.median(uneven)


def test_temporary_straggler_regains_its_share() -> None:
    temporary = simulate_run("--strategy", "allreduce", "--load-balance", slow="5=4@40-80")
    permanent = simulate_run("--strategy", "allreduce", "--load-balance")
    assert permanent["batch_size_per_worker"][5] < 6 < 11 < temporary["batch_size_per_worker"][5] < 15


@needs_mpi
@pytest.mark.parametrize("words", [
    "allreduce --load-balance",
    *(pytest.param(words, marks=pytest.mark.nightly) for words in (
        "gossip --async --load-balance", "gossip --shared-memory --async --load-balance",
        "local-sgd --period 8 --load-balance", "ps --async --load-balance"))])
def test_straggler_over_mpi_gets_less_work(words: str, tmp_path: Path) -> None:
    steps, batch, file = 60, 16, tmp_path / "summary"
    ranks = 3 if words.startswith("ps") else 2
    proc = mpirun(ranks, "-m", "slurmdl.train", "--strategy", *words.split(), "--steps", str(steps),
                  "--batch-size", str(batch), "--emulate-compute", "0.01", "--straggler", "1=5", "--model", "mlp:16",
                  "--summary", str(file))
    assert proc.returncode == 0, proc.stderr
    assert not [line for line in proc.stderr.splitlines() if line.startswith("slurmdl:")]
    summary = json.loads(file.read_text())
    slow = 1 - summary["num_servers"]
    key = "steps_per_worker" if "--async" in words else "batch_size_per_worker"
    assert summary[key][slow] == min(summary[key])
    assert summary[key][slow] < 0.8 * max(summary[key])
    assert ("steps, by worker" if "--async" in words else "batch size, by worker") in proc.stdout
    # 60 steps are an epoch of 45 steps and part of a second epoch
    samples = round(sum(np.multiply(summary["steps_per_worker"], summary["batch_size_per_worker"])))
    epochs, remainder = divmod(steps, GlobalBatches(1437, summary["num_workers"], batch, True, 1).steps_per_epoch)
    assert samples == epochs * 1437 + remainder * summary["num_workers"] * batch
    assert summary["test_accuracy"] > 0.8
