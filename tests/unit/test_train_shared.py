"""Gossip through shared memory in nodes and by messages between their leaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from strategy_harness import run_strategy

from benchmarks.stub_models import PlainParameters
from slurmdl.train import init
from slurmdl.train.library import run as library
from slurmdl.train.library.replica import Replica
from slurmdl.train.p2p import CommThread, MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.virtual import VirtualTransport, run_virtual_ranks
from slurmdl.train.world import World

SIZE = 301


def run_gossip(nodes: str, config: StrategyConfig, steps: int, zones: Sequence[str] = ()) -> tuple[Any, float, float]:
    """Run gossip on ranks on nodes, a letter each; their logs, the error of the sum, and the ratio of the spreads."""
    logs = run_strategy(config, len(nodes), steps, size=SIZE, nodes=nodes, zones=zones,
                        step_seconds=lambda rank: 1e-3 * (1 + rank % 3))
    initial, final = (np.array([getattr(log, name) for log in logs]) for name in ("initial", "final"))
    spread = np.ptp(final, axis=0).max() / max(np.ptp(initial, axis=0).max(), 1e-6)
    return logs, float(np.abs(initial.sum(0) - final.sum(0)).max()), float(spread)


def make_config(comm_pattern: str = "base-2", **fields: Any) -> StrategyConfig:
    return StrategyConfig(fields.pop("strategy", "gossip"), comm_pattern, shared_memory=True, **fields)


@pytest.mark.parametrize("count", range(1, 10))
def test_single_node_reaches_exact_mean_without_messages(count: int) -> None:
    logs, sum_error, spread = run_gossip("a" * count, make_config(), 12)
    assert sum_error < 1e-5 and spread < 1e-5
    assert all(sum(log.bytes_sent.values()) == 0 for log in logs)


@pytest.mark.parametrize("comm_pattern", ["random-matching", "one-peer-exponential", "base-2", "zone-aware"])
@pytest.mark.parametrize("nodes", ["aabb", "aabbccdd", "abab", "abcd", "aab", "aaabbc", "abbbbbbb", "aaabbcccccd"])
def test_nodes_are_weighted_by_ranks(nodes: str, comm_pattern: str) -> None:
    """Equal nodes reach the mean within a period."""
    is_equal = len({nodes.count(node) for node in nodes}) == 1
    zones = ["x" if node in "ab" else "y" for node in nodes] if is_equal else ()
    _, sum_error, spread = run_gossip(nodes, make_config(comm_pattern), 16 if is_equal else 90, zones)
    assert sum_error < (1e-5 if is_equal else 5e-5)
    assert spread < (1e-5 if is_equal and comm_pattern != "random-matching" else 0.1)


def test_two_unequal_nodes_reach_mean_of_their_ranks() -> None:
    logs, *_ = run_gossip("aaab", make_config("base-2"), 1)
    mean = np.mean([log.initial for log in logs], axis=0)
    assert all(log.final == pytest.approx(mean, abs=1e-6) for log in logs)


def test_only_leaders_send() -> None:
    """Two leaders send their node's mean in every third step."""
    logs, sum_error, _ = run_gossip("aaabbb", make_config(period=3), 12)
    assert [sum(log.bytes_sent.values()) for log in logs] == [4 * SIZE * 4, 0, 0, 4 * SIZE * 4, 0, 0]
    assert [log.strategy.exchanges for log in logs] == [4] * 6 and sum_error < 1e-5
    # the pattern zone-aware crosses zones in every fourth exchange
    logs, *_ = run_gossip("aabbccdd", make_config("zone-aware", period=2), 48, ["x"] * 4 + ["y"] * 4)
    assert [(log.bytes_sent["intra_zone"], log.bytes_sent["inter_zone"]) for log in logs[::2]] == [
        (18 * 4 * SIZE, 6 * 4 * SIZE)] * 4


@pytest.mark.parametrize("compress", ["fp16", "int8", "int4"])
def test_compression_between_nodes_preserves_sum(compress: str) -> None:
    _, sum_error, spread = run_gossip("aabbb", make_config(compression=compress), 60)
    assert sum_error < (0.05 if compress == "fp16" else 2e-4) and spread < 0.1


@pytest.mark.parametrize("nodes", ["aaaa", "aabb", "aaab", "abcd"])
def test_asynchronous_models_converge_within_initial_range(nodes: str) -> None:
    logs, _, spread = run_gossip(nodes, make_config("random-matching", asynchronous=True), 200)
    initial, final = (np.array([getattr(log, name) for log in logs]) for name in ("initial", "final"))
    assert spread < 0.1
    assert (final <= initial.max(0) + 1e-5).all() and (final >= initial.min(0) - 1e-5).all()


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
