"""`python -m slurmdl.links.probe.mpi_task`: as task.py, over the path that MPI takes, which the training will take.

Round trips and throughput only: MPI hides what gets lost. A peer that hangs hangs the probe, which whoever started it
ends when its time is over.
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

#: bytes of one message of a stream
_CHUNK_BYTES = 2**20
_ECHO_TAG, _STREAM_TAG = 1, 2


def main() -> int:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UnavailableError("--transport=mpi needs mpi4py on the nodes; `--transport=tcp` does not") from error
    world = MPI.COMM_WORLD
    expected = int(os.environ.get("SLURM_NTASKS", "1"))
    if world.size != expected:
        raise UnavailableError(f"MPI started {world.size} of {expected} tasks: srun's --mpi does not fit this MPI; "
                               "valid: see `srun --mpi=list`, and give it after --")
    wait_until_ready(MPI)
    work: ProbeSchedule = world.bcast(read_schedule() if world.rank == 0 else None)
    name = os.environ.get("SLURMD_NODENAME", "")
    rank_of = {node: rank for rank, node in enumerate(world.allgather(name))}
    end = time.monotonic() + work.budget_s
    for count, pairs in enumerate(work.rounds):
        if world.bcast(time.monotonic() + work.config.expected_s > end):  # by the clock of rank 0
            if world.rank == 0:
                send_note(f"the time is over after {count} of {len(work.rounds)} rounds")
            break
        named = ((work.nodes[a], work.nodes[b]) for a, b in pairs)
        mine = next((names for names in named if name in names), None)
        pair = _run_pair(world, mine, name, rank_of, work.config) if mine else None
        for found in world.gather(pair) or ():
            if found is not None:
                print(json.dumps(found.to_json()), flush=True)
    if world.rank == 0:
        print(json.dumps(END_MESSAGE), flush=True)
    return 0


def _run_pair(world: MPI.Comm, names: tuple[str, str], name: str,
              rank_of: dict[str, int], config: ProbeConfig) -> PairMeasurement | None:
    """Measure as the first of the pair; help as the second."""
    first, second = names
    if name == second:
        peer = rank_of[first]
        for _ in range(config.rtt_probes):
            world.Send(_receive_into(world, bytearray(64), peer, _ECHO_TAG), peer, _ECHO_TAG)
        _receive_stream(world, peer)
        _send_stream(world, peer, config)
        return None
    peer, trips, message = rank_of[second], [], bytearray(64)
    for _ in range(config.rtt_probes):
        began = time.perf_counter()
        world.Send(message, peer, _ECHO_TAG)
        _receive_into(world, message, peer, _ECHO_TAG)
        trips.append(time.perf_counter() - began)
    trips.sort()
    _send_stream(world, peer, config)
    return PairMeasurement(first, second, forward=world.recv(source=peer), backward=_receive_stream(world, peer, send_rate=False),
                rtt=trips[len(trips) // 2], rtt_p99=trips[len(trips) * 99 // 100])


def _receive_into(world: MPI.Comm, message: bytearray, peer: int, tag: int) -> bytearray:
    world.Recv(message, peer, tag)
    return message


def _send_stream(world: MPI.Comm, peer: int, config: ProbeConfig) -> None:
    """A stream; the first byte of its last message is 0."""
    message, end = bytearray(_CHUNK_BYTES), time.monotonic() + config.stream_seconds
    for left in range(max(2, config.stream_bytes // _CHUNK_BYTES), 0, -1):
        last = left == 1 or time.monotonic() > end
        message[0] = not last
        world.Send(message, peer, _STREAM_TAG)
        if last:
            return
        if config.rate_limit:
            time.sleep(_CHUNK_BYTES / config.rate_limit)


def _receive_stream(world: MPI.Comm, peer: int, *, send_rate: bool = True) -> float:
    """Take a stream; its bytes/s, which the peer is told, too, where it is to report them."""
    marks, message = [(time.monotonic(), 0)], bytearray(_CHUNK_BYTES)
    while True:
        _receive_into(world, message, peer, _STREAM_TAG)
        marks.append((time.monotonic(), marks[-1][1] + _CHUNK_BYTES))
        if not message[0]:
            break
    rate = steady_state_rate(marks)
    if send_rate:
        world.send(rate, peer)
    return rate


if __name__ == "__main__":
    run_task(main)
