"""Gossip in the shared memory of nodes and between their leaders: what it keeps, what it equals, what it sends."""

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
from stub_models import PlainParameters

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
class Ran:
    """Stacked models before and after, and of each rank the bytes sent and the exchanges of its strategy."""

    before: Any
    after: Any
    sent: list[dict[str, int]]
    fired: list[int]

    @property
    def sum_error(self) -> float:
        return float(np.abs(self.before.sum(0) - self.after.sum(0)).max())

    @property
    def spread(self) -> float:
        return float(np.ptp(self.after, axis=0).max() / max(np.ptp(self.before, axis=0).max(), 1e-6))


def mixed(nodes: str, method: StrategyConfig, steps: int, zones: Sequence[str] = (), move: float = 0.0) -> Ran:
    """Models of ranks on these nodes, a letter each, after some steps.

    They begin alike, the first update moves them far apart, and each step all alike by `move`.
    """
    before = np.random.default_rng(5).standard_normal((len(nodes), SIZE)).astype(np.float32)

    def program(transport: VirtualTransport) -> tuple[Any, dict[str, int], int]:
        rank = transport.rank
        world = World(transport, method, tuple(nodes), tuple(zones) or ("",) * len(nodes),
                      ("worker",) * len(nodes), {})
        messages, model = MeteredP2P(transport, world.locality_levels()), PlainParameters(before[0].copy())
        its = StrategyContext(messages, CommThread(False), tuple(range(len(nodes))), (), model.parameters, before[0].copy(),
                      (SIZE,), method, 3, world.nodes, world.zones, {}, lambda: 0.1,
                      lambda part: lambda numbers: None, relocate_parameters=model.settle)
        strategy = STRATEGIES[method.strategy or ""](its)
        model.parameters[:] = before[rank]
        for number in range(steps):
            model.parameters += np.float32(move)
            strategy.after_optimizer_step(number)
            transport.emulate_compute(1e-3 * (1 + rank % 3))
        strategy.finish()
        return model.parameters, messages.bytes_sent, strategy.exchanges

    after, sent, fired = zip(*run_virtual_ranks(len(nodes), program), strict=True)
    return Ran(before, np.array(after), list(sent), list(fired))


def method(traffic: str = "base", **others: Any) -> StrategyConfig:
    return StrategyConfig(others.pop("strategy", "gossip"), traffic, shared_memory=True, **others)


@pytest.mark.parametrize("count", range(1, 10))
def test_one_node_reaches_the_exact_mean_without_a_message(count: int) -> None:
    ran = mixed("a" * count, method(), 12)
    assert ran.sum_error < 1e-5
    assert ran.spread < 1e-5
    assert all(sum(sent.values()) == 0 for sent in ran.sent)


@pytest.mark.parametrize("traffic", ["random", "exponential", "base", "zones", "links"])
@pytest.mark.parametrize("nodes", ["aabb", "aabbccdd", "abab", "abcd"])
def test_nodes_alike_keep_the_sum_and_draw_together(nodes: str, traffic: str) -> None:
    zones = ["x" if node in "ab" else "y" for node in nodes]
    ran = mixed(nodes, method(traffic), 16, zones)
    assert ran.sum_error < 1e-5
    assert ran.spread < (0.1 if traffic in ("random", "links") else 1e-5)


@pytest.mark.parametrize("traffic", ["random", "exponential", "base", "zones", "links"])
@pytest.mark.parametrize("nodes", ["aab", "aaabbc", "abbbbbbb", "aaabbcccccd"])
def test_nodes_of_several_sizes_count_by_their_ranks(nodes: str, traffic: str) -> None:
    ran = mixed(nodes, method(traffic), 90)
    assert ran.sum_error < 2e-5
    assert ran.spread < 0.1


def test_two_nodes_of_unequal_size_meet_in_the_mean_of_their_ranks() -> None:
    ran = mixed("aaab", method("base"), 1)
    assert ran.after == pytest.approx(np.tile(ran.before.mean(0), (4, 1)), abs=1e-6)


def test_leaders_alone_send() -> None:
    """Each of two leaders sends its node's mean in every third step."""
    ran = mixed("aaabbb", method(period=3), 12)
    assert [sum(sent.values()) for sent in ran.sent] == [4 * SIZE * 4, 0, 0, 4 * SIZE * 4, 0, 0]
    assert ran.fired == [4] * 6
    assert ran.sum_error < 1e-5


def test_zones_meet_in_every_fourth_exchange() -> None:
    ran = mixed("aabbccdd", method("zones", period=2), 48, ["x"] * 4 + ["y"] * 4)
    model = 4 * SIZE
    assert [(sent["zone"], sent["across"]) for sent in ran.sent[::2]] == [(18 * model, 6 * model)] * 4


def test_a_drift_that_is_small_keeps_the_nodes_silent_and_their_ranks_together() -> None:
    still = mixed("aabb", method(strategy="adaptive-gossip", warm_up=8, threshold=0.5, silence=1000), 60)
    assert still.fired == [8] * 4
    moved = mixed("aabb", method(strategy="adaptive-gossip", warm_up=8, threshold=0.5, silence=1000), 60, move=0.5)
    assert moved.fired[0] > 8
    assert len(set(moved.fired)) == 1
    assert moved.sum_error == pytest.approx(4 * 60 * 0.5, rel=1e-3)


