"""Islands: equal models inside, exact exchanges between them, and which bytes leave an island."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import mpirun, needs_mpi, torchrun
from virtual_ranks import flat, library, on_zones, train_summary

from slurmdl.errors import InvalidOptionsError, InvalidRunError
from slurmdl.plan import Plan, decode_plan, encode_plan, group_ranks
from slurmdl.train import init
from slurmdl.train.library.checkpoint_restore import export_model
from slurmdl.train.library.run import Run
from slurmdl.train.strategies.islands import state_of_piece
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train
from slurmdl.train.transports import virtual

torch.set_num_threads(1)
STEPS, LR, MOMENTUM = 12, 0.1, 0.9
ZONES = ["aabb", "abab", "aaab", "aabbc", "aaabb", "abc"]
PLACES = "export SLURMD_NODENAME=n$R SLURM_TOPOLOGY_ADDR=z$((R / 2)).n$R SLURM_TOPOLOGY_ADDR_PATTERN=switch.node"


def make_model() -> Any:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def loss_of(model: Any, rank: int, step: int) -> Any:
    """Loss of a rank in a step, on data of its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 5, generator=generator)
    return (model(x) - (rank + 1) * x.sum(1, keepdim=True)).square().mean()


def models_of_run(run: Run) -> list[Any]:
    """The model after each step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    run.wrap(model, optimizer)
    models = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, run.rank, step).backward()
        optimizer.step()
        models.append(flat(model))
    return models


def reference_models(zones: str, exchange: Callable[[list[Any], list[int], int], list[Any]]) -> list[list[Any]]:
    """The model of each island after each step, trained in one process.

    `exchange` takes the flat models of the islands, their sizes and the step, and returns the models after it.
    """
    islands = group_ranks(range(len(zones)), zones)
    models = [make_model() for _ in islands]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM) for model in models]
    history: list[list[Any]] = [[] for _ in islands]
    for step in range(STEPS):
        for model, optimizer, island in zip(models, optimizers, islands, strict=True):
            optimizer.zero_grad()
            (sum(loss_of(model, rank, step) for rank in island) / len(island)).backward()
            optimizer.step()
        for index, vector in enumerate(exchange([flat(model) for model in models], list(map(len, islands)), step)):
            torch.nn.utils.vector_to_parameters(vector.clone(), models[index].parameters())
            history[index].append(vector.clone())
    return history


class OuterMomentum:
    """DiLoCo's outer step on the mean of the islands' changes, weighted by their numbers of ranks."""

    def __init__(self, period: int, lr: float, momentum: float) -> None:
        self._period, self._lr, self._momentum = period, lr, momentum
        self._parameters = flat(make_model())
        self._velocity = torch.zeros_like(self._parameters)

    def __call__(self, models: list[Any], sizes: list[int], step: int) -> list[Any]:
        if (step + 1) % self._period:
            return models
        change = sum(size * model for model, size in zip(models, sizes, strict=True)) / sum(sizes) - self._parameters
        self._velocity = self._momentum * self._velocity + change
        self._parameters = self._parameters + self._lr * (change + self._momentum * self._velocity)
        return [self._parameters.clone() for _ in models]


def check_against_reference(zones: str, results: list[Any], reference: list[list[Any]]) -> None:
    """Models inside an island are bitwise equal in every step, and those of the reference within rounding."""
    for index, island in enumerate(group_ranks(range(len(zones)), zones)):
        for step in range(STEPS):
            for rank in island:
                assert torch.equal(results[rank][step], results[island[0]][step]), (rank, step)
            torch.testing.assert_close(results[island[0]][step], reference[index][step], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("zones", ZONES)
@pytest.mark.parametrize("pattern", ["ring", "hierarchical"])
def test_local_sgd_equals_one_process_per_island(zones: str, pattern: str) -> None:
    config = StrategyConfig("local-sgd", pattern, islands="zone", period=3, outer_lr=0.6, outer_momentum=0.4)
    reference = reference_models(zones, OuterMomentum(3, 0.6, 0.4))
    check_against_reference(zones, on_zones(zones, config, models_of_run), reference)


@pytest.mark.parametrize("zones", ["aabb", "aaabbcccc", "abbccc"])
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_pieces_that_overlap_with_steps_equal_those_that_do_not(zones: str, compression: str,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """With a local share of 0, steps during an exchange have no effect: like an exchange that many steps earlier."""
    monkeypatch.setattr("slurmdl.train.strategies.local_sgd.LOCAL_SHARE", np.float32(0))

    def program(overlap: int) -> Callable[[Run], list[Any]]:
        def run_program(run: Run) -> list[Any]:
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            run.wrap(model, optimizer)
            for step in range(STEPS):
                # without steps during an exchange
                optimizer.param_groups[0]["lr"] = LR if step % 4 < 2 else 0.0
                optimizer.zero_grad()
                loss_of(model, run.rank, step).backward()
                optimizer.step()
            return [flat(model)]
        return run_program

    results = [on_zones(zones, StrategyConfig("local-sgd", islands="zone", period=4, overlap=overlap,
                                              compression=compression), program(overlap)) for overlap in (0, 2)]
    for without, overlapped in zip(*results, strict=True):
        assert torch.equal(without[0], overlapped[0])


@pytest.mark.parametrize("zones", ["aabb", "aaab"])
def test_fragments_in_islands_have_outer_steps_of_their_own(zones: str) -> None:
    config = StrategyConfig("local-sgd", islands="zone", period=6, fragments=2, outer_lr=0.6, outer_momentum=0.4)
    size = flat(make_model()).numel()
    outer_steps = [OuterMomentum(1, 0.6, 0.4) for _ in range(2)]

    def exchange(models: list[Any], sizes: list[int], step: int) -> list[Any]:
        if (step + 1) % 3:
            return models
        fragment = step // 3 % 2
        part = slice(size * fragment // 2, size * (fragment + 1) // 2)
        # the other fragment's parameters do not change what this one computes
        updated = outer_steps[fragment](models, sizes, step)
        return [torch.cat([model[:part.start], new[part], model[part.stop:]])
                for model, new in zip(models, updated, strict=True)]

    check_against_reference(zones, on_zones(zones, config, models_of_run), reference_models(zones, exchange))


def test_nodes_as_islands_sum_in_shared_memory() -> None:
    """Ranks 0, 1 and 4 share a node; the zones do not matter."""
    config = StrategyConfig("local-sgd", islands="node", period=3)
    nodes = "aabba"
    reference = reference_models(nodes, OuterMomentum(3, *config.outer_step))
    check_against_reference(nodes, on_zones("xyxyx", config, models_of_run, nodes), reference)


@pytest.mark.parametrize("zones", ["aabb", "abab", "aaabbb"])
def test_gossip_of_two_islands_averages_them(zones: str) -> None:
    config = StrategyConfig("gossip", "base-2", islands="zone", period=4)

    def average(models: list[Any], sizes: list[int], step: int) -> list[Any]:
        return [sum(models) / 2] * 2 if (step + 1) % 4 == 0 else models

    check_against_reference(zones, on_zones(zones, config, models_of_run), reference_models(zones, average))


@pytest.mark.parametrize("zones", ["aabb", "aaabbb"])
def test_gossip_of_islands_with_outer_optimizer(zones: str) -> None:
    config = StrategyConfig("gossip", "base-2", islands="zone", period=4, outer_lr=0.6, outer_momentum=0.4)
    outer = [flat(make_model()) for _ in range(2)]
    velocity = [torch.zeros_like(vector) for vector in outer]

    def exchange(models: list[Any], sizes: list[int], step: int) -> list[Any]:
        if (step + 1) % 4:
            return models
        for index in range(2):
            velocity[index] = 0.4 * velocity[index] + 0.6 * (sum(models) / 2 - outer[index])
            outer[index] = outer[index] + velocity[index]
        return [vector.clone() for vector in outer]

    check_against_reference(zones, on_zones(zones, config, models_of_run), reference_models(zones, exchange))


@pytest.mark.parametrize("zones", ["aaab", "aabbc", "abbccc"])
def test_gossip_keeps_the_mean_of_unequal_islands(zones: str) -> None:
    """Without updates, exchanges move the islands' models to their mean, weighted by the numbers of ranks."""
    def program(run: Run) -> list[Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        run.wrap(model, optimizer)
        models = []
        for step in range(40):
            optimizer.param_groups[0]["lr"] = LR if step < 2 else 0.0
            optimizer.zero_grad()
            loss_of(model, run.rank, step).backward()
            optimizer.step()
            models.append(flat(model))
        return models

    results = on_zones(zones, StrategyConfig("gossip", islands="zone", period=3), program)
    before, after = (torch.stack([models[step] for models in results]) for step in (1, -1))
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-4, atol=1e-5)
    distance = [float((models - models.mean(0)).norm() / models.norm()) for models in (before, after)]
    assert distance[0] > 0.05 and distance[1] < 0.05 * distance[0]


