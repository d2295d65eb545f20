"""Parameter servers against their definitions: shards, staleness, old gradients, and copies of shards."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import mpirun, needs_mpi

from slurmdl.train import init
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext, shard_backup
from slurmdl.train.strategies.parameter_server import (
    SHARD_BLOCK,
    AsyncPSServer,
    SyncPSServer,
    assign_shards,
    mean_into,
    reassign,
    split_by_speed,
    traffic_locality,
)
from slurmdl.train.strategies.shard_backup import ShardAssignment, promote_backup
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import virtual
from slurmdl.train.transports.virtual import VirtualTransport

SIZE, RATE = 40, 0.5
torch.set_num_threads(1)


class Plain:
    """Gradient descent, whose momentum is the sum of all gradients; see strategies.strategy.Update."""

    def __init__(self, parameters: Any, gradients: Any) -> None:
        self._parameters, self._gradients = parameters, gradients
        self.rates: list[float] = []
        self.total = np.zeros_like(gradients)

    def __call__(self, numbers: Any) -> None:
        self.rates.append(float(numbers[1]))
        self.total += self._gradients
        self._parameters -= np.float32(numbers[1]) * self._gradients

    def state_bytes(self) -> Any:
        return np.frombuffer(self.total.tobytes(), np.uint8)

    def load_state_bytes(self, state: Any) -> None:
        self.total[:] = state.view(np.float32)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_the_mean_of_gradients_takes_no_further_memory(count: int) -> None:
    """And is bit for bit that of numpy, which copies all vectors into one array first."""
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


def setting(transport: VirtualTransport, method: StrategyConfig, servers: int, costs: dict[str, float] | None = None,
            zones: Sequence[str] = (), nodes: Sequence[str] = (), size: int = SIZE) -> StrategyContext:
    ranks = tuple(range(transport.size))
    parameters, gradients = np.ones(size, np.float32), np.zeros(size, np.float32)
    return StrategyContext(MeteredP2P(transport, ("zone",) * transport.size), CommThread(False), ranks[servers:], ranks[:servers],
                   parameters, gradients, (size,), method, 1, tuple(nodes) or ("",) * transport.size,
                   tuple(zones) or ("",) * transport.size, costs or {}, lambda: RATE,
                   lambda part: Plain(parameters[part], gradients[part]), lambda: np.array([0.9, RATE]), (1,))


def played(method: StrategyConfig, servers: int, work: Sequence[Sequence[float]], gradient: Callable[[int, Any], Any],
           begins: Callable[[int, int], None] = lambda worker, step: None) -> list[tuple[Any, Any, float]]:
    """Let workers compute for `work[worker][step]` seconds in each of their steps.

    Returns
    -------
    for each rank its parameters, its strategy, and the time at which it has ended.
    """
    def program(transport: VirtualTransport) -> tuple[Any, Any, float]:
        its = setting(transport, method, servers)
        strategy = STRATEGIES["ps"](its)
        if transport.rank < servers:
            number = 0
            while strategy.serve_step(number):
                number += 1
        else:
            worker = transport.rank - servers
            for step, seconds in enumerate(work[worker]):
                begins(worker, step)
                transport.emulate_compute(seconds)
                its.gradients[:] = gradient(worker, its.parameters)
                strategy.before_optimizer_step(step)
        strategy.finish()
        return its.parameters, strategy, transport.clock
    return virtual.run_virtual_ranks(servers + len(work), program)


def stale(staleness: int) -> StrategyConfig:
    return StrategyConfig("ps", "shards", max_staleness=staleness)


FREE = StrategyConfig("ps", "shards", asynchronous=True)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("staleness", [1, 4])
def test_no_worker_is_farther_ahead_than_the_bound(staleness: int, servers: int) -> None:
    random = np.random.default_rng(staleness)
    work = [(random.exponential(size=25) * speed).tolist() for speed in (1, 1, 2, 5)]
    pushed, gaps = Counter(dict.fromkeys(range(4), 0)), []

    def begins(worker: int, step: int) -> None:
        gaps.append(step - min(pushed.values()))
        pushed[worker] = step + 1

    played(stale(staleness), servers, work, lambda worker, model: np.ones(SIZE), begins)
    assert len(gaps) == 100
    assert max(gaps) == staleness


def test_without_a_bound_nobody_waits() -> None:
    """Beside asking, no time goes by but that of the computations: each worker ends when its own work is done."""
    begun: list[tuple[int, int]] = []
    work = [[1.0] * 30, [4.0] * 30]
    played(FREE, 2, work, lambda worker, model: np.ones(SIZE), lambda worker, step: begun.append((worker, step)))
    assert begun.index((0, 29)) < begun.index((1, 8))


def test_a_bound_of_none_is_in_step() -> None:
    work = [[1.0, 2.0, 1.0], [2.0, 1.0, 3.0]]
    ran = [played(method, 1, work, lambda worker, model: (worker + 1) * model) for method in
           (StrategyConfig("ps", "shards"), stale(0))]
    assert isinstance(ran[1][0][1], SyncPSServer)
    model = 1.0
    for _ in range(3):
        model -= RATE * 1.5 * model
    for (first, _, _), (second, _, _) in zip(*ran, strict=True):
        assert (first == second).all()
        assert first == pytest.approx(np.full(SIZE, model, np.float32), rel=1e-5)


def test_an_old_gradient_makes_a_smaller_step() -> None:
    """One worker pushes at 1, 2, 3, 4; the other at 2.5 a gradient from which two updates have been made since."""
    server, *_ = played(FREE, 1, [[1.0] * 4, [2.5]], lambda worker, model: np.full(SIZE, 1.0 + worker))
    parameters, strategy, _ = server
    assert strategy._own[0].update.rates == pytest.approx([RATE, RATE, RATE / 3, RATE / 2, RATE])
    assert parameters == pytest.approx(np.full(SIZE, 1 - RATE * (1 + 1 + 2 / 3 + 1 / 2 + 1), np.float32), rel=1e-5)


@pytest.mark.parametrize("method", [FREE, stale(2)], ids=["free", "stale"])
@pytest.mark.parametrize("servers", [1, 3])
def test_workers_with_unequal_numbers_of_steps_end_with_one_model(method: StrategyConfig, servers: int) -> None:
    work = [[1.0] * 3, [0.3] * 40, [2.0], []]
    ran = played(method, servers, work, lambda worker, model: 0.05 * model)
    model = ran[servers][0]
    assert model.max() < 0.9
    for parameters, _, _ in ran[servers:]:
        assert (parameters == model).all()
    for place, part in enumerate(split_by_speed(SIZE, [1.0] * servers)):
        assert (ran[place][0][part] == model[part]).all()


@pytest.mark.parametrize("method", [StrategyConfig("ps", "shards"), FREE, stale(3)], ids=["in step", "free", "stale"])
def test_servers_hold_copies_of_each_other_that_go_on_as_they_do(method: StrategyConfig,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    every, steps, servers, workers = 5, 13, 3, 2
    monkeypatch.setattr("slurmdl.train.strategies.parameter_server.EVERY", every)
    monkeypatch.setattr("slurmdl.train.strategies.parameter_server.EVERY", every)
    copied: dict[int, dict[int, Any]] = {rank: {} for rank in range(servers)}
    before = shard_backup.ShardBackups.exchange_if_due

    def after(its: Any, updates: int) -> None:
        own, = its._own
        copied[its._its.messages.rank][updates] = (its._its.parameters[own.part].copy(), own.update.state().copy())
        before(its, updates)

    monkeypatch.setattr(shard_backup.ShardBackups, "after", after)
    ran = played(method, servers, [[1.0] * steps, [1.7] * steps], lambda worker, model: 0.1 * model + worker)
    due = 10 if isinstance(ran[0][1], SyncPSServer) else 20
    parts = split_by_speed(SIZE, [1.0] * servers)
    for rank in range(servers):
        (held,), lost = ran[rank][1].spares.held.values(), (rank - 1) % servers
        parameters, state = copied[lost][due]
        assert (held.updates, held.part) == (due, parts[lost])
        assert (held.parameters == parameters).all()
        assert (held.state == state).all()

    def program(transport: VirtualTransport) -> None:
        its = setting(transport, method, 1)
        update = promote_backup(held, its)
        assert (its.parameters[held.part] == held.parameters).all()
        its.gradients[held.part] = 2
        update(np.array([0.9, RATE]))
        assert its.parameters[held.part] == pytest.approx(held.parameters - 2 * RATE)
        assert update.total == pytest.approx(held.state.view(np.float32) + 2)
    virtual.run_virtual_ranks(workers, program)


def test_shards_of_lost_servers_go_to_the_next_that_lives() -> None:
    homes = [ShardAssignment(server, slice(server, server + 1)) for server in (2, 5, 7)]
    assert [home.server for home in reassign(homes, (2, 5, 7), (2, 7))] == [2, 7, 7]
    assert [home.server for home in reassign(homes, (2, 5, 7), (2,))] == [2, 2, 2]
    again = reassign(reassign(homes, (2, 5, 7), (2, 7)), (2, 7), (2,))
    assert [(home.server, home.part.start) for home in again] == [(2, 2), (2, 5), (2, 7)]


@pytest.mark.parametrize("method", [StrategyConfig("ps", "shards"), FREE], ids=["in step", "free"])
def test_a_server_of_two_shards_does_as_two_servers_do(method: StrategyConfig) -> None:
    """A worker pushes to two servers, and in another run to one that has taken over the other's shard."""
    def program(homes: Sequence[ShardAssignment]) -> Callable[[VirtualTransport], Any]:
        def live(transport: VirtualTransport) -> Any:
            its = setting(transport, method, len({home.server for home in homes}))
            strategy = type(STRATEGIES["ps"](its))(its, homes)
            if transport.rank in its.servers:
                while strategy.serve_step(0):
                    pass
            else:
                for step in range(5):
                    its.gradients[:] = 0.1 * its.parameters + np.arange(SIZE)
                    strategy.before_optimizer_step(step)
                strategy.finish()
            return its.parameters
        return live
    parts = [slice(0, 15), slice(15, SIZE)]
    two = virtual.run_virtual_ranks(3, program([ShardAssignment(0, parts[0]), ShardAssignment(1, parts[1])]))
    one = virtual.run_virtual_ranks(2, program([ShardAssignment(0, parts[0]), ShardAssignment(0, parts[1])]))
    assert (two[-1] == one[-1]).all()
    assert not (two[-1] == 1).all()
    assert (one[0] == one[1]).all()


