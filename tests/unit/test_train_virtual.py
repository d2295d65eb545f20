"""Virtual ranks: order, time, and what ends a run."""

from __future__ import annotations

import numpy as np
import pytest

from slurmdl.errors import TrainError
from slurmdl.train.transports.virtual import MAX_IDLE_POLLS, POLL_COST_SECONDS, VirtualTransport, run_virtual_ranks


def ring(transport: VirtualTransport) -> list[float]:
    """Hand a number round the ring; what each rank saw."""
    mine, seen = np.array([transport.rank], np.float32), []
    for _ in range(transport.size):
        theirs = np.empty_like(mine)
        requests = [transport.irecv((transport.rank - 1) % transport.size, theirs),
                    transport.isend((transport.rank + 1) % transport.size, mine)]
        transport.waitall(requests)
        mine = theirs
        seen.append(float(mine[0]))
    return seen


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_messages_arrive(count: int) -> None:
    assert run_virtual_ranks(count, ring) == [[float((rank - turn) % count) for turn in range(1, count + 1)]
                                for rank in range(count)]


def test_what_is_sent_may_change_at_once() -> None:
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


def test_messages_of_a_tag_keep_their_order_and_tags_their_own() -> None:
    def program(transport: VirtualTransport) -> list[int]:
        numbers = np.arange(6)
        if transport.rank == 0:
            for number in numbers:
                transport.isend(1, numbers[number:number + 1], tag=int(number) % 2)
            return []
        found = np.full(6, -1)
        requests = [transport.irecv(0, found[at:at + 1], tag=at // 3) for at in range(6)]
        transport.waitall(requests)
        return found.tolist()
    assert run_virtual_ranks(2, program)[1] == [0, 2, 4, 1, 3, 5]


def test_who_asks_sees_what_has_arrived_and_lets_others_go_on() -> None:
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


def test_clocks_decide_who_goes_on() -> None:
    """Ranks that never wait take turns as their speeds say."""
    order = []

    def program(transport: VirtualTransport) -> float:
        for _ in range(2 << transport.rank):
            transport.emulate_compute(1.0 / (1 << transport.rank))
            order.append((transport.clock, transport.rank))
        return transport.clock
    assert run_virtual_ranks(3, program) == [2.0, 2.0, 2.0]
    assert order == sorted(order)


class Slow:
    """A second per byte on the way, half of it until the sender is done."""

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        return clock + size / 2, clock + size


def test_messages_take_the_time_of_the_network() -> None:
    def program(transport: VirtualTransport) -> tuple[float, float]:
        array = np.zeros(8, np.uint8)
        if transport.rank == 0:
            transport.emulate_compute(1.0)
            transport.waitall([transport.isend(1, array)])
            at = transport.clock
        else:
            request = transport.irecv(0, array)
            while not transport.testall([request]):
                transport.emulate_compute(3.0)
            at = transport.clock
        transport.barrier()
        return at, transport.clock
    (left, met), (arrived, also) = run_virtual_ranks(2, program, Slow())
    assert left == 5.0
    assert 9.0 <= arrived < 12.01
    assert met == also == arrived


def test_same_program_same_order() -> None:
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


def test_gatherings() -> None:
    def program(transport: VirtualTransport) -> tuple[object, ...]:
        mine = [transport.rank]
        everyone = transport.allgather(mine)
        assert everyone[transport.rank] is not mine
        return everyone, transport.gather(str(transport.rank)), transport.broadcast(mine)
    everyone = [[0], [1], [2]]
    assert run_virtual_ranks(3, program) == [(everyone, ["0", "1", "2"], [0]),
                             (everyone, None, [0]), (everyone, None, [0])]


def test_deadlock_names_who_waits_for_whom() -> None:
    def program(transport: VirtualTransport) -> None:
        array = np.zeros(1)
        if transport.rank == 2:
            return
        if transport.rank == 3:
            transport.barrier()
        transport.waitall([transport.isend(2, array), transport.irecv(1 - transport.rank, array, tag=7)])
    with pytest.raises(TrainError) as raised:
        run_virtual_ranks(4, program)
    assert str(raised.value) == ("deadlock: rank 0 waits for a message of rank 1 with tag 7; rank 1 waits for a "
                                 "message of rank 0 with tag 7; rank 2 has ended; rank 3 waits for all ranks to meet")


def test_a_rank_that_fails_ends_all() -> None:
    ended = []

    def program(transport: VirtualTransport) -> None:
        try:
            if transport.rank == 1:
                raise ValueError("rank 1 has had enough")
            transport.barrier()
        finally:
            ended.append(transport.rank)
    with pytest.raises(ValueError, match="enough"):
        run_virtual_ranks(3, program)
    assert set(ended) <= {0, 1, 2}
    assert 1 in ended


def test_a_message_of_another_length_is_refused() -> None:
    def program(transport: VirtualTransport) -> None:
        if transport.rank == 0:
            transport.isend(1, np.zeros(3, np.float32))
        else:
            transport.waitall([transport.irecv(0, np.zeros(4, np.float32))])
    with pytest.raises(TrainError, match="12 bytes where 16 were expected"):
        run_virtual_ranks(2, program)


def test_ranks_that_ask_for_ever_are_told_apart_from_those_that_ask_long() -> None:
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

    waited = run_virtual_ranks(2, lambda transport: program(transport, True))[0]
    assert waited == pytest.approx(5 * MAX_IDLE_POLLS * POLL_COST_SECONDS, abs=2 * POLL_COST_SECONDS)
    with pytest.raises(TrainError, match="no rank goes on: rank 0 asks in vain; rank 1 has ended"):
        run_virtual_ranks(2, lambda transport: program(transport, False))
