"""The world of a rank: roles, zones, plan and backend; its flat buffers, and the summary."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mpi import python

from slurmdl import records
from slurmdl.comm_layout import split_offsets
from slurmdl.errors import InputError, InvalidOptionsError, InvalidRunError
from slurmdl.plan import Plan, decode_plan, encode_plan
from slurmdl.train import world as world_module
from slurmdl.train.library.replica import Replica
from slurmdl.train.meters import PHASES, RankReport, StepMeter, summarize
from slurmdl.train.strategies import STRATEGIES
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer import models
from slurmdl.train.trainer.data_readers import load_dataset
from slurmdl.train.transports import torch_distributed
from slurmdl.train.transports.mpi import open_mpi_major


def test_replica_trains_through_its_flat_buffers() -> None:
    data = load_dataset("digits", 1)
    network = models.build_model("mlp:32", (1, 8, 8), 10, 1)
    replica = Replica(network)
    assert replica.parameters.size == 64 * 32 + 32 + 32 * 10 + 10
    losses = []
    for _ in range(30):
        replica.gradients.fill(0)
        loss = torch.nn.functional.cross_entropy(network(torch.from_numpy(data.train_x)),
                                                 torch.from_numpy(data.train_y))
        loss.backward()
        losses.append(float(loss.detach()))
        replica.parameters -= np.float32(0.5) * replica.gradients
    assert losses[-1] < 0.5 < 2 < losses[0]


@pytest.mark.parametrize("old", [False, True], ids=["", "before 2.1"])
def test_replica_reports_each_completed_gradient(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two passes, with a parameter used twice in each; PyTorch 1.13 has other hooks."""
    if old:
        monkeypatch.delattr(torch.Tensor, "register_post_accumulate_grad_hook")
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    replica = Replica(torch.nn.ModuleList([first, second]))
    completed: list[tuple[int, list[float]]] = []
    replica.register_gradient_hook(lambda index: completed.append(
        (index, replica.gradients[replica.slice_of(index)].tolist())))
    for _ in range(2):
        second(first(first(torch.ones(3)))).sum().backward()  # type: ignore[no-untyped-call]
    assert sorted(index for index, _ in completed) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert dict(completed) == {
        index: replica.gradients[replica.slice_of(index)].tolist() for index in range(4)}
    assert dict(completed)[3] == [2.0]


@pytest.mark.parametrize("address, pattern, path", [
    ("core.leafA.n1", "switch.switch.node", ("core", "leafA")), (".leafA.n1", "switch.switch.node", ("leafA",)),
    ("b1.n1", "block.node", ("b1",)), ("n1", "node", ()), ("core.leafA.n1.site", "switch.switch.node",
                                                          ("core", "leafA"))])
def test_zone_path_from_slurm_topology_addr(address: str, pattern: str, path: tuple[str, ...]) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert world_module.zone_path(environ) == path
    assert world_module.zone_path({}) == ()


def test_world_locality_levels() -> None:
    world = world_module.World(SimpleNamespace(rank=0), StrategyConfig("gossip", "random-matching"),
                               ("n1", "n1", "n2", "n3", "n4"),
                          ("A", "A", "A", "B", ""), ("worker",) * 5, {})
    assert world.locality_levels() == ("intra_node", "intra_node", "intra_zone", "inter_zone", "inter_zone")
    assert str(world).startswith("0 n1 (A worker), 1 n1 (A worker)")


def test_assign_roles() -> None:
    plan = Plan("ps", ("a", "b", "c"), ("worker", "ps", "worker"), {})
    assert world_module._assign_roles("ps", None, plan, 3) == plan.roles
    assert world_module._assign_roles("ps", 1, plan, 3) == plan.roles
    assert world_module._assign_roles("ps", 2, plan, 3) == ("ps", "ps", "worker")
    assert world_module._assign_roles("ps", None, None, 3) == ("ps", "worker", "worker")
    assert world_module._assign_roles("gossip", None, plan, 3) == ("worker",) * 3
    for strategy, ps, size in (("ps", 3, 3), ("ps", 0, 3), ("ps", None, 1), ("gossip", 1, 3)):
        with pytest.raises(InvalidRunError):
            world_module._assign_roles(strategy, ps, None, size)
    with pytest.raises(InvalidRunError, match="allreduce, gossip, adaptive-gossip"):
        world_module._assign_roles("none", None, None, 3)


