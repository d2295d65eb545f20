"""`python -m slurmdl.network.probe.mpitask`: as task.py, over the path that MPI takes, which the training will take.

Round trips and throughput only: MPI hides what gets lost. A peer that hangs hangs the probe, which whoever started it
ends when its time is over.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from slurmdl.errors import UnavailableError
from slurmdl.mpi import settle
from slurmdl.network.probe.pair import Effort, Pair
from slurmdl.network.probe.task import END, Work, note, read_work, run
from slurmdl.network.probe.wire import steady_rate

if TYPE_CHECKING:
    from mpi4py import MPI

#: bytes of one message of a stream
_MESSAGE = 2**20
_ECHO, _STREAM = 1, 2


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
    settle(MPI)
    work: Work = world.bcast(read_work() if world.rank == 0 else None)
    name = os.environ.get("SLURMD_NODENAME", "")
    rank_of = {node: rank for rank, node in enumerate(world.allgather(name))}
    end = time.monotonic() + work.budget
    for count, pairs in enumerate(work.rounds):
        if world.bcast(time.monotonic() + work.effort.expected > end):  # by the clock of rank 0
            if world.rank == 0:
                note(f"the time is over after {count} of {len(work.rounds)} rounds")
            break
        named = ((work.nodes[a], work.nodes[b]) for a, b in pairs)
        mine = next((names for names in named if name in names), None)
        pair = _meet(world, mine, name, rank_of, work.effort) if mine else None
        for found in world.gather(pair) or ():
            if found is not None:
                print(json.dumps(found.to_json()), flush=True)
    if world.rank == 0:
        print(json.dumps(END), flush=True)
    return 0


def _meet(world: MPI.Comm, names: tuple[str, str], name: str, rank_of: dict[str, int], effort: Effort) -> Pair | None:
    """Measure as the first of the pair; help as the second."""
    first, second = names
    if name == second:
        peer = rank_of[first]
        for _ in range(effort.echoes):
            world.Send(_received(world, bytearray(64), peer, _ECHO), peer, _ECHO)
        _take(world, peer)
        _give(world, peer, effort)
        return None
    peer, trips, message = rank_of[second], [], bytearray(64)
    for _ in range(effort.echoes):
        began = time.perf_counter()
        world.Send(message, peer, _ECHO)
        _received(world, message, peer, _ECHO)
        trips.append(time.perf_counter() - began)
    trips.sort()
    _give(world, peer, effort)
    return Pair(first, second, forward=world.recv(source=peer), backward=_take(world, peer, tell=False),
                delay=trips[len(trips) // 2], delay_tail=trips[len(trips) * 99 // 100])


def _received(world: MPI.Comm, message: bytearray, peer: int, tag: int) -> bytearray:
    world.Recv(message, peer, tag)
    return message


def _give(world: MPI.Comm, peer: int, effort: Effort) -> None:
    """A stream; the first byte of its last message is 0."""
    message, end = bytearray(_MESSAGE), time.monotonic() + effort.seconds
    for left in range(max(2, effort.size // _MESSAGE), 0, -1):
        last = left == 1 or time.monotonic() > end
        message[0] = not last
        world.Send(message, peer, _STREAM)
        if last:
            return
        if effort.rate_limit:
            time.sleep(_MESSAGE / effort.rate_limit)


def _take(world: MPI.Comm, peer: int, *, tell: bool = True) -> float:
    """Take a stream; its bytes/s, which the peer is told, too, where it is to report them."""
    marks, message = [(time.monotonic(), 0)], bytearray(_MESSAGE)
    while True:
        _received(world, message, peer, _STREAM)
        marks.append((time.monotonic(), marks[-1][1] + _MESSAGE))
        if not message[0]:
            break
    rate = steady_rate(marks)
    if tell:
        world.send(rate, peer)
    return rate


if __name__ == "__main__":
    run(main)
