"""Load balancing: weights, hysteresis, positions, invalid options, and runs with stragglers."""

from __future__ import annotations

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
from virtual_ranks import flat

from slurmdl.errors import InvalidRunError, TrainError, UsageError
from slurmdl.train import compatibility, init
from slurmdl.train.library.load_balance import MIN_STEPS_BETWEEN_CHANGES, ThroughputEstimator, WorkShares
from slurmdl.train.library.run import Run
from slurmdl.train.library.sampling import GlobalBatches
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer.options import Straggler, parse_train_options
from slurmdl.train.trainer.trainer import train
from slurmdl.train.transports import virtual

SAMPLES, BATCH, EPOCHS = 1000, 10, 3
torch.set_num_threads(1)
random = np.random.default_rng(3)
X = torch.from_numpy(random.standard_normal((SAMPLES, 6)).astype(np.float32))
Y = torch.from_numpy(random.integers(0, 3, SAMPLES))


def net() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model: Any, opt: Any, x: Any, y: Any) -> None:
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()


def library(count: int, method: StrategyConfig, program: Callable[[Run, Any, Any], Any], **options: Any) -> list[Any]:
    """Results of `program` on `count` virtual ranks; servers only serve."""
    def rank(transport: virtual.VirtualTransport) -> Any:
        run = init(method, environ={}, transport=transport, **options)
        model, opt = net()
        run.attach(model, opt)
        result = program(run, model, opt)
        if run.is_server:
            run.serve()
        run.close()
        return result
    return virtual.run_virtual_ranks(count, rank)


def slowed(run: Run, samples: int) -> None:
    """Emulate a step; worker 1 takes 4 times as long, except in the second epoch."""
    slow = run.worker_rank == 1 and not 40 <= run.global_step < 80
    run.world.transport.emulate_compute(samples * (4e-3 if slow else 1e-3))


def trained(run: Run, model: Any, opt: Any) -> Any:
    """Model and batch sizes on a worker."""
    if run.is_server:
        run.loader((X, Y), BATCH)
        return None
    sizes, loader = [], run.loader((X, Y), BATCH)
    for _ in range(EPOCHS):
        for x, y in loader:
            slowed(run, len(x))
            step(model, opt, x, y)
            sizes.append(len(x))
    run.finish()
    return flat(model), sizes


@pytest.mark.parametrize("method, workers", [(StrategyConfig("allreduce", load_balance="batch-size"), 4),
                                             (StrategyConfig("allreduce", comm_pattern="mpi-allreduce",
                                                             load_balance="batch-size"), 3),
                                             (StrategyConfig("ps", ps=2, load_balance="batch-size"), 4)],
                         ids=["sum", "library", "ps"])
def test_balanced_batches_equal_global_batch(method: StrategyConfig, workers: int) -> None:
    model, opt = net()
    first = flat(model)
    deal = GlobalBatches(SAMPLES, workers, BATCH, True, 1)
    for epoch in range(EPOCHS):
        for index in global_batches(deal, epoch):
            step(model, opt, X[index], Y[index])
    assert (flat(model) - first).abs().max() > 1e-2, "the reference did not learn"
    found = [its for its in library(workers + (method.ps or 0), method, trained) if its]
    for mine, _ in found:
        assert torch.allclose(mine, flat(model), rtol=0, atol=1e-5)
    sizes = np.array([its for _, its in found])
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
        taken = seconds(shares)
        slowest.append(max(taken))
        shares.update([share / its for share, its in zip(shares.values, taken, strict=True)], step)
    assert slowest[0] == pytest.approx(0.41)
    assert slowest[-1] < 1.01 * (0.01 + 0.1 * 8 / 7.25)


WEIGHTS = (0.25, 1.25, 1.5, 1.0)


@pytest.mark.parametrize("traffic, compress",
                         [("random-matching", "none"), ("base-2", "int4"), ("one-peer-exponential", "none"),
                                               ("base-2", "fp16"), ("zone-aware", "none")])
def test_gossip_preserves_weighted_sum(traffic: str, compress: str) -> None:
    played = run_strategy(StrategyConfig("gossip", traffic, compression=compress), 4, 60, model_weights=WEIGHTS,
                          zones="aabb")
    first, last = (sum(weight * np.float64(getattr(its, name)) for weight, its in zip(WEIGHTS, played, strict=True))
                   for name in ("initial", "final"))
    assert np.abs(first - last).max() < 1e-3 * np.abs(first).max()
    assert [its.strategy.model_weight for its in played] == pytest.approx(WEIGHTS)