@pytest.mark.parametrize("config", [
    StrategyConfig("local-sgd", islands="zone", period=2, compression="int4"),
    StrategyConfig("local-sgd", islands="zone", period=6, fragments=2, overlap=1, compression="int8"),
    StrategyConfig("local-sgd", islands="zone", period=3, compression="sign"),
    StrategyConfig("gossip", "base-2", islands="zone", compression="sign"),
    StrategyConfig("gossip", "one-peer-exponential", islands="zone", period=2),
    StrategyConfig("adaptive-gossip", "zone-aware", islands="zone", comm_budget=0.2)],
    ids=lambda config: f"{config.strategy}-{config.compression}" if isinstance(config, StrategyConfig) else config)
@pytest.mark.parametrize("zones", ["aabb", "aaabbcccc"])
def test_models_of_an_island_remain_equal(config: StrategyConfig, zones: str) -> None:
    results = on_zones(zones, config, models_of_run, check_every=1)
    islands = group_ranks(range(len(zones)), zones)
    for step in range(STEPS):
        assert len({tuple(results[rank][step].tolist()) for rank in range(len(zones))}) <= len(islands)
        for island in islands:
            assert all(torch.equal(results[rank][step], results[island[0]][step]) for rank in island)


@pytest.mark.parametrize("zones", ["ab", "aabb", "aaabb"])
def test_an_exchange_sends_one_model_from_each_of_two_islands(zones: str) -> None:
    """Whatever the number of ranks; and no gradient leaves an island."""
    def program(run: Run) -> tuple[int, int]:
        models_of_run(run)
        return run.p2p.bytes_sent["inter_zone"], run.strategy.exchanges

    results = on_zones(zones, StrategyConfig("local-sgd", islands="zone", period=5), program)
    assert {exchanges for _, exchanges in results} == {STEPS // 5}
    for island in group_ranks(range(len(zones)), zones):
        assert sum(results[rank][0] for rank in island) == STEPS // 5 * 4 * flat(make_model()).numel()


@pytest.mark.parametrize("strategy", ["local-sgd", "gossip"])
def test_load_balance_between_islands(strategy: str) -> None:
    """An island's step uses the mean over its samples, and its model weighs as much as its samples."""
    period, zones, slow_rank = 5, "aaabb", 4
    x = torch.randn(600, 5, generator=torch.Generator().manual_seed(4))
    y = x.square().sum(1, keepdim=True)

    def train_rank(run: Run) -> tuple[list[Any], Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR / 10, momentum=MOMENTUM)
        run.wrap(model, optimizer)
        batches, loader = [], run.loader(np.arange(600), 4)
        for _ in range(3):
            for index in loader:
                run.world.transport.emulate_compute(len(index) * (4e-3 if run.rank == slow_rank else 1e-3))
                optimizer.zero_grad()
                (model(x[index]) - y[index]).square().mean().backward()
                optimizer.step()
                batches.append(index)
        return batches, flat(model)

    config = StrategyConfig(strategy, "base-2" if strategy == "gossip" else None, islands="zone", period=period,
                            load_balance=True, outer_lr=1.0, outer_momentum=0.0)
    results = on_zones(zones, config, train_rank)
    islands = group_ranks(range(len(zones)), zones)
    models = [make_model() for _ in islands]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR / 10, momentum=MOMENTUM) for model in models]
    samples = []
    for step, batches in enumerate(zip(*(batches for batches, _ in results), strict=True)):
        samples = [torch.cat([batches[rank] for rank in island]) for island in islands]
        for model, optimizer, index in zip(models, optimizers, samples, strict=True):
            optimizer.zero_grad()
            (model(x[index]) - y[index]).square().mean().backward()
            optimizer.step()
        if (step + 1) % period == 0:
            # sizes of full batches; the last one of an epoch is larger
            weights = np.array([len(index) for index in samples]) / sum(map(len, samples))
            mean = sum(float(weight) * flat(model) for weight, model in zip(weights, models, strict=True))
            for model in models:
                torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    assert len(results[slow_rank][0][0]) == 4 and len(results[slow_rank][0][-2]) == 1
    for island, model in zip(islands, models, strict=True):
        for rank in island:
            torch.testing.assert_close(results[rank][1], flat(model), rtol=1e-3, atol=1e-4)


