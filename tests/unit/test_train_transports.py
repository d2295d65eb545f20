"""Transports: the same results on virtual ranks, over MPI and torch.distributed; clocks and errors of virtual ranks.

MPI and torch.distributed run all cases of transport_program.py in one start of four ranks.
"""

from __future__ import annotations

import functools
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi import mpirun, needs_mpi, torchrun
from strategy_harness import consensus_spread
from transport_program import CASES, MESSAGES, RANKS, STEPS, STRATEGIES, TRAINED, WITH_MEMORY

from slurmdl.errors import TrainError
from slurmdl.train.transports.virtual import (
    MAX_IDLE_POLLS,
    POLL_COST_SECONDS,
    Link,
    QueueingNetwork,
    VirtualTransport,
    run_virtual_ranks,
)
from slurmdl.train.transports.window import _MIX_BLOCK, ModelWindow, mix_into, mix_pair

PROGRAM, TESTS = str(Path(__file__).with_name("transport_program.py")), str(Path(__file__).parents[1])
REAL = [pytest.param(mpirun, marks=needs_mpi, id="mpi"), pytest.param(torchrun, id="torch")]
torch.set_num_threads(1)


@functools.cache
def run_cases(start: Callable[..., Any]) -> list[dict[str, Any]]:
    """Results of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        proc = start(RANKS, PROGRAM, folder, environ={"PYTHONPATH": f"{TESTS}:{Path(TESTS).parent}"}, timeout=400)
        assert proc.returncode == 0, proc.stderr
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(RANKS)]


@functools.cache
def run_virtual_case(name: str) -> list[Any]:
    return run_virtual_ranks(RANKS, CASES[name])


def results(start: Any, name: str) -> list[Any]:
    if start is None:
        return run_virtual_case(name)
    if name in STRATEGIES and STRATEGIES[name].shared_memory and start is torchrun:
        pytest.skip("torch.distributed shares no memory")
    return [rank[name] for rank in run_cases(start)]


@pytest.mark.parametrize("start", [pytest.param(None, id="virtual"), *REAL])
@pytest.mark.parametrize(("case", "expected"), [
    ("send_around_ring", [[float((rank - turn) % 4) for turn in range(1, 5)] for rank in range(4)]),
    ("exchange_types", [[True] * 20] * 4), ("keep_order_per_tag", [[-1] * 6, [0, 2, 4, 1, 3, 5], [-1] * 6, [-1] * 6]),
    ("probe", [[1, 2, 3], [], [], []]), ("wait_for_any", [[1, 2], [], [], []]),
    ("collect", [([[0], [1], [2], [3]], ["0", "1", "2", "3"] if rank == 0 else None, [0]) for rank in range(4)])],
    ids=list(MESSAGES))
def test_messages_and_collectives(start: Any, case: str, expected: list[Any]) -> None:
    assert results(start, case) == expected


@pytest.mark.parametrize("start", REAL)
@pytest.mark.parametrize("case", [name for name, config in STRATEGIES.items() if not config.asynchronous])
def test_synchronous_strategy_equals_virtual_ranks(start: Any, case: str) -> None:
    for real, virtual in zip(results(start, case), run_virtual_case(case), strict=True):
        assert real["exchange_steps"] == virtual["exchange_steps"] and real["sent"] == virtual["sent"]
        assert 0 < len(real["exchange_steps"]) <= STEPS
        assert np.abs(real["final"] - virtual["final"]).max() < 1e-5


@pytest.mark.parametrize("start", [pytest.param(None, id="virtual"), *REAL])
@pytest.mark.parametrize("case", [name for name in STRATEGIES if name not in ("local-sgd", "shared push")])
def test_gossip_preserves_sum(start: Any, case: str) -> None:
    logs = results(start, case)
    expected = sum(log["initial"] + log["total_update"] for log in logs)
    assert np.abs(expected - sum(log["final"] * log["weight"] for log in logs)).max() < 1e-4
    assert sum(log["weight"] for log in logs) == pytest.approx(RANKS, rel=1e-12)
    assert all(log["exchange_steps"] for log in logs)


@pytest.mark.parametrize("start", [pytest.param(None, id="virtual"), REAL[0]])
def test_asynchronous_models_in_shared_memory_stay_within_their_range(start: Any) -> None:
    initial, final = (np.array([log[name] for log in results(start, "shared push")]) for name in ("initial", "final"))
    assert (final <= initial.max(0) + 1e-5).all() and (final >= initial.min(0) - 1e-5).all()
    assert consensus_spread(final) < consensus_spread(initial)


@needs_mpi
def test_strategies_make_no_mpi_collective_call() -> None:
    for rank in run_cases(mpirun):
        for name in ("servers", *(name for name, config in STRATEGIES.items() if not config.shared_memory)):
            assert rank[f"collectives of {name}"] == [], name


@pytest.mark.parametrize("start", REAL)
@pytest.mark.parametrize("case", TRAINED)
def test_training_sends_the_messages_of_virtual_ranks(start: Any, case: str) -> None:
    for real, virtual in zip(results(start, case), run_virtual_case(case), strict=True):
        if start is mpirun or "allreduce" not in TRAINED[case]:  # torch.distributed shares no memory inside of nodes
            assert virtual["log"] == real["log"] and virtual["sent"] == real["sent"]
        assert sum(size for _, size, _ in virtual["log"]) == sum(virtual["sent"].values()) > 0
        if not real["is_server"]:
            assert np.abs(virtual["parameters"] - real["parameters"]).max() < 1e-5


@pytest.mark.parametrize("start", [pytest.param(None, id="virtual"), *REAL])
def test_asynchronous_servers_end_with_one_model(start: Any) -> None:
    (first, first_change), (second, second_change), *workers = results(start, "servers")
    assert all((model == workers[0][0]).all() for model, _ in workers)
    model = workers[0][0]
    assert (1 - model[0], 1 - model[-1]) == pytest.approx((first_change, second_change), rel=1e-3)
    assert first[0] == model[0] and second[-1] == model[-1] and first_change > 0.01


@needs_mpi
def test_windows_have_no_torn_reads_over_mpi() -> None:
    for rank, result in enumerate(run_cases(mpirun)):
        assert result["mix_in_window"] == result["read_window"]["torn"] == 0
        assert rank % 2 == 0 or result["read_window"]["read"] > 10
    assert run_virtual_ranks(RANKS, WITH_MEMORY["mix_in_window"]) == [0] * RANKS


@pytest.mark.parametrize("start", REAL)
def test_exchange_overlaps_with_the_backward_pass(start: Any) -> None:
    """Each element is copied once; the model after passes in `no_sync` is that of one process on all samples."""
    assert results(start, "record_starts") == [[76, 60, 56, 40, 36, 20, 16, 0, 0]] * RANKS
    for *to_host, to_device in results(start, "record_copies"):
        assert sum(size for size, _ in to_host) == 80 and to_device == (80, 8)
        assert min(gradients for _, gradients in to_host) < 4, "of eight gradients"
    torch.manual_seed(3)
    x, y = torch.randn(80, 6), torch.randint(3, (80,))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    expected = torch.nn.utils.parameters_to_vector(model.parameters())
    for exchanges, parameters in results(start, "accumulate"):
        assert exchanges == 3 * 2 and torch.allclose(torch.tensor(parameters), expected, rtol=0, atol=1e-6)


class SlowNetwork:
    """One second per byte; a send completes after half of that time."""

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        return clock + size / 2, clock + size


def test_virtual_messages_take_network_time() -> None:
    def program(transport: VirtualTransport) -> tuple[float, float]:
        array = np.zeros(8, np.uint8)
        if transport.rank == 0:
            transport.emulate_compute(1.0)
            transport.waitall([transport.isend(1, array)])
        else:
            request = transport.irecv(0, array)
            while not transport.testall([request]):
                transport.emulate_compute(3.0)
        done_at = transport.clock
        transport.barrier()
        return done_at, transport.clock
    (sent_at, barrier_0), (received_at, barrier_1) = run_virtual_ranks(2, program, SlowNetwork())
    assert sent_at == 5.0
    assert 9.0 <= received_at < 12.01
    assert barrier_0 == barrier_1 == received_at


def test_virtual_ranks_run_in_the_order_of_their_clocks() -> None:
    order = []

    def program(transport: VirtualTransport) -> tuple[float, list[int]]:
        draw, found, array = np.random.default_rng(transport.rank), [], np.zeros(1)
        for _ in range(2 << transport.rank):
            transport.emulate_compute(1.0 / (1 << transport.rank))
            order.append((transport.clock, transport.rank))
        end = transport.clock
        for _ in range(50):
            transport.emulate_compute(float(draw.random()))
            transport.isend(int(draw.integers(transport.size)), array, 1)
            if (source := transport.iprobe(1)) is not None:
                transport.irecv(source, array, 1)
                found.append(source)
        return end, found
    first = run_virtual_ranks(3, program)
    assert [end for end, _ in first] == [2.0, 2.0, 2.0]
    assert order == sorted(order)
    assert run_virtual_ranks(3, program) == first


def test_links_carry_one_message_at_a_time() -> None:
    links = QueueingNetwork(["n0", "n1", "n2", "n3"], ["A", "A", "B", "B"], {
        "inter_zone": Link(100.0, 1.0), "intra_zone": Link(1000.0)})
    assert links.arrival(0, 2, 100, 5.0) == (6.0, 7.0)
    assert links.arrival(1, 3, 100, 5.0) == (7.0, 8.0), "the zone's uplink was busy"
    assert links.arrival(2, 0, 100, 5.0) == (6.0, 7.0), "the other direction was idle"
    assert links.arrival(0, 1, 100, 5.0) == (5.1, 5.1)
    assert links.arrival(2, 3, 100, 5.0) == (5.1, 5.1)
    links = QueueingNetwork(["n0", "n1", "n2"], ["A", "B", "C"], {"inter_zone": Link(100.0)})
    assert links.arrival(0, 2, 100, 0.0) == (1.0, 1.0)
    assert links.arrival(1, 2, 100, 0.0) == (1.0, 2.0), "the receiver's link was busy"


def deadlock(transport: VirtualTransport) -> None:
    if transport.rank == 2:
        return
    if transport.rank == 3:
        transport.barrier()
    array = np.zeros(1)
    transport.waitall([transport.isend(2, array), transport.irecv(1 - transport.rank, array, tag=7)])


def wait_for_flag(transport: VirtualTransport) -> None:
    window = ModelWindow(transport.allocate_shared, transport.rank, (0, 1), 2)
    if transport.rank:
        window.wait_flag(0, "ready", 7)


def send_other_size(transport: VirtualTransport) -> None:
    if transport.rank == 0:
        transport.isend(1, np.zeros(3, np.float32))
    else:
        transport.waitall([transport.irecv(0, np.zeros(4, np.float32))])


def poll_long(transport: VirtualTransport, sends: bool = True) -> float:
    array = np.zeros(1)
    if transport.rank == 1:
        transport.emulate_compute(5 * MAX_IDLE_POLLS * POLL_COST_SECONDS)
        if sends:
            transport.isend(0, array, 3)
        return 0.0
    while transport.iprobe(3) is None:
        pass
    return transport.clock


@pytest.mark.parametrize(("ranks", "program", "message"), [
    (4, deadlock, "^deadlock: rank 0 waits for a message of rank 1 with tag 7; rank 1 waits for a message of "
     "rank 0 with tag 7; rank 2 has ended; rank 3 waits for an allgather of all ranks$"),
    (2, wait_for_flag, "rank 1 waits for rank 0 to be ready in step 7"),
    (2, send_other_size, "12 bytes; expected 16"),
    (2, functools.partial(poll_long, sends=False), "livelock: rank 0 polls without success; rank 1 has ended")])
def test_virtual_run_without_progress_names_its_ranks(ranks: int, program: Any, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        run_virtual_ranks(ranks, program)


def test_virtual_polling_may_take_long() -> None:
    assert run_virtual_ranks(2, poll_long)[0] == pytest.approx(
        5 * MAX_IDLE_POLLS * POLL_COST_SECONDS, abs=2 * POLL_COST_SECONDS)


def test_virtual_rank_that_fails_ends_all() -> None:
    ended = []

    def program(transport: VirtualTransport) -> None:
        try:
            if transport.rank == 1:
                raise ValueError("rank 1 fails")
            transport.barrier()
        finally:
            ended.append(transport.rank)
    with pytest.raises(ValueError, match="rank 1 fails"):
        run_virtual_ranks(3, program)
    assert set(ended) <= {0, 1, 2} and 1 in ended


def test_mix_newest_skips_incomplete_versions() -> None:
    """Stamps are set as by an interrupted writer."""
    def program(transport: VirtualTransport) -> list[float]:
        window = ModelWindow(transport.allocate_shared, transport.rank, (0, 1), 4)
        if transport.rank == 0:
            window.publish(1, np.full(4, 1, np.float32))
            window.publish(2, np.full(4, 2, np.float32))
            stamps = window._control_words[0]
            for slot, stamp in ((1, 2 * 3 + 1), (0, 2 * 4 + 1), (None, 0)):
                transport.barrier()
                transport.barrier()
                if slot is not None:
                    stamps[slot] = stamp
                    window._slots[0][slot][:2] = 3 if slot else window._slots[0][slot][0]
            return []
        values_read = []
        for version in range(3):
            transport.barrier()
            model = np.zeros(4, np.float32)
            assert window.mix_newest(version, model, 0, 1.0) == (version < 2)
            assert (model == model[0]).all()
            values_read.append(float(model[0]))
            transport.barrier()
        return values_read
    assert run_virtual_ranks(2, program)[1] == [2.0, 2.0, 0.0]


def test_wait_flag_returns_when_peer_sets_it() -> None:
    def program(transport: VirtualTransport) -> tuple[float, list[float]]:
        window = ModelWindow(transport.allocate_shared, transport.rank, (0, 1), 2)
        if transport.rank == 0:
            window.wait_flag(1, "ready", 3)
            return transport.clock, window.live_model(1).tolist()
        window.set_flag("ready", 2)
        transport.emulate_compute(5.0)
        window.live_model(1)[:] = 7
        window.set_flag("ready", 3)
        return transport.clock, []
    assert run_virtual_ranks(2, program)[0] == (5.0, [7.0, 7.0])


@pytest.mark.parametrize("size", [0, 1, _MIX_BLOCK - 1, _MIX_BLOCK, 2 * _MIX_BLOCK + 3])
def test_mix_into_and_mix_pair(size: int) -> None:
    local, remote = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)
    out = np.empty_like(local)
    mix_into(local, remote, 0.25, out)
    assert out == pytest.approx(0.75 * local + 0.25 * remote, abs=1e-6)
    left, right = local.copy(), remote.copy()
    mix_pair(left, right, (0.25, 0.25))
    assert left == pytest.approx(out, abs=1e-6)
    assert right == pytest.approx(0.25 * local + 0.75 * remote, abs=1e-6)
    mix_into(local, remote, 0.25, local)
    assert (local == out).all()