def test_push_sum_preserves_weighted_sum() -> None:
    played = run_strategy(StrategyConfig("gossip", "random-matching", asynchronous=True), 4, 40,
                          model_weights=WEIGHTS, update=noise(0.1),
                  step_seconds=lambda rank: 1e-3)
    before = sum(weight * np.float64(its.initial) + its.total_update for weight,
                 its in zip(WEIGHTS, played, strict=True))
    after = sum(its.strategy.model_weight * np.float64(its.final) for its in played)
    assert np.abs(after - before).max() < 1e-4
    assert sum(its.strategy.model_weight for its in played) == pytest.approx(sum(WEIGHTS))
    assert all(its.strategy.exchanges for its in played)


def test_straggler_does_not_accumulate_weight() -> None:
    """The others keep more than half beside a rank that is 4 times slower."""
    held = []
    for steps in range(30, 40):
        played = run_strategy(StrategyConfig("gossip", "random-matching", asynchronous=True), 8, steps,
                              update=noise(0.1),
                      step_seconds=lambda rank: 4.0 if rank == 0 else 1.0)
        held.append(sum(its.strategy.model_weight for its in played[1:]))
    assert np.mean(held) > 4


@pytest.mark.parametrize("compress", ["none", "int8"])
def test_local_sgd_uses_weighted_mean(compress: str) -> None:
    method = StrategyConfig("local-sgd", "ring", compression=compress, period=5, outer_lr=1.0, outer_momentum=0.0)
    played = run_strategy(method, 4, 5, model_weights=WEIGHTS)
    mean = sum(weight * np.float64(its.initial) for weight, its in zip(WEIGHTS, played, strict=True)) / 4
    for its in played:
        assert np.abs(its.final - mean).max() < (1e-5 if compress == "none" else 0.05)


METHODS = [StrategyConfig("allreduce", load_balance="batch-size"),
           StrategyConfig("gossip", "base-2", load_balance="batch-size"),
           StrategyConfig(
    "gossip", "base-2", period=5, load_balance="local-steps"), StrategyConfig(
        "local-sgd", period=8, load_balance="local-steps"),
           StrategyConfig("gossip", "random-matching", asynchronous=True, load_balance="local-steps"),
           StrategyConfig("gossip", "random-matching", asynchronous=True, load_balance="batch-size")]


