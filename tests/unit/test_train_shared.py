"""Gossip through shared memory in nodes and by messages between their leaders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import mpirun, needs_mpi

from benchmarks.stub_models import PlainParameters
from slurmdl.train import init
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library import run as library
from slurmdl.train.library.replica import Replica
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.virtual import VirtualTransport, run_virtual_ranks
from slurmdl.train.world import World

SIZE = 301


@dataclass
class GossipResult:
    """Stacked models before and after, and bytes sent and exchanges of each rank."""

    initial: Any
    final: Any
    bytes_sent: list[dict[str, int]]
    exchanges: list[int]

    @property
    def sum_error(self) -> float:
        return float(np.abs(self.initial.sum(0) - self.final.sum(0)).max())

    @property
    def spread(self) -> float:
        return float(np.ptp(self.final, axis=0).max() / max(np.ptp(self.initial, axis=0).max(), 1e-6))


def run_gossip(nodes: str, config: StrategyConfig, steps: int, zones: Sequence[str] = (),
               update: float = 0.0) -> GossipResult:
    """Run gossip on ranks on nodes, a letter each.

    Models are made different before the first step, and each step adds `update` to all of them.
    """
    initial = np.random.default_rng(5).standard_normal((len(nodes), SIZE)).astype(np.float32)

    def program(transport: VirtualTransport) -> tuple[Any, dict[str, int], int]:
        rank = transport.rank
        world = World(transport, config, tuple(nodes), tuple(zones) or ("",) * len(nodes),
                      ("worker",) * len(nodes), {})
        p2p, model = MeteredP2P(transport, world.locality_levels()), PlainParameters(initial[0].copy())
        ctx = StrategyContext(p2p, CommThread(False), tuple(range(len(nodes))), (), model.parameters,
                              initial[0].copy(), (SIZE,), config, 3, world.nodes, world.zones, {}, lambda: 0.1,
                              lambda part: lambda hyperparameters: None,
                              relocate_parameters=model.relocate_parameters)
        strategy = STRATEGIES[config.strategy or ""](ctx)
        model.parameters[:] = initial[rank]
        for step in range(steps):
            model.parameters += np.float32(update)
            strategy.after_optimizer_step(step)
            transport.emulate_compute(1e-3 * (1 + rank % 3))
        strategy.finish()
        return model.parameters, p2p.bytes_sent, strategy.exchanges

    final, bytes_sent, exchanges = zip(*run_virtual_ranks(len(nodes), program), strict=True)
    return GossipResult(initial, np.array(final), list(bytes_sent), list(exchanges))


def make_config(comm_pattern: str = "base-2", **fields: Any) -> StrategyConfig:
    return StrategyConfig(fields.pop("strategy", "gossip"), comm_pattern, shared_memory=True, **fields)


@pytest.mark.parametrize("count", range(1, 10))
def test_single_node_reaches_exact_mean_without_messages(count: int) -> None:
    result = run_gossip("a" * count, make_config(), 12)
    assert result.sum_error < 1e-5
    assert result.spread < 1e-5
    assert all(sum(sent.values()) == 0 for sent in result.bytes_sent)


@pytest.mark.parametrize("comm_pattern", ["random-matching", "one-peer-exponential", "base-2", "zone-aware"])
@pytest.mark.parametrize("nodes", ["aabb", "aabbccdd", "abab", "abcd"])
def test_equal_nodes_preserve_sum_and_reduce_spread(nodes: str, comm_pattern: str) -> None:
    zones = ["x" if node in "ab" else "y" for node in nodes]
    result = run_gossip(nodes, make_config(comm_pattern), 16, zones)
    assert result.sum_error < 1e-5
    assert result.spread < (0.1 if comm_pattern == "random-matching" else 1e-5)


@pytest.mark.parametrize("comm_pattern", ["random-matching", "one-peer-exponential", "base-2", "zone-aware"])
@pytest.mark.parametrize("nodes", ["aab", "aaabbc", "abbbbbbb", "aaabbcccccd"])
def test_unequal_nodes_are_weighted_by_ranks(nodes: str, comm_pattern: str) -> None:
    result = run_gossip(nodes, make_config(comm_pattern), 90)
    assert result.sum_error < 2e-5
    assert result.spread < 0.1


def test_two_unequal_nodes_reach_mean_of_their_ranks() -> None:
    result = run_gossip("aaab", make_config("base-2"), 1)
    assert result.final == pytest.approx(np.tile(result.initial.mean(0), (4, 1)), abs=1e-6)


def test_only_leaders_send() -> None:
    """Two leaders send their node's mean in every third step."""
    result = run_gossip("aaabbb", make_config(period=3), 12)
    assert [sum(sent.values()) for sent in result.bytes_sent] == [4 * SIZE * 4, 0, 0, 4 * SIZE * 4, 0, 0]
    assert result.exchanges == [4] * 6
    assert result.sum_error < 1e-5


