"""Parameter servers: shards, staleness-aware learning rates, and shard backups."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from strategy_harness import run_server_rank, server_context

from slurmdl.comm_layout import SHARD_BLOCK, split_by_speed
from slurmdl.train.strategies import STRATEGIES, parameter_server
from slurmdl.train.strategies.parameter_server import (
    AsyncPSServer,
    ShardAssignment,
    SyncPSServer,
    assign_shards,
    mean_into,
    promote_backup,
    reassign,
    traffic_locality,
)
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import virtual
from slurmdl.train.transports.virtual import VirtualTransport

SIZE, LR = 40, 0.5
torch.set_num_threads(1)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_mean_into_allocates_no_memory(count: int) -> None:
    """The mean is bitwise equal to numpy's, which stacks all vectors first."""
    random = np.random.default_rng(count)
    vectors = [(random.standard_normal(20_000) * 10.0 ** random.integers(-20, 20, 20_000)).astype(np.float32)
               for _ in range(count)]
    out = np.empty_like(vectors[0])
    tracemalloc.start()
    mean_into(vectors, out)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < out.nbytes
    assert np.array_equal(out, np.mean(vectors, axis=0))


def run_ps(config: StrategyConfig, servers: int, work: Sequence[Sequence[float]], gradient: Callable[[int, Any], Any],
           on_step: Callable[[int, int], None] = lambda worker, step: None) -> list[tuple[Any, Any]]:
    """Run workers that compute `work[worker][step]` seconds per step; parameters and strategy of each rank."""
    return virtual.run_virtual_ranks(servers + len(work), lambda transport: run_server_rank(
        transport, config, servers, [*[()] * servers, *work][transport.rank], gradient, on_step))


ASYNC = StrategyConfig("ps", "shards", asynchronous=True)


def test_async_ps_never_blocks() -> None:
    """Only computation and polling take time, so each worker ends when its work is done."""
    started: list[tuple[int, int]] = []
    work = [[1.0] * 30, [4.0] * 30]
    run_ps(ASYNC, 2, work, lambda worker, model: np.ones(SIZE), lambda worker, step: started.append((worker, step)))
    assert started.index((0, 29)) < started.index((1, 8))


def test_synchronous_ps_applies_the_mean_gradient() -> None:
    results = run_ps(StrategyConfig("ps", "shards"), 1, [[1.0, 2.0, 1.0], [2.0, 1.0, 3.0]],
                     lambda worker, model: (worker + 1) * model)
    model = 1.0
    for _ in range(3):
        model -= LR * 1.5 * model
    for parameters, _ in results:
        assert parameters == pytest.approx(np.full(SIZE, model, np.float32), rel=1e-5)


def test_async_ps_damps_stale_gradients() -> None:
    """One worker pushes at 1, 2, 3, 4; the other at 2.5, after two updates since it pulled."""
    server, *_ = run_ps(ASYNC, 1, [[1.0] * 4, [2.5]], lambda worker, model: np.full(SIZE, 1.0 + worker))
    parameters, strategy = server
    assert strategy._owned[0].optimizer.learning_rates == pytest.approx([LR, LR, LR / 3, LR / 2, LR])
    assert parameters == pytest.approx(np.full(SIZE, 1 - LR * (1 + 1 + 2 / 3 + 1 / 2 + 1), np.float32), rel=1e-5)


@pytest.mark.parametrize("servers", [1, 3])
def test_async_ps_unequal_steps_end_with_one_model(servers: int) -> None:
    work = [[1.0] * 3, [0.3] * 40, [2.0], []]
    results = run_ps(ASYNC, servers, work, lambda worker, model: 0.05 * model)
    model = results[servers][0]
    assert model.max() < 0.9
    for parameters, _ in results[servers:]:
        assert (parameters == model).all()
    for server, part in enumerate(split_by_speed(SIZE, [1.0] * servers)):
        assert (results[server][0][part] == model[part]).all()