def test_islands_of_the_plan_are_used() -> None:
    """Unless the options name another strategy."""
    plan = Plan("gossip", ("n0", "n1", "n2"), ("worker",) * 3, {"n0": ("x",), "n1": ("y",), "n2": ("x",)},
                islands="zone")

    def program(run: Run) -> tuple[Any, ...]:
        models_of_run(run)
        return run.world.config.islands, run.strategy.replica_groups

    def rank(config: StrategyConfig) -> Callable[[virtual.VirtualTransport], Any]:
        def start(transport: virtual.VirtualTransport) -> Any:
            environ = {"SLURMD_NODENAME": f"n{transport.rank}", "SLURMDL_PLAN": encode_plan(plan)}
            run = init(config, environ=environ, transport=transport)
            result = program(run)
            run.close()
            return result
        return start

    assert virtual.run_virtual_ranks(3, rank(StrategyConfig())) == [("zone", [[0, 2], [1]])] * 3
    assert virtual.run_virtual_ranks(3, rank(StrategyConfig("local-sgd"))) == [(None, [])] * 3
    assert decode_plan(encode_plan(plan)) == plan


def summary(words: str, steps: int = 20, **options: Any) -> dict[str, Any]:
    return train_summary(words, "--islands zone --model mlp:16", steps=steps, **options)