def test_comm_pattern_precedence_is_option_plan_default() -> None:
    nodes, roles = ("a", "b", "c", "d"), ("worker",) * 4
    plan = Plan("gossip", nodes, roles, {}, comm_pattern="base-2")
    assert world_module._choose_comm_pattern(StrategyConfig("gossip"), plan) == "base-2"
    assert world_module._choose_comm_pattern(StrategyConfig("gossip", "one-peer-exponential"),
                                             plan) == "one-peer-exponential"
    assert world_module._choose_comm_pattern(StrategyConfig("allreduce"), plan) == "ring"
    assert world_module._choose_comm_pattern(StrategyConfig("gossip"),
                                             Plan("gossip", nodes, roles, {})) == "random-matching"
    assert world_module._choose_comm_pattern(StrategyConfig("allreduce", "hierarchical"), None) == "hierarchical"
    with pytest.raises(InvalidRunError,
                       match="--comm-pattern base-2: strategy allreduce has ring, hierarchical"):
        world_module._choose_comm_pattern(StrategyConfig("allreduce", "base-2"), None)


@pytest.mark.parametrize(("method", "planned", "zones", "expected"), [
    (StrategyConfig("allreduce"), "", ("A", "A", "B", "B"),
     "hierarchical"), (StrategyConfig("allreduce"), "", ("A",) * 4, "ring"),
    (StrategyConfig("allreduce"), "", ("A", "A", "B", ""), "ring"),
    (StrategyConfig("allreduce"), "ring", ("A", "A", "B", "B"), "ring"),
    (StrategyConfig("allreduce", "ring"), "", ("A", "A", "B", "B"), "ring"),
    (StrategyConfig("local-sgd"), "", ("A", "A", "B", "B"), "ring")])
def test_default_pattern_between_known_zones_is_hierarchical(
        method: StrategyConfig, planned: str, zones: tuple[str, ...], expected: str) -> None:
    plan = Plan(method.strategy or "", ("a", "b", "c", "d"), ("worker",) * 4, {}, comm_pattern=planned)
    assert world_module._choose_comm_pattern(method, plan, zones) == expected


def test_plan_comm_pattern_is_optional_and_checked() -> None:
    plan = Plan("gossip", ("a", "b"), ("worker",) * 2, {"a": ("core", "leaf")}, comm_pattern="one-peer-exponential")
    assert decode_plan(encode_plan(plan)) == plan
    content = records.to_json(plan)
    del content["comm_pattern"]
    assert records.from_json(Plan, content).comm_pattern == ""
    with pytest.raises(InputError,
                       match="comm_pattern 'ring' is not one of random-matching, one-peer-exponential, base-2"):
        records.from_json(Plan, {**content, "comm_pattern": "ring"})


def test_summarize() -> None:
    server = RankReport(StepMeter().totals, {"intra_node": 1, "intra_zone": 2, "inter_zone": 3})
    times = dict.fromkeys(PHASES, 1.5)
    meter = StepMeter()
    for wall, loss, samples in ((2.0, 9.0, 8), (2.0, 8.0, 8), (5.0, 7.0, 2)):
        meter.wall.add(wall)
        meter.exposed_comm.add(1.0)
        meter.loss.add(loss)
        meter.samples.add(samples)
    meter.phases, meter.between_steps, meter.checkpoint = times, 0.5, 0.75
    worker = RankReport(meter.totals, {"intra_node": 10, "intra_zone": 20, "inter_zone": 30}, 0.5, (0.25, 0.75),
                        (0.5, 0.5), 2, 1, 8,
                    0xabc)
    summary = summarize([server, worker], ["ps", "worker"])
    assert summary == {"steps": 3, "train_seconds": 9.0, "seconds_per_step": 2.0,
                       "samples_per_second_median_step": 4.0, "batch_size": 8,
                       "compute_seconds": 6.0, "exposed_comm_seconds": 3.0,
                       "bytes_sent": {"intra_node": 11, "intra_zone": 22, "inter_zone": 33},
                       "phases": times, "overlapped_comm_seconds": 0.0, "between_steps_seconds": 0.5, "exchanges": 2,
                       "exchanges_skipped": 1,
                       "steps_per_worker": [3], "batch_size_per_worker": [6.0], "samples_per_second": 2.0,
                       "seconds_per_worker": [9.0],
                       "train_loss": 7.0, "test_loss": 0.25, "test_accuracy": 0.75, "test_accuracy_local_mean": 0.5,
                       "test_accuracy_local_worst": 0.5, "consensus_distance": 0.5, "checkpoint_seconds": 0.75,
                       "parameters_crc32": "00000abc", "slow_ranks": []}


