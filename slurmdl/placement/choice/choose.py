"""Which nodes: for each zone that may win, a few ways to take them from the leaves below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmdl.placement.arrays import distinct
from slurmdl.placement.choice.floors import Limit, bottlenecks, limits, widths
from slurmdl.placement.choice.quota import quotas, take
from slurmdl.placement.nodes.pool import FloatArray, IntArray, Pool, rounded
from slurmdl.placement.shape import Shape
from slurmdl.placement.traffic import Phase

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


def chosen(pool: Pool, zone: int, nodes: IntArray) -> Choice:
    """The choice of these nodes, all below `zone`."""
    smallest = not (pool.size[pool.parent == zone] >= len(nodes)).any()
    return Choice(zone, nodes, int(pool.size[zone]) - len(nodes), smallest)


def starts(pool: Pool, job: Shape, place: str, phases: Sequence[Phase], follows_zones: bool = False) -> list[Start]:
    """The zones to choose in, the most promising first.

    With `spread` these are the highest that fit. Else, where only the worst link counts, a zone stands back behind
    one below it that is as good.

    Parameters
    ----------
    follows_zones : ranks in more zones send other phases than these: less over the uplinks, and in fewer rounds.
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
    if roles(phases) or follows_zones:
        # an uplink, e.g. with servers and workers on both sides, may carry less than a node's link
        seconds = np.where(found, least_seconds(pool, job, volume), np.inf)
    if place == "spread":
        found &= pool.parent < 0
    elif not crossed(phases) and not follows_zones:
        best_below = np.full(len(pool.zone), np.inf)
        for level in pool.levels:
            np.minimum.at(best_below, pool.parent[level.zones],
                          np.minimum(seconds, best_below)[level.zones])
        found &= seconds < best_below
    zones = np.flatnonzero(found)
    zones = zones[np.lexsort((pool.turn[zones], pool.size[zones], pool.level[zones], seconds[zones]))]
    kept = np.concatenate([zones[pool.level[zones] == level][:MAX_ZONES] for level in distinct(pool.level[zones])])
    zones = zones[np.isin(zones, kept)]
    return [Start(int(zone), float(seconds[zone]), float(floor[zone]), tried[which[zone]]) for zone in zones]


def least_seconds(pool: Pool, job: Shape, volume: float) -> FloatArray:
    """Seconds that so many bytes take over the k-th best node's link alone; shape (zones,)."""
    nodes_only = replace(pool, zone_capacity=np.full(len(pool.zone), np.inf))
    widest = bottlenecks(nodes_only, job.nodes, Limit(np.inf, ()))
    seconds = np.full(len(widest), np.inf)
    return np.asarray(np.divide(volume, widest, out=seconds, where=widest > 0))


def roles(phases: Sequence[Phase]) -> bool:
    """Whether the phases go between two roles, as with parameter servers."""
    return crossed(phases) and bool(phases[0].source[0] != phases[0].target[0])


def crossed(phases: Sequence[Phase]) -> bool:
    """Whether the time depends on how many ranks are below each link, not only on which links are used."""
    return bool(phases) and all(phase.crossed for phase in phases)


def least_load(phases: Sequence[Phase], job: Shape) -> float:
    """Bytes that the busiest link of every node in use carries at least, summed over the phases."""
    if job.nodes == 1:
        return 0.0
    total = 0.0
    for phase in phases:
        held = np.array([job.tasks // job.nodes, job.most_per_node])
        if not phase.crossed:
            total += float(np.mean(phase.size)) * bool(len(phase.source))
        elif not roles([phase]):
            total += float(np.min(phase.size * held * (job.tasks - held)))
        else:
            servers, workers = len(phase.source), len(phase.target)
            mine = np.arange(min(servers, job.most_per_node) + 1)
            others = np.clip(held[:, None] - mine, 0, workers)
            total += float(np.min(phase.size * np.maximum(mine * (workers - others), others * (servers - mine))))
    return total


def choices(pool: Pool, start: Start, wanted: int, place: str) -> Iterator[Choice]:
    """Ways to choose `wanted` nodes below one zone.

    `pack` tries the fewest leaves evenly, the same filled one after the other, and all leaves evenly; `balance`
    the fewest leaves evenly; `spread` all leaves evenly.
    """
    nodes = pool.nodes_below(start.zone)
    if place == "spread":
        # over all leaves, whatever their uplinks, but not to nodes whose own links would slow down all others
        fits = (pool.node_capacity[nodes] >= start.floor) & (pool.node_delay[nodes] <= start.limit.node)
    else:
        fits = (widths(pool, start.zone) >= start.floor) & start.limit.holds(pool, start.zone)
    inside = nodes.start + np.flatnonzero(fits)
    for quota in quotas(np.bincount(pool.leaf[inside], minlength=len(pool.zone)), pool.turn, wanted, place):
        yield chosen(pool, start.zone, take(pool, inside, quota))