def test_zone_aware_crosses_zones_in_every_fourth_exchange() -> None:
    result = run_gossip("aabbccdd", make_config("zone-aware", period=2), 48, ["x"] * 4 + ["y"] * 4)
    model = 4 * SIZE
    assert [(sent["intra_zone"], sent["inter_zone"]) for sent in result.bytes_sent[::2]] == [(18 * model,
                                                                                             6 * model)] * 4


@pytest.mark.parametrize("compress", ["fp16", "int8", "int4"])
def test_compression_between_nodes_preserves_sum(compress: str) -> None:
    result = run_gossip("aabbb", make_config(compression=compress), 60)
    assert result.sum_error < (0.05 if compress == "fp16" else 2e-4)
    assert result.spread < 0.1


@pytest.mark.parametrize("nodes", ["aaaa", "aabb", "aaab", "abcd"])
def test_asynchronous_models_converge_within_initial_range(nodes: str) -> None:
    result = run_gossip(nodes, make_config("random-matching", asynchronous=True), 80)
    assert result.spread < 0.1
    assert (result.final <= result.initial.max(0) + 1e-5).all()
    assert (result.final >= result.initial.min(0) - 1e-5).all()


@pytest.mark.parametrize("staged", [False, True])
def test_network_in_shared_memory_equals_messages(staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network owns its parameters again at the end; also with staged copies, as for a GPU."""
    monkeypatch.setattr(library, "Replica", partial(Replica, staged=staged))

    def program(transport: VirtualTransport, config: StrategyConfig) -> Any:
        run = init(config, environ={}, transport=transport)
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 3)
        model, opt = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert run.replica.relocated_parameter() == ""
        inside = run.replica.parameters
        random = torch.Generator().manual_seed(2 + run.rank)
        for _ in range(7):
            opt.zero_grad()
            model(torch.randn(4, 5, generator=random)).square().sum().backward()
            opt.step()
        run.finish()
        assert np.shares_memory(inside, run.replica.parameters) is not config.shared_memory
        assert torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist() == (
            run.replica.parameters.tolist())
        return run.replica.parameters, run.consensus_distance
    shared = run_virtual_ranks(3, partial(program, config=make_config()))
    messages = run_virtual_ranks(3, partial(program, config=replace(make_config(), shared_memory=False)))
    for (model, distance), (expected_model, expected_distance) in zip(shared, messages, strict=True):
        assert model == pytest.approx(expected_model, abs=1e-6)
        assert distance == pytest.approx(expected_distance, rel=1e-3)
        assert distance > 0


def test_waiting_for_node_peer_counts_as_peer_wait() -> None:
    """Every second rank is a second late, in pairwise mixing and in node means."""
    def program(transport: VirtualTransport, nodes: str) -> tuple[float, float]:
        world = World(transport, make_config(), tuple(nodes), ("",) * len(nodes), ("worker",) * len(nodes), {})
        p2p, model = MeteredP2P(transport, world.locality_levels()), PlainParameters(np.ones(SIZE, np.float32))
        comm_thread = CommThread(False, clock=transport.now, peer_wait_clock=p2p.peer_wait_seconds)
        strategy = STRATEGIES["gossip"](StrategyContext(
            p2p, comm_thread, tuple(range(len(nodes))), (), model.parameters, model.parameters.copy(), (SIZE,),
            make_config(), 3, world.nodes, world.zones, {}, lambda: 0.1, lambda part: lambda hyperparameters: None,
            relocate_parameters=model.relocate_parameters))
        before = comm_thread.blocked_seconds, comm_thread.peer_wait_seconds
        transport.emulate_compute(float(transport.rank % 2))
        strategy.after_optimizer_step(0)
        return comm_thread.blocked_seconds - before[0], comm_thread.peer_wait_seconds - before[1]
    for nodes in ("aa", "aabb"):
        for rank, (blocked, peer_wait) in enumerate(run_virtual_ranks(len(nodes), partial(program, nodes=nodes))):
            assert blocked == peer_wait == (0.0 if rank % 2 else 1.0)


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 4])
def test_shared_memory_gossip_over_mpi_equals_virtual_ranks(ranks: int) -> None:
    """Two ranks per emulated node, with random delays."""
    proc = mpirun(ranks, str(Path(__file__).with_name("mpi_programs") / "shared_memory.py"),
                  environ={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert proc.returncode == 0, proc.stderr
    over_mpi = json.loads(proc.stdout)
    assert over_mpi["collectives"] == []
    for name, config in (("every", make_config()), ("third", make_config(period=3))):
        nodes = "".join("ab"[rank // 2] for rank in range(ranks))
        result = run_gossip(nodes, config, over_mpi["steps"])
        assert np.array(over_mpi[name]["final"]) == pytest.approx(result.final, abs=1e-5)
        assert over_mpi[name]["bytes_sent"] == result.bytes_sent
    final = np.array(over_mpi["asynchronous"]["final"])
    initial = np.array(over_mpi["initial"])
    assert (final <= initial.max(0) + 1e-5).all()
    assert (final >= initial.min(0) - 1e-5).all()
    assert ranks == 1 or np.ptp(final, axis=0).max() < 0.1 * np.ptp(initial, axis=0).max()