@pytest.mark.parametrize("size, parts", [(10, 3), (2, 5), (0, 2)])
def test_split_offsets(size: int, parts: int) -> None:
    edge = split_offsets(size, parts)
    lengths = np.diff(edge)
    assert (edge[0], edge[-1], len(lengths)) == (0, size, parts)
    assert lengths.min() >= 0
    assert np.ptp(lengths) <= 1


def test_strategies_match_plan() -> None:
    from slurmdl import plan
    assert tuple(STRATEGIES) == plan.STRATEGIES


def test_train_imports_only_shared_modules() -> None:
    """Tasks need torch, MPI and these files only."""
    code = ("import sys; from slurmdl.train.trainer import trainer; print(*sorted(m for m in sys.modules if "
            "m.startswith('slurmdl.') and not m.startswith('slurmdl.train')), 'sklearn' in sys.modules)")
    proc = python("-c", code, loaded=False)
    assert proc.stdout.split() == [
        "slurmdl.comm_layout", "slurmdl.errors", "slurmdl.files", "slurmdl.gossip_graphs",
        "slurmdl.options", "slurmdl.plan", "slurmdl.records", "slurmdl.text", "slurmdl.units", "slurmdl.yaml_input",
        "False"], proc.stderr


@pytest.mark.parametrize(("planned", "facts"), [
    (("n0", "n1"), ["2 of 2"]), (("n0", "n9"), ["ignored", "rank 1 runs on n1, planned n9"]),
    (("n0", "n1", "n2"), ["ignored", "3 ranks", "2"])])
def test_plan_of_other_nodes_is_ignored_with_one_line(planned, facts, capsys) -> None:
    plan = Plan("allreduce", planned, ("worker",) * len(planned), {})
    used = world_module._usable_plan(("n0", "n1"), {"SLURMDL_PLAN": encode_plan(plan)})
    assert used == (None if "ignored" in facts else plan)
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert all(fact in text for fact in facts)


def test_world_lists_many_ranks_in_groups() -> None:
    nodes = tuple(f"n{rank // 4}" for rank in range(40))
    zones = tuple("A" if rank < 20 else "" for rank in range(40))
    ranks = world_module.World(SimpleNamespace(rank=0), StrategyConfig("ps", "shards"), nodes, zones,
                        ("ps",) * 4 + ("worker",) * 36, {})
    assert str(ranks) == ("0 to 3 on n0 (A ps), 4 to 19 on 4 nodes from n1 to n4 (A worker), "
                          "20 to 39 on 5 nodes from n5 to n9 (worker)")


@pytest.mark.parametrize(("words", "first"), [
    ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", 4), ("Open MPI v5.0.8, package: x", 5),
    ("Open MPI vmaster, package: x", 0), ("MPICH Version:      4.0.2", 0),
    ("Intel(R) MPI Library 2021.9 for Linux", 0)])
def test_open_mpi_major(words: str, first: int) -> None:
    assert open_mpi_major(SimpleNamespace(Get_library_version=lambda: words)) == first


@pytest.mark.parametrize(("environ", "expected"), [
    ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)), ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}, (2, 3)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, (0, 1)),  # a batch script
    ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (1, 4)), ({}, (0, 1))])
def test_rank_and_size(environ: dict[str, str], expected: tuple[int, int]) -> None:
    assert torch_distributed.rank_and_size(environ) == expected


def test_port_differs_between_steps() -> None:
    ports = {torch_distributed.rank_zero_address({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(step)})[1]
             for step in range(20)}
    assert len(ports) > 15 and all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, "mpi"), ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpi"), ({"PMIX_RANK": "0"}, "mpi"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "torch"), ({"TORCHELASTIC_RUN_ID": "x", "PMI_RANK": "0"}, "torch"),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "torch")])
def test_offered_backend(environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "_has_mpi", lambda: True)
    assert world_module._offered_backend(environ) == expected
    monkeypatch.setattr(world_module, "_has_mpi", lambda: False)
    assert world_module._offered_backend(environ) == "torch"
    with pytest.raises(InvalidOptionsError, match=r"--backend 'nccl' is not one of auto, mpi, torch"):
        world_module.init_transport("nccl")
