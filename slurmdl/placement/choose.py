"""Which nodes: for each zone that may win, a few ways to take them from the leaves below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slurmdl.placement.floors import Limit, bottlenecks, limits, widths
from slurmdl.placement.pool import IntArray, Pool, rounded
from slurmdl.placement.shape import Shape
from slurmdl.placement.traffic import Phase
from slurmdl.topology.model import Topology

#: most zones of one level that are looked at: the best by their links, then those that fit tightest
MAX_ZONES = 8


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to choose the nodes.

    Attributes
    ----------
    zone : index in the pool of the smallest zone that holds them all.
    nodes : indices in the pool.
    left : nodes of the pool below `zone` that are left over.
    smallest : no zone below `zone` has enough nodes.
    """

    zone: int
    nodes: IntArray
    left: int
    smallest: bool = True


@dataclass(frozen=True, eq=False)
class Start:
    """A zone to choose in, and the worst links that its best nodes need.

    Attributes
    ----------
    zone : index in the pool.
    seconds : no choice in this zone that is in none of the zones below it takes less time than that.
    floor : bytes/s of the narrowest link.
    limit : longest delays.
    """

    zone: int
    seconds: float
    floor: float
    limit: Limit


def count_below(topology: Topology, nodes: IntArray) -> IntArray:
    """How many of the nodes lie below each zone; shape (zones,)."""
    return topology.sums(np.bincount(nodes, minlength=len(topology.nodes)))


def starts(pool: Pool, job: Shape, place: str, phases: Sequence[Phase]) -> list[Start]:
    """The zones to choose in, the most promising first.

    With `spread` these are the highest that fit. Else a zone stands back behind one below it that is as good.
    """
    volume, rounds = least_load(phases, job), sum(phase.rounds for phase in phases)
    seconds = np.full(len(pool.zone), np.inf)
    floor = np.zeros(len(pool.zone))
    which = np.zeros(len(pool.zone), np.int64)
    tried: list[Limit] = []
    fastest = float(pool.node_capacity.max())
    for limit in limits(pool):
        if volume / fastest + 2 * rounds * limit.node > seconds.min(initial=np.inf) and tried:
            break
        widest = bottlenecks(pool, job.nodes, limit)
        time = np.divide(volume, widest, out=np.full(len(widest), np.inf), where=widest > 0)
        time = rounded(time + 2 * rounds * limit.latency(pool) * (time < np.inf))
        better = time < seconds
        seconds[better], floor[better], which[better] = time[better], widest[better], len(tried)
        tried.append(limit)
    found = seconds < np.inf
    if place == "spread":
        found &= pool.parent < 0
    else:
        best_below = np.full(len(pool.zone), np.inf)
        for level in pool.levels:
            np.minimum.at(best_below, pool.parent[level.zones],
                          np.minimum(seconds, best_below)[level.zones])
        found &= seconds < best_below
    zones = np.flatnonzero(found)
    zones = zones[np.lexsort((zones, pool.size[zones], pool.level[zones], seconds[zones]))][:MAX_ZONES]
    return [Start(int(zone), float(seconds[zone]), float(floor[zone]), tried[which[zone]]) for zone in zones]


def least_load(phases: Sequence[Phase], job: Shape) -> float:
    """Bytes that every link in use carries at least, in one direction, summed over the phases."""
    total = 0.0
    for phase in phases:
        if not phase.crossed:
            total += float(np.mean(phase.size))
        else:
            few, many = sorted((len(phase.source), len(phase.target)))
            each = job.tasks // job.nodes
            total += float(phase.size) * min(each * (few if few != many else many - each), many)
    return total if job.nodes > 1 else 0.0


def choices(pool: Pool, start: Start, wanted: int, place: str) -> Iterator[Choice]:
    """Ways to choose `wanted` nodes below one zone.

    `pack` tries the fewest leaves evenly, the same filled one after the other, and all leaves evenly; `balance`
    the fewest leaves evenly; `spread` all leaves evenly.
    """
    nodes = pool.nodes_below(start.zone)
    fits = np.ones(int(pool.size[start.zone]), bool) if place == "spread" else \
        (widths(pool, start.zone) >= start.floor) & start.limit.holds(pool, start.zone)
    inside = nodes.start + np.flatnonzero(fits)
    smallest = not (pool.size[pool.parent == start.zone] >= wanted).any()
    for quota in quotas(np.bincount(pool.leaf[inside], minlength=len(pool.zone)), wanted, place):
        yield Choice(start.zone, take(pool, inside, quota), int(pool.size[start.zone]) - wanted, smallest)


def quotas(room: IntArray, wanted: int, place: str) -> Iterator[IntArray]:
    """Nodes per zone, from the room of each: shape (zones,) as `room`."""
    leaves = np.flatnonzero(room)
    sizes = room[leaves]
    found: list[IntArray] = []
    if place == "spread" or len(leaves) == 1:
        found.append(even(sizes, wanted))
    else:
        fullest = np.argsort(-sizes, kind="stable")
        fewest = int(np.searchsorted(np.cumsum(sizes[fullest]), wanted) + 1)
        chosen = np.zeros_like(sizes)
        chosen[fullest[:fewest]] = sizes[fullest[:fewest]]
        found.append(even(chosen, wanted))
        if place == "pack":
            found += [filled(sizes, wanted), even(sizes, wanted)]
    seen = set()
    for quota in found:
        if quota.tobytes() not in seen:
            seen.add(quota.tobytes())
            total = np.zeros_like(room)
            total[leaves] = quota
            yield total


def take(pool: Pool, nodes: IntArray, quota: IntArray) -> IntArray:
    """Of the given nodes the first ones in each leaf.

    Parameters
    ----------
    nodes : indices in the pool, ascending.
    quota : shape (zones,), how many of each leaf.
    """
    leaf = pool.leaf[nodes]
    begin = np.flatnonzero(np.r_[True, leaf[1:] != leaf[:-1]])
    turn = np.arange(len(nodes)) - np.repeat(begin, np.diff(np.r_[begin, len(nodes)]))
    return nodes[turn < quota[leaf]]


def filled(room: IntArray, wanted: int) -> IntArray:
    """Full zones in descending order, and for the rest the zone that it fits best."""
    quota, left = np.zeros_like(room), wanted
    for zone in np.argsort(-room, kind="stable"):
        if left <= room[zone]:
            open_zones = np.flatnonzero((quota == 0) & (room >= left))
            quota[open_zones[room[open_zones].argmin()]] = left
            break
        quota[zone] = room[zone]
        left -= int(room[zone])
    return quota


def even(room: IntArray, wanted: int) -> IntArray:
    """As even as the room allows: the level of water that `wanted` units reach."""
    quota, left = np.zeros_like(room), wanted
    while left > 0:
        open_zones = np.flatnonzero(quota < room)
        step = left // len(open_zones)
        if step == 0:
            # the last units go to the roomiest zones
            last = open_zones[np.argsort(quota[open_zones] - room[open_zones], kind="stable")[:left]]
            quota[last] += 1
            break
        taken = np.minimum(step, room[open_zones] - quota[open_zones])
        quota[open_zones] += taken
        left -= int(taken.sum())
    return quota