def test_a_budget_is_the_leaders_and_all_come_to_what_it_makes_due() -> None:
    """With `gossip`, too, which drifts only where a budget or a threshold is said."""
    for strategy in ("gossip", "adaptive-gossip"):
        ran = mixed("aabb", method(strategy=strategy, comm_budget=0.1), 60)
        assert ran.fired[0] >= 5
        assert len(set(ran.fired)) == 1
        assert ran.sum_error < 1e-5


@pytest.mark.parametrize("compress", ["fp16", "int8", "int4"])
def test_compressed_between_nodes_keeps_the_sum(compress: str) -> None:
    ran = mixed("aabbb", method(compress=compress), 60)
    assert ran.sum_error < (0.05 if compress == "fp16" else 2e-4)
    assert ran.spread < 0.1


def test_an_average_over_all_counts_by_ranks() -> None:
    ran = mixed("aaabcc", method(period=1000, global_every=4), 4)
    assert ran.after == pytest.approx(np.tile(ran.before.mean(0), (6, 1)), abs=1e-6)


@pytest.mark.parametrize("nodes", ["aaaa", "aabb", "aaab", "abcd"])
def test_without_waiting_models_draw_together_within_their_range(nodes: str) -> None:
    ran = mixed(nodes, method("random", asynchronous=True), 80)
    assert ran.spread < 0.1
    assert (ran.after <= ran.before.max(0) + 1e-5).all()
    assert (ran.after >= ran.before.min(0) - 1e-5).all()


@pytest.mark.parametrize("staged", [False, True])
def test_a_network_in_shared_memory_is_trained_as_by_messages(staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its parameters are its own again at the end; with copies on the host, as of a GPU's, too."""
    monkeypatch.setattr(library, "Replica", partial(Replica, staged=staged))

    def program(transport: VirtualTransport, method: StrategyConfig) -> Any:
        run = init(method, environ={}, transport=transport)
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 3)
        model, opt = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert run.replica.moved() == ""
        inside = run.replica.parameters
        random = torch.Generator().manual_seed(2 + run.rank)
        for _ in range(7):
            opt.zero_grad()
            model(torch.randn(4, 5, generator=random)).square().sum().backward()
            opt.step()
        run.finish()
        assert np.shares_memory(inside, run.replica.parameters) is not method.shared_memory
        assert torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist() == (
            run.replica.parameters.tolist())
        return run.replica.parameters, run.consensus_distance
    shared = run_virtual_ranks(3, partial(program, method=method()))
    sent = run_virtual_ranks(3, partial(program, method=replace(method(), shared_memory=False)))
    for one, other in zip(shared, sent, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-6)
        assert one[1] == pytest.approx(other[1], rel=1e-3)
        assert one[1] > 0


def test_waiting_for_a_rank_of_the_node_counts_as_waiting() -> None:
    """Every second rank comes a second late, where pairs mix and where a node makes its mean."""
    def program(transport: VirtualTransport, nodes: str) -> tuple[float, float]:
        world = World(transport, method(), tuple(nodes), ("",) * len(nodes), ("worker",) * len(nodes), {})
        messages, model = MeteredP2P(transport, world.locality_levels()), PlainParameters(np.ones(SIZE, np.float32))
        courier = CommThread(False, clock=transport.now, peer_wait_clock=messages.peer_wait_seconds)
        strategy = STRATEGIES["gossip"](StrategyContext(
            messages, courier, tuple(range(len(nodes))), (), model.parameters, model.parameters.copy(), (SIZE,),
            method(), 3, world.nodes, world.zones, {}, lambda: 0.1, lambda part: lambda numbers: None,
            relocate_parameters=model.settle))
        before = courier.blocked_seconds, courier.peer_wait_seconds
        transport.emulate_compute(float(transport.rank % 2))
        strategy.after_optimizer_step(0)
        return courier.blocked_seconds - before[0], courier.peer_wait_seconds - before[1]
    for nodes in ("aa", "aabb"):
        for rank, (took, waited) in enumerate(run_virtual_ranks(len(nodes), partial(program, nodes=nodes))):
            assert took == waited == (0.0 if rank % 2 else 1.0)


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 4])
def test_by_mpi_as_by_virtual_ranks(ranks: int) -> None:
    """Nodes are pretended: two ranks each, with random delays."""
    done = mpirun(ranks, str(Path(__file__).with_name("shared_ranks.py")),
                  environ={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["collective"] == []
    for name, asked in (("every", method()), ("third", method(period=3)),
                        ("drift", method(strategy="adaptive-gossip", warm_up=4, threshold=0.3))):
        nodes = "".join("ab"[rank // 2] for rank in range(ranks))
        ran = mixed(nodes, asked, found["steps"])
        assert np.array(found[name]["after"]) == pytest.approx(ran.after, abs=1e-5)
        assert found[name]["sent"] == ran.sent
    free = np.array(found["free"]["after"])
    before = np.array(found["before"])
    assert (free <= before.max(0) + 1e-5).all()
    assert (free >= before.min(0) - 1e-5).all()
    assert ranks == 1 or np.ptp(free, axis=0).max() < 0.1 * np.ptp(before, axis=0).max()