@pytest.mark.parametrize("config", [StrategyConfig("ps", "shards"), ASYNC], ids=["sync", "async"])
def test_shard_backups_continue_as_the_originals(config: StrategyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    every, steps, servers, workers = 5, 13, 3, 2
    monkeypatch.setattr("slurmdl.train.strategies.parameter_server.BACKUP_EVERY", every)
    originals: dict[int, dict[int, Any]] = {rank: {} for rank in range(servers)}
    exchange_if_due = parameter_server.ShardBackups.exchange_if_due

    def record_and_exchange(backups: Any, update_count: int) -> None:
        shard, = backups._owned
        originals[backups._ctx.p2p.rank][update_count] = (
            backups._ctx.parameters[shard.part].copy(), shard.optimizer.state_bytes().copy())
        exchange_if_due(backups, update_count)

    monkeypatch.setattr(parameter_server.ShardBackups, "exchange_if_due", record_and_exchange)
    results = run_ps(config, servers, [[1.0] * steps, [1.7] * steps], lambda worker, model: 0.1 * model + worker)
    due = 10 if isinstance(results[0][1], SyncPSServer) else 20
    parts = split_by_speed(SIZE, [1.0] * servers)
    for rank in range(servers):
        (backup,), previous = results[rank][1].backups.held.values(), (rank - 1) % servers
        parameters, state = originals[previous][due]
        assert (backup.update_count, backup.part) == (due, parts[previous])
        assert (backup.parameters == parameters).all()
        assert (backup.optimizer_state == state).all()

    def program(transport: VirtualTransport) -> None:
        ctx = server_context(transport, config, 1)
        optimizer = promote_backup(backup, ctx)
        assert (ctx.parameters[backup.part] == backup.parameters).all()
        ctx.gradients[backup.part] = 2
        optimizer(np.array([0.9, LR]))
        assert ctx.parameters[backup.part] == pytest.approx(backup.parameters - 2 * LR)
        assert optimizer.gradient_sum == pytest.approx(backup.optimizer_state.view(np.float32) + 2)

    virtual.run_virtual_ranks(workers, program)


def test_reassign_moves_shards_to_next_alive_server() -> None:
    shards = [ShardAssignment(server, slice(server, server + 1)) for server in (2, 5, 7)]
    assert [shard.server for shard in reassign(shards, (2, 5, 7), (2, 7))] == [2, 7, 7]
    assert [shard.server for shard in reassign(shards, (2, 5, 7), (2,))] == [2, 2, 2]
    reassigned = reassign(reassign(shards, (2, 5, 7), (2, 7)), (2, 7), (2,))
    assert [(shard.server, shard.part.start) for shard in reassigned] == [(2, 2), (2, 5), (2, 7)]


@pytest.mark.parametrize("config", [StrategyConfig("ps", "shards"), ASYNC], ids=["sync", "async"])
def test_server_with_two_shards_equals_two_servers(config: StrategyConfig) -> None:
    """A worker pushes to two servers, and in another run to one server with both shards."""
    def program(assignments: Sequence[ShardAssignment]) -> Callable[[VirtualTransport], Any]:
        def run_rank(transport: VirtualTransport) -> Any:
            ctx = server_context(transport, config, len({shard.server for shard in assignments}))
            strategy = type(STRATEGIES["ps"](ctx))(ctx, assignments)
            if transport.rank in ctx.servers:
                while strategy.serve_step(0):
                    pass
            else:
                for step in range(5):
                    ctx.gradients[:] = 0.1 * ctx.parameters + np.arange(SIZE)
                    strategy.finish_gradients(step)
                strategy.finish()
            return ctx.parameters
        return run_rank

    parts = [slice(0, 15), slice(15, SIZE)]
    two_servers = virtual.run_virtual_ranks(3, program([ShardAssignment(0, parts[0]), ShardAssignment(1, parts[1])]))
    one_server = virtual.run_virtual_ranks(2, program([ShardAssignment(0, parts[0]), ShardAssignment(0, parts[1])]))
    assert (two_servers[-1] == one_server[-1]).all()
    assert not (two_servers[-1] == 1).all()
    assert (one_server[0] == one_server[1]).all()


def test_shard_backups_count_as_bytes_sent() -> None:
    """Two servers, each with half of the model and of the optimizer state; one backup per 100 steps."""
    results = run_ps(StrategyConfig("ps", "shards"), 2, [[1.0] * 100], lambda worker, model: model)
    pulled, header = 100 * SIZE // 2 * 4, 8 * parameter_server._NUM_HEADER_FIELDS
    for _, strategy in results[:2]:
        assert sum(strategy._ctx.p2p.bytes_sent.values()) == pulled + header + 2 * (SIZE // 2) * 4


def test_async_ps_with_one_worker_equals_sync() -> None:
    """Gradients of a single worker are never stale."""
    (_, first), (_, second) = (
        run_ps(config, 1, [[1.0, 2.0] * 5], lambda worker, model: 0.1 * model + np.arange(SIZE))
        for config in (ASYNC, StrategyConfig("ps", "shards")))
    assert (first[0] == second[0]).all() and not (first[0] == 1).any()


def test_shard_optimizer_state_bytes_round_trip() -> None:
    """A restored shard continues as the original, with Adam's moments and step count."""
    from slurmdl.train.library import shard_optimizer as optimizers
    from slurmdl.train.library.replica import Replica

    def make_optimizer() -> tuple[Replica, Any]:
        torch.manual_seed(1)
        module = torch.nn.Linear(6, 4)
        opt = torch.optim.Adam(module.parameters(), lr=0.1)
        replica = Replica(module)
        return replica, optimizers.make_shard_optimizer(opt, replica, slice(5, 20))
    (replica, original), (other_replica, restored) = make_optimizer(), make_optimizer()
    hyperparameters = np.array([0.9, 0.999, 1e-8, 0.1, 0.0])
    for step in range(3):
        replica.gradients[:] = step + 1
        original(hyperparameters)
    other_replica.parameters[5:20] = replica.parameters[5:20]
    restored.load_state_bytes(original.state_bytes())
    for each_replica, optimizer in ((replica, original), (other_replica, restored)):
        each_replica.gradients[:] = -2
        optimizer(hyperparameters)
    assert (replica.parameters == other_replica.parameters).all()
    assert (replica.parameters[5:20] != make_optimizer()[0].parameters[5:20]).all()


@pytest.mark.parametrize("speeds", [[1.0], [1.0] * 3, [3.0, 1.0], [1.0, 2.0, 4.0]])
@pytest.mark.parametrize("size", [0, 7, 1000, 9 * SHARD_BLOCK + 17])
def test_split_by_speed_is_proportional(size: int, speeds: list[float]) -> None:
    parts = split_by_speed(size, speeds)
    assert parts[0].start == 0
    assert parts[-1].stop == size
    for part, following in pairwise(parts):
        assert part.stop == following.start
        assert size < SHARD_BLOCK or part.stop % SHARD_BLOCK == 0
    for part, speed in zip(parts, speeds, strict=True):
        expected = size * speed / sum(speeds)
        assert part.stop - part.start == pytest.approx(expected, abs=SHARD_BLOCK if size > SHARD_BLOCK else 1.01)


def test_assign_shards_slow_link_gets_less() -> None:
    def program(transport: VirtualTransport) -> list[int]:
        costs = {"a|a": 1e-9, "a|b": 3e-9, "b|b": 1e-9}
        parts = assign_shards(server_context(transport, ASYNC, 2, costs, "abaa", "wxyz", 4000))
        same_node = assign_shards(server_context(transport, ASYNC, 3, costs, "aaaa", "wwxz", 4000))
        unknown = assign_shards(server_context(transport, ASYNC, 2, {"a|a": 1e-9}, "abaa", "wxyz", 4000))
        return [[part.stop - part.start for part in slices] for slices in (parts, same_node, unknown)]
    assert virtual.run_virtual_ranks(4, program)[0] == [[3000, 1000], [1000, 1000, 2000], [2000, 2000]]


def test_traffic_locality_of_unequal_shards() -> None:
    """Servers 0 and 1 hold three quarters and one quarter of the model; workers are 2 and 3."""
    def program(transport: VirtualTransport) -> list[tuple[float, float]]:
        shards = [ShardAssignment(0, slice(0, 300)), ShardAssignment(1, slice(300, 400))]
        return [traffic_locality(server_context(transport, ASYNC, 2, None, zones, nodes, 400), shards)
                for zones, nodes in (("aaaa", "wxww"), ("abab", "wxyz"), (("",) * 4, "wxwx"))]
    assert virtual.run_virtual_ranks(4, program)[0] == [(0.75, 1.0), (0.0, 0.5), (0.5, 0.5)]


def test_make_parameter_server_selects_server_type() -> None:
    types = [type(run_ps(config, 1, [[1.0]], lambda worker, model: model)[0][1])
             for config in (StrategyConfig("ps", "shards"), ASYNC)]
    assert types == [SyncPSServer, AsyncPSServer]