def test_copies_are_counted() -> None:
    """Two servers, each with half of the model and of the momentum; one exchange in a hundred steps."""
    ran = played(StrategyConfig("ps", "shards"), 2, [[1.0] * 100], lambda worker, model: model)
    pulled, header = 100 * SIZE // 2 * 4, shard_backup._HEADER_DTYPE.itemsize
    for _, strategy, _ in ran[:2]:
        assert sum(strategy._its.messages.sent.values()) == pulled + header + 2 * (SIZE // 2) * 4


def digits(model: StrategyConfig, ranks: int, optimizer: Callable[[Any], Any], steps: int) -> tuple[float, list[Any]]:
    """Accuracy on digits, and the final parameters of each rank."""
    from slurmdl.train.trainer.data import load_dataset

    data = load_dataset("digits", 1)

    def program(transport: VirtualTransport) -> tuple[float, Any]:
        run = init(model, environ={}, transport=transport)
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(),
                                     torch.nn.Linear(32, 10))
        opt = optimizer(module)
        run.attach(module, opt)
        if run.is_server:
            run.serve()
        else:
            random = np.random.default_rng(run.rank)
            for _ in range(steps):
                chosen = random.integers(len(data.train_x), size=32)
                transport.emulate_compute(float(random.exponential()))
                opt.zero_grad()
                torch.nn.functional.cross_entropy(module(torch.from_numpy(data.train_x[chosen])),
                                                  torch.from_numpy(data.train_y[chosen])).backward()
                opt.step()
        run.finish()
        with torch.no_grad():
            right = module(torch.from_numpy(data.test_x)).argmax(1) == torch.from_numpy(data.test_y)
        return float(right.float().mean()), run.replica.parameters.copy()
    scores, models = zip(*virtual.run_virtual_ranks(ranks, program), strict=True)
    return scores[-1], list(models)


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adam(module: Any) -> Any:
    return torch.optim.Adam(module.parameters(), lr=3e-3)