@pytest.mark.parametrize("words", ["--strategy local-sgd --period 4", "--strategy gossip --period 4",
                                   "--preset noloco --period 4 --optimizer sgd",
                                   "--strategy local-sgd --period 6 --fragments 2 --overlap 2 --compression int8"])
def test_run_resumes_on_other_islands_from_the_mean(words: str, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (f"{words} --virtual-ranks {ranks} --virtual-zones {zones}" for ranks, zones in (
        (4, "A:2,B:2"), (5, "A:1,B:3,C:1")))
    summary(before, 8, checkpoint_dir=tmp_path, checkpoint_every=8)
    resumed = summary(after, 40, checkpoint_dir=tmp_path)
    assert "resumed after step 8" in capsys.readouterr().err
    assert resumed["num_workers"] == 5
    assert resumed["test_accuracy"] > 0.5


def test_checkpoint_has_one_model_per_island(tmp_path: Path) -> None:
    """Resuming is bitwise, also of ranks that saved no model; an export weighs islands by their ranks."""
    words = "--strategy gossip --period 5 --virtual-ranks 4 --virtual-zones A:3,B:1"
    whole = summary(words, 16)
    summary(words, 8, checkpoint_dir=tmp_path, checkpoint_every=8)
    files = [torch.load(tmp_path / "step-00000008" / f"worker-{rank}.pt", weights_only=False) for rank in range(4)]
    assert [file["model"] is not None for file in files] == [True, False, False, True]
    assert export_model(str(tmp_path), None, str(tmp_path / "model.pt")) == (8, 2)
    exported = torch.load(tmp_path / "model.pt")
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, 0.75 * files[0]["model"][name] + 0.25 * files[3]["model"][name])
    resumed = summary(words, 16, checkpoint_dir=tmp_path)
    assert resumed["parameters_crc32"] == whole["parameters_crc32"]


