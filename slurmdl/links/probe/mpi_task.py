"""`python -m slurmdl.links.probe.mpi_task`: the probes of tcp_task over MPI, which the training uses as well.

Measures RTT and throughput only: MPI hides losses. Without timeouts, a hung peer hangs the probe until its step ends.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from slurmdl.errors import UnavailableError
from slurmdl.links.probe.measurement import PairMeasurement, ProbeConfig
from slurmdl.links.probe.protocol import steady_state_rate
from slurmdl.links.probe.tcp_task import END_MESSAGE, ProbeSchedule, read_schedule, run_task, send_note
from slurmdl.mpi_library import wait_until_ready

if TYPE_CHECKING:
    from mpi4py import MPI

_CHUNK_BYTES = 2**20
_ECHO_TAG, _STREAM_TAG = 1, 2


def main() -> int:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UnavailableError("--transport=mpi: mpi4py is missing on the nodes; install it or use "
                               "--transport=tcp") from error
    world = MPI.COMM_WORLD
    expected = int(os.environ.get("SLURM_NTASKS", "1"))
    if world.size != expected:
        raise UnavailableError(f"MPI started {world.size} of {expected} tasks: srun's --mpi does not match this MPI; "
                               "add a type from `srun --mpi=list` after --")
    wait_until_ready(MPI)
    schedule: ProbeSchedule = world.bcast(read_schedule() if world.rank == 0 else None)
    node = os.environ.get("SLURMD_NODENAME", "")
    rank_of = {name: rank for rank, name in enumerate(world.allgather(node))}
    end = time.monotonic() + schedule.budget_s
    for count, pairs in enumerate(schedule.rounds):
        if world.bcast(time.monotonic() + schedule.config.expected_s > end):  # by the clock of rank 0
            if world.rank == 0:
                send_note(f"out of time after {count} of {len(schedule.rounds)} rounds")
            break
        names = ((schedule.nodes[a], schedule.nodes[b]) for a, b in pairs)
        own_pair = next((pair for pair in names if node in pair), None)
        result = _run_pair(world, own_pair, node, rank_of, schedule.config) if own_pair else None
        for measurement in world.gather(result) or ():
            if measurement is not None:
                print(json.dumps(measurement.to_json()), flush=True)
    if world.rank == 0:
        print(json.dumps(END_MESSAGE), flush=True)
    return 0


def _run_pair(world: MPI.Comm, names: tuple[str, str], node: str,
              rank_of: dict[str, int], config: ProbeConfig) -> PairMeasurement | None:
    """Measure as the first node of the pair, or reflect as the second."""
    first, second = names
    if node == second:
        peer, message = rank_of[first], bytearray(64)
        for _ in range(config.rtt_probes):
            world.Recv(message, peer, _ECHO_TAG)
            world.Send(message, peer, _ECHO_TAG)
        _receive_stream(world, peer)
        _send_stream(world, peer, config)
        return None
    peer, rtts, message = rank_of[second], [], bytearray(64)
    for _ in range(config.rtt_probes):
        start = time.perf_counter()
        world.Send(message, peer, _ECHO_TAG)
        world.Recv(message, peer, _ECHO_TAG)
        rtts.append(time.perf_counter() - start)
    rtts.sort()
    _send_stream(world, peer, config)
    return PairMeasurement(first, second, forward=world.recv(source=peer),
                           backward=_receive_stream(world, peer, send_rate=False), rtt=rtts[len(rtts) // 2],
                           rtt_p99=rtts[len(rtts) * 99 // 100])


def _send_stream(world: MPI.Comm, peer: int, config: ProbeConfig) -> None:
    """Send a stream; the first byte of its last message is 0."""
    message, end = bytearray(_CHUNK_BYTES), time.monotonic() + config.stream_seconds
    for remaining in range(max(2, config.stream_bytes // _CHUNK_BYTES), 0, -1):
        is_last = remaining == 1 or time.monotonic() > end
        message[0] = not is_last
        world.Send(message, peer, _STREAM_TAG)
        if is_last:
            return
        if config.rate_limit:
            time.sleep(_CHUNK_BYTES / config.rate_limit)


def _receive_stream(world: MPI.Comm, peer: int, *, send_rate: bool = True) -> float:
    """Receive a stream; return its bytes/s, and send them to the peer if `send_rate`."""
    marks, message = [(time.monotonic(), 0)], bytearray(_CHUNK_BYTES)
    while True:
        world.Recv(message, peer, _STREAM_TAG)
        marks.append((time.monotonic(), marks[-1][1] + _CHUNK_BYTES))
        if not message[0]:
            break
    rate = steady_state_rate(marks)
    if send_rate:
        world.send(rate, peer)
    return rate


if __name__ == "__main__":
    run_task(main)