@pytest.mark.parametrize(("method", "optimizer"), [
    (replace(FREE, ps=2), sgd), (replace(FREE, ps=2), adam), (replace(stale(3), ps=2), sgd)],
    ids=["free sgd", "free adam", "stale"])
def test_it_learns(method: StrategyConfig, optimizer: Callable[[Any], Any]) -> None:
    accuracy, models = digits(method, 6, optimizer, 60)
    assert accuracy > 0.9
    workers = models[method.ps:]
    assert all((model == workers[0]).all() for model in workers)


def test_one_worker_without_waiting_is_one_process() -> None:
    """No gradient of a single worker is old."""
    free, in_step = (digits(method, 2, adam, 30)[1][1] for method in (FREE, StrategyConfig("ps", "shards")))
    assert (free == in_step).all()


def test_the_state_of_an_optimizer_travels() -> None:
    """A shard rebuilt from its copy goes on as the lost one, with Adam's two moments and its count of steps."""
    from slurmdl.train.library import shard_optimizer as optimizers
    from slurmdl.train.library.replica import Replica

    def made() -> tuple[Replica, Any]:
        torch.manual_seed(1)
        module = torch.nn.Linear(6, 4)
        opt = torch.optim.Adam(module.parameters(), lr=0.1)
        replica = Replica(module)
        return replica, optimizers.make_shard_optimizer(opt, replica, slice(5, 20))
    (one, lost), (other, found) = made(), made()
    numbers = np.array([0.9, 0.999, 1e-8, 0.1, 0.0])
    for step in range(3):
        one.gradients[:] = step + 1
        lost(numbers)
    other.parameters[5:20] = one.parameters[5:20]
    found.restore(lost.state())
    for replica, update in ((one, lost), (other, found)):
        replica.gradients[:] = -2
        update(numbers)
    assert (one.parameters == other.parameters).all()
    assert (one.parameters[5:20] != made()[0].parameters[5:20]).all()