def test_state_of_a_piece_is_joined_from_others() -> None:
    saved = {3: {"momentum": torch.tensor([3.0, 4.0]), "exchanges": 7, "pending": None},
             0: {"momentum": torch.tensor([0.0, 1.0, 2.0]), "exchanges": 7, "pending": torch.tensor([1.0])}}
    state = state_of_piece(saved, slice(2, 4))
    assert state["momentum"].tolist() == [2.0, 3.0] and state["exchanges"] == 7 and "pending" not in state


@pytest.mark.parametrize("words, facts", [
    ("--strategy allreduce", ("--islands zone", "local-sgd or synchronous gossip")),
    ("--strategy ps", ("--islands zone",)),
    ("--strategy gossip --async", ("--islands zone", "no --islands")),
    ("--strategy gossip --shared-memory", ("--shared-memory: not valid with --islands zone",)),
    ("--preset noloco --islands zone --async", ("--outer-lr: not valid with strategy gossip", "without --async")),
    ("--strategy allreduce --outer-momentum 0.5", ("--outer-momentum", "expected local-sgd or gossip"))])
def test_invalid_combination_is_rejected(words: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidOptionsError) as caught:
        summary(f"{words} --virtual-ranks 4 --virtual-zones A:2,B:2")
    assert all(fact in str(caught.value) for fact in facts), caught.value


def test_unknown_zone_and_too_small_model_are_rejected() -> None:
    with pytest.raises(InvalidOptionsError, match=r"--islands zone: the zone of rank 0 on .* is unknown"):
        library(2, StrategyConfig("gossip", islands="zone"), models_of_run)

    def program(run: Run) -> None:
        model = torch.nn.Linear(1, 1)
        run.wrap(model, torch.optim.SGD(model.parameters(), lr=LR))

    with pytest.raises(InvalidRunError, match=r"--islands zone: 2 parameters cannot be split.* at least 3"):
        on_zones("aaab", StrategyConfig("gossip", islands="zone"), program)


@needs_mpi
@pytest.mark.parametrize("options", [
    "--strategy local-sgd --islands zone --period 8 --fragments 2 --overlap 2 --compression int4",
    pytest.param("--strategy adaptive-gossip --islands zone --comm-budget 20%", marks=pytest.mark.nightly)])
def test_models_over_mpi_and_torch_are_those_of_virtual_ranks(options: str, tmp_path: Path) -> None:
    words = ["--steps", "30", "--model", "mlp:16", "--batch-size", "8", *options.split()]
    expected = train(parse_train_options([*words, "--virtual-ranks", "4", "--virtual-zones", "z0:2,z1:2"], {}))
    arguments = ("-m", "slurmdl.train", *words, "--summary")
    procs = [start(4, *arguments, str(tmp_path / name), per_rank=PLACES)
             for start, name in ((mpirun, "mpi"), (torchrun, "torch"))]
    assert [proc.returncode for proc in procs] == [0, 0], [proc.stderr for proc in procs]
    results = [json.loads((tmp_path / name).read_text()) for name in ("mpi", "torch")]
    assert expected is not None
    assert {result["parameters_crc32"] for result in results} == {expected["parameters_crc32"]}
    assert [result["bytes_sent"] for result in results] == [expected["bytes_sent"]] * 2
    assert np.isfinite(results[0]["test_loss"])