@pytest.mark.parametrize("method", METHODS, ids=lambda its: f"{its.strategy}-{its.load_balance}-{its.asynchronous}")
@pytest.mark.parametrize("data", ["arrays", "dataset"])
def test_loader_assigns_every_sample_once_and_resumes_at_position(method: StrategyConfig, data: str) -> None:
    """After a restart within an epoch with fewer workers, the rest is assigned."""
    class Numbers(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> int:
            return index

    source: Any = Numbers() if data == "dataset" else np.arange(SAMPLES)

    def program(begin: dict[str, int] | None) -> Callable[[Run, Any, Any], Any]:
        def deal(run: Run, model: Any, opt: Any) -> Any:
            loader, seen, states = run.loader(source, BATCH), [], []
            if begin:
                loader.load_state_dict(begin)
                assert loader.state_dict() == begin
            for _ in range(1 if begin else 2):
                seen.append([])
                for index in loader:
                    slowed(run, len(index))
                    step(model, opt, X[index], Y[index])
                    seen[-1] += index.tolist()
                    states.append((run.global_step, loader.state_dict()))
            return seen, states
        return deal

    found = library(4, method, program(None))
    for epoch in range(2):
        assert sorted(sample for seen, _ in found for sample in seen[epoch]) == list(range(SAMPLES))
    assert found[0][1][-1][1]["epoch"] == 1
    # at a common step: rounds of 5 or 8 steps are over
    middle = {"epoch": 1, "cursor": 380} if method.asynchronous else next(
        state for done, state in found[0][1] if done == 40)
    rest = library(3, method, program(middle))
    dealt = sorted(sample for seen, _ in rest for sample in seen[0])
    rest_of_epoch = GlobalBatches(SAMPLES, 3, BATCH, True, 1).order(middle["epoch"])[middle["cursor"]:]
    assert dealt == sorted(rest_of_epoch.tolist())


@pytest.mark.parametrize("method, text", [
    (StrategyConfig("allreduce", "ring", load_balance="local-steps"),
     "--load-balance local-steps: each step takes all workers, so none can "
     "make more steps; asked for with allreduce --comm-pattern ring --trigger period --compression none; "
     "valid: --load-balance off, batch-size"),
    (StrategyConfig("ps", "shards", load_balance="local-steps"),
     "--load-balance local-steps: each step takes all workers"),
    (StrategyConfig("ps", "shards", max_staleness=2, load_balance="local-steps"),
     "--load-balance local-steps: each step takes all workers"),
    (StrategyConfig("gossip", "base-2", load_balance="local-steps"),
     "--load-balance local-steps: an exchange after every step leaves no steps"),
    (StrategyConfig("gossip", "base-2", shared_memory=True, period=4, load_balance="local-steps"),
     "--load-balance local-steps: not valid with --shared-memory")])
def test_invalid_load_balance_combinations_are_rejected(method: StrategyConfig, text: str) -> None:
    with pytest.raises(InvalidRunError) as refused:
        compatibility.check_compatibility(method)
    assert str(refused.value).startswith(text)
    assert "valid: " in str(refused.value)


def no_batch(run: Run, model: Any, opt: Any) -> None:
    step(model, opt, X, Y)


def two_loaders(run: Run, model: Any, opt: Any) -> None:
    run.loader((X, Y), BATCH)
    run.loader((X, Y), BATCH)


@pytest.mark.parametrize("program, options, words", [
    (no_batch, {}, "step 1: --load-balance batch-size requires a batch of run.loader"),
    (two_loaders, {}, r"--load-balance batch-size: requires one run.loader\(\) for all samples"),
    (no_batch, {"backward_passes_per_step": 2},
     "--load-balance batch-size: not valid with backward_passes_per_step=2")])
def test_scripts_without_balanced_loader_are_rejected(program: Callable[[Run, Any, Any], None],
                                                      options: dict[str, int],
                                         words: str) -> None:
    with pytest.raises(TrainError, match=words):
        library(2, StrategyConfig("allreduce", load_balance="batch-size"), program, **options)


def test_checkpoints_require_common_step(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunError, match="--checkpoint-dir: not valid with --load-balance local-steps --async"):
        library(
    2,
    StrategyConfig(
        "gossip",
        asynchronous=True,
        load_balance="local-steps"),
        no_batch,
         checkpoint_dir=str(tmp_path))


def test_load_balance_rejects_dirichlet_alpha() -> None:
    with pytest.raises(UsageError, match="--load-balance batch-size: not valid with --dirichlet-alpha"):
        parse_train_options(["--load-balance", "batch-size", "--dirichlet-alpha", "0.3"], {})


def test_straggler_option_parses_step_ranges() -> None:
    options = parse_train_options(["--virtual-ranks", "4", "--straggler", "3=4@100-200,1=2@50,0=1.5"], {})
    assert options.straggler == (Straggler(3, 4.0, 100, 200), Straggler(1, 2.0, 50), Straggler(0, 1.5))
    for text in ("3=4@", "3=4@-5", "3=4@5-5", "3=4@9-5", "3@4", "1=2,1=3@4"):
        with pytest.raises(UsageError, match="--straggler"):
            parse_train_options(["--virtual-ranks", "4", "--straggler", text], {})


def simulated(*arguments: str, slow: str = "5=4") -> dict[str, Any]:
    found = train(parse_train_options(["--virtual-ranks", "8", "--virtual-zones", "A:2x2,B:2x2", "--steps", "240",
                                       "--model", "mlp:32",
                         "--batch-size", "16", *(["--straggler", slow] if slow else []), *arguments], {}))
    assert found is not None
    return found


def kinds() -> Iterator[Any]:
    """Command lines of all balanced strategies."""
    for where in ("messages", "shared", "both"):
        for way in ("--load-balance batch-size", "--async --load-balance local-steps",
                    "--async --load-balance batch-size"):
            zones = {"messages": "", "shared": "--virtual-zones A:1x8", "both": "--virtual-zones A:2x2,B:1x4"}[where]
            memory = "" if where == "messages" else "--shared-memory"
            yield pytest.param(f"--strategy gossip {memory} {zones} {way}",
                               id=f"{where}-{way.replace('--', '').replace(' ', '-')}",
                               marks=pytest.mark.nightly if where == "shared" else ())
    for name, text in (
            ("period", "gossip --period 8 --load-balance local-steps"),
            ("local", "local-sgd --period 8 --load-balance local-steps"),
            ("local-batch", "local-sgd --period 8 --load-balance batch-size"),
            ("allreduce", "allreduce --load-balance batch-size"),
            ("drift", "adaptive-gossip --trigger-warmup 10 --load-balance local-steps"),
            ("ps", "ps --ps 1 --load-balance batch-size"),
            ("ps-stale", "ps --ps 1 --max-staleness 2 --load-balance batch-size"),
            ("ps-async", "ps --ps 1 --async --load-balance local-steps")):
        late = name in ("period", "local-batch", "ps")
        yield pytest.param(f"--strategy {text}", id=name, marks=pytest.mark.nightly if late else ())


@pytest.mark.parametrize("words", list(kinds()))
def test_balanced_run_reaches_accuracy_and_summed_speed(words: str) -> None:
    """On the virtual clock, compared with the sum of the ranks' speeds."""
    found = simulated(*words.split())
    equal = simulated(*words.replace("batch-size", "off").replace("local-steps", "off").split(), slow="")
    workers = found["num_workers"]
    at_once = (workers - 0.75) * 16 / 0.01
    # rounds of 4 steps, as with drift, leave little to shift
    assert found["samples_per_second"] > (0.65 if "adaptive" in words else 0.8) * at_once
    assert found["test_accuracy"] > equal["test_accuracy"] - 0.03
    total = [sum(np.multiply(its["steps_per_worker"], its["batch_size_per_worker"])) for its in (found, equal)]
    assert total[0] == pytest.approx(total[1], rel=1e-3)
    slow = 5 - found["num_servers"]  # its place among the workers
    uneven = found["steps_per_worker" if "steps" in words else "batch_size_per_worker"]
    assert uneven[slow] < 0.5 * np.median(uneven)


def test_temporary_straggler_regains_its_share() -> None:
    found = simulated("--strategy", "allreduce", "--load-balance", "batch-size", slow="5=4@40-80")
    for_ever = simulated("--strategy", "allreduce", "--load-balance", "batch-size")
    assert for_ever["batch_size_per_worker"][5] < 6 < 11 < found["batch_size_per_worker"][5] < 15


@needs_mpi
@pytest.mark.parametrize("words", [
    "allreduce --load-balance batch-size",
    *(pytest.param(words, marks=pytest.mark.nightly) for words in (
        "gossip --async --load-balance local-steps",
        "gossip --async --load-balance batch-size", "gossip --shared-memory --async --load-balance local-steps",
        "local-sgd --period 8 --load-balance local-steps", "ps --async --load-balance local-steps"))])
def test_straggler_over_mpi_gets_less_work(words: str, tmp_path: Path) -> None:
    steps, batch, file = 60, 16, tmp_path / "summary"
    done = mpirun(4, "-m", "slurmdl.train", "--strategy", *words.split(), "--steps", str(steps), "--batch-size",
                  str(batch), "--emulate-compute", "0.01", "--straggler", "2=5", "--model", "mlp:16",
                  "--summary", str(file))
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith("slurmdl:")]
    summary = json.loads(file.read_text())
    slow = 2 - summary["num_servers"]
    what = "steps_per_worker" if "steps" in words else "batch_size_per_worker"
    assert summary[what][slow] == min(summary[what])
    assert summary[what][slow] < 0.8 * max(summary[what])
    assert ("steps, by worker" if "steps" in words else "batch size, by worker") in done.stdout
    # 60 steps are two epochs of 23 (or, of three workers, 30) steps and a part of a third
    taken = round(sum(np.multiply(summary["steps_per_worker"], summary["batch_size_per_worker"])))
    epochs, rest = divmod(steps, GlobalBatches(1437, summary["num_workers"], batch, True, 1).steps_per_epoch)
    assert taken == epochs * 1437 + rest * summary["num_workers"] * batch
    assert summary["test_accuracy"] > 0.8