@pytest.mark.parametrize("speeds", [[1.0], [1.0] * 3, [3.0, 1.0], [1.0, 2.0, 4.0]])
@pytest.mark.parametrize("size", [0, 7, 1000, 9 * SHARD_BLOCK + 17])
def test_shards_are_in_proportion(size: int, speeds: list[float]) -> None:
    parts = split_by_speed(size, speeds)
    assert parts[0].start == 0
    assert parts[-1].stop == size
    for part, following in pairwise(parts):
        assert part.stop == following.start
        assert size < SHARD_BLOCK or part.stop % SHARD_BLOCK == 0
    for part, speed in zip(parts, speeds, strict=True):
        wanted = size * speed / sum(speeds)
        assert part.stop - part.start == pytest.approx(wanted, abs=SHARD_BLOCK if size > SHARD_BLOCK else 1.01)


def test_a_server_behind_a_slow_link_holds_less() -> None:
    def program(transport: VirtualTransport) -> list[int]:
        costs = {"a|a": 1e-9, "a|b": 3e-9, "b|b": 1e-9}
        parts = assign_shards(setting(transport, FREE, 2, costs, "abaa", "wxyz", 4000))
        beside = assign_shards(setting(transport, FREE, 3, costs, "aaaa", "wwxz", 4000))
        unknown = assign_shards(setting(transport, FREE, 2, {"a|a": 1e-9}, "abaa", "wxyz", 4000))
        return [[part.stop - part.start for part in its] for its in (parts, beside, unknown)]
    assert virtual.run_virtual_ranks(4, program)[0] == [[3000, 1000], [1000, 1000, 2000], [2000, 2000]]


def test_aggregation_degree() -> None:
    """Servers 0 and 1 with three quarters and one of the model, workers 2 and 3."""
    def program(transport: VirtualTransport) -> list[tuple[float, float]]:
        homes = [ShardAssignment(0, slice(0, 300)), ShardAssignment(1, slice(300, 400))]
        return [traffic_locality(setting(transport, FREE, 2, None, zones, nodes, 400), homes)
                for zones, nodes in (("aaaa", "wxww"), ("abab", "wxyz"), (("",) * 4, "wxwx"))]
    assert virtual.run_virtual_ranks(4, program)[0] == [(0.75, 1.0), (0.0, 0.5), (0.5, 0.5)]


@needs_mpi
def test_by_mpi_whoever_comes_is_served_without_a_collective_call() -> None:
    """Workers with random delays and unequal numbers of steps, on two servers, with a bound and without one."""
    done = mpirun(5, str(Path(__file__).with_name("ps_ranks.py")))
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout).items():
        assert found["collective"] == []
        assert found["alike"], name
        assert found["moved"] == pytest.approx(found["expected"], rel=1e-4)
        assert found["gap"] <= (3 if name == "stale" else 100)


def test_which_server_serves() -> None:
    kinds = [type(played(method, 1, [[1.0]], lambda worker, model: model)[0][1])
             for method in (StrategyConfig("ps", "shards"), stale(0), stale(1), FREE)]
    assert kinds == [SyncPSServer, SyncPSServer, AsyncPSServer, AsyncPSServer]
