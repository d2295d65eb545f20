"""Virtual ranks: message order, clocks, and errors."""

from __future__ import annotations

import numpy as np
import pytest

from slurmdl.errors import TrainError
from slurmdl.train.transports.virtual import MAX_IDLE_POLLS, POLL_COST_SECONDS, VirtualTransport, run_virtual_ranks


def ring(transport: VirtualTransport) -> list[float]:
    """Send numbers around the ring; return the numbers that this rank received."""
    current, received_values = np.array([transport.rank], np.float32), []
    for _ in range(transport.size):
        received = np.empty_like(current)
        requests = [transport.irecv((transport.rank - 1) % transport.size, received),
                    transport.isend((transport.rank + 1) % transport.size, current)]
        transport.waitall(requests)
        current = received
        received_values.append(float(current[0]))
    return received_values


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_virtual_ring_delivers_messages(count: int) -> None:
    assert run_virtual_ranks(count, ring) == [[float((rank - turn) % count) for turn in range(1, count + 1)]
                                for rank in range(count)]


def test_virtual_send_buffer_can_be_reused() -> None:
    def program(transport: VirtualTransport) -> float:
        array = np.array([3.0, 4.0])
        if transport.rank == 0:
            transport.waitall([transport.isend(1, array)])
            array[:] = 0
            transport.barrier()
        else:
            transport.barrier()
            transport.waitall([transport.irecv(0, array)])
        return float(array.sum())
    assert run_virtual_ranks(2, program) == [0.0, 7.0]


def test_virtual_messages_keep_order_per_tag() -> None:
    def program(transport: VirtualTransport) -> list[int]:
        numbers = np.arange(6)
        if transport.rank == 0:
            for number in numbers:
                transport.isend(1, numbers[number:number + 1], tag=int(number) % 2)
            return []
        received = np.full(6, -1)
        requests = [transport.irecv(0, received[index:index + 1], tag=index // 3) for index in range(6)]
        transport.waitall(requests)
        return received.tolist()
    assert run_virtual_ranks(2, program)[1] == [0, 2, 4, 1, 3, 5]


def test_virtual_iprobe_sees_arrived_messages_and_yields() -> None:
    def program(transport: VirtualTransport) -> int:
        array = np.zeros(1)
        if transport.rank:
            transport.emulate_compute(transport.rank * 1e-3)
            transport.waitall([transport.isend(0, array, tag=5)])
            return 0
        assert transport.iprobe(5) is None
        order = []
        while len(order) < 3:
            source = transport.iprobe(5)
            if source is not None:
                request = transport.irecv(source, array, 5)
                assert transport.testall([request])
                order.append(source)
        assert order == [1, 2, 3]
        assert 3e-3 <= transport.clock < 3.1e-3
        return 1
    assert run_virtual_ranks(4, program) == [1, 0, 0, 0]


def test_virtual_scheduler_runs_earliest_clock() -> None:
    """Ranks without communication run in the order of their clocks."""
    order = []

    def program(transport: VirtualTransport) -> float:
        for _ in range(2 << transport.rank):
            transport.emulate_compute(1.0 / (1 << transport.rank))
            order.append((transport.clock, transport.rank))
        return transport.clock
    assert run_virtual_ranks(3, program) == [2.0, 2.0, 2.0]
    assert order == sorted(order)


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
            done_at = transport.clock
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


def test_virtual_run_is_deterministic() -> None:
    def program(transport: VirtualTransport) -> list[int]:
        random, log, array = np.random.default_rng(transport.rank), [], np.zeros(1)
        for _ in range(50):
            transport.emulate_compute(float(random.random()))
            transport.isend(int(random.integers(transport.size)), array, 1)
            source = transport.iprobe(1)
            if source is not None:
                transport.irecv(source, array, 1)
                log.append(source)
        return log
    assert run_virtual_ranks(5, program) == run_virtual_ranks(5, program)


def test_virtual_collectives() -> None:
    def program(transport: VirtualTransport) -> tuple[object, ...]:
        own = [transport.rank]
        gathered = transport.allgather(own)
        assert gathered[transport.rank] is not own
        return gathered, transport.gather(str(transport.rank)), transport.broadcast(own)
    gathered = [[0], [1], [2]]
    assert run_virtual_ranks(3, program) == [
        (gathered, ["0", "1", "2"], [0]), (gathered, None, [0]), (gathered, None, [0])]


def test_virtual_deadlock_names_waiting_ranks() -> None:
    def program(transport: VirtualTransport) -> None:
        array = np.zeros(1)
        if transport.rank == 2:
            return
        if transport.rank == 3:
            transport.barrier()
        transport.waitall([transport.isend(2, array), transport.irecv(1 - transport.rank, array, tag=7)])
    with pytest.raises(TrainError) as error:
        run_virtual_ranks(4, program)
    assert str(error.value) == (
        "deadlock: rank 0 waits for a message of rank 1 with tag 7; rank 1 waits for a message of rank 0 with tag 7; "
        "rank 2 has ended; rank 3 waits for an allgather of all ranks")


def test_virtual_failing_rank_ends_all() -> None:
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
    assert set(ended) <= {0, 1, 2}
    assert 1 in ended


def test_virtual_message_of_wrong_size_raises() -> None:
    def program(transport: VirtualTransport) -> None:
        if transport.rank == 0:
            transport.isend(1, np.zeros(3, np.float32))
        else:
            transport.waitall([transport.irecv(0, np.zeros(4, np.float32))])
    with pytest.raises(TrainError, match="12 bytes; expected 16"):
        run_virtual_ranks(2, program)


def test_virtual_endless_polling_raises_but_long_polling_does_not() -> None:
    def program(transport: VirtualTransport, sends: bool) -> float:
        array = np.zeros(1)
        if transport.rank == 1:
            transport.emulate_compute(5 * MAX_IDLE_POLLS * POLL_COST_SECONDS)
            if sends:
                transport.isend(0, array, 3)
            return 0.0
        while transport.iprobe(3) is None:
            pass
        return transport.clock

    received_at = run_virtual_ranks(2, lambda transport: program(transport, True))[0]
    assert received_at == pytest.approx(5 * MAX_IDLE_POLLS * POLL_COST_SECONDS, abs=2 * POLL_COST_SECONDS)
    with pytest.raises(TrainError, match="livelock: rank 0 polls without success; rank 1 has ended"):
        run_virtual_ranks(2, lambda transport: program(transport, False))
