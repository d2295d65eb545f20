"""A time that no placement of a job on these nodes can undercut.

Each bound drops a part of the problem and keeps the rest: a ring loads every link in use alike, so the k-th widest
path of each zone is its optimum; for counted traffic, what each zone can hold within a time is added up the zones,
as if servers and workers did not have to come out even. Where neither holds there is no bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slurmdl.placement.arrays import distinct
from slurmdl.placement.choice.choose import crossed, least_load, least_seconds, roles
from slurmdl.placement.choice.floors import Limit, bottlenecks, limits
from slurmdl.placement.choice.mesh import STEPS, Mesh, usable
from slurmdl.placement.nodes.pool import BoolArray, FloatArray, IntArray, Pool
from slurmdl.placement.shape import Shape
from slurmdl.placement.traffic import Phase

#: how often the interval of times is divided again
ROUNDS = 3
#: more limits of delay than this are some of many: then only the shortest delay of each level counts
MAX_LIMITS = 512


@dataclass(frozen=True)
class Bound:
    """Seconds that the job takes at least, and why."""

    seconds: float
    basis: str


def bound(pool: Pool, job: Shape, phases: Sequence[Phase], placed: float) -> Bound | None:
    """The best bound that is known for this traffic, None where none is.

    Parameters
    ----------
    placed : seconds of a placement that was found; the bound is sought up to these.
    """
    if job.nodes == 1 or not phases:
        return Bound(0.0, "one node sends nothing")
    ring = len(phases) == 1 and not phases[0].crossed and not np.ndim(phases[0].size)
    if not ring and not crossed(phases):
        return None
    latency = 2 * sum(phase.rounds for phase in phases) * _shortest(pool)
    volume = least_load(phases, job)
    if roles(phases):
        by_nodes, by_servers = least_seconds(pool, job, volume), serving(pool, job, phases)
        seconds = np.maximum(by_nodes, by_servers) + latency
        basis = "the best links of nodes for the servers" if by_servers > by_nodes.min(initial=np.inf) else \
            f"the {job.nodes} best links of nodes"
    else:
        widest = bottlenecks(pool, job.nodes, Limit(np.inf, ()))
        seconds = np.divide(volume, widest, out=np.full(len(widest), np.inf), where=widest > 0) + latency
        basis = f"the {job.nodes} best links and the uplinks on their way"
    if ring:
        seconds = np.maximum(seconds, _with_delays(pool, job, phases[0]))
    found = float(seconds.min(initial=np.inf))
    if ring or found >= placed * (1 - 1e-9):
        return Bound(found, basis)
    holds = _roles(pool, job, phases) if roles(phases) else _peers(pool, job, phases)
    if holds is None:
        return Bound(found, basis)
    by_level = [_least(pool, holds, level, seconds, latency, placed, len(phases)) for level in distinct(pool.level)]
    better = min(by_level, default=np.inf)
    return Bound(max(found, better), "what each zone can hold within the time") if better > found else \
        Bound(found, basis)


def serving(pool: Pool, job: Shape, phases: Sequence[Phase]) -> float:
    """Seconds after which the links of the nodes can serve so many workers, wherever these nodes are.

    A node with s servers among its t tasks carries max(s (W - t + s), (t - s) (P - s)) shares of the model each way.
    """
    capacity = np.sort(pool.node_capacity)[::-1][:job.nodes]
    servers, workers = len(phases[0].source), len(phases[0].target)
    loads = []
    for tasks in {job.tasks // job.nodes, job.most_per_node}:
        mine = np.arange(min(tasks, servers) + 1.0)
        load = np.maximum(mine * (workers - tasks + mine), (tasks - mine) * (servers - mine))
        # with more servers than this the load may fall again: what counts is how many fit, by the time
        loads.append(np.minimum.accumulate(load[::-1])[::-1] * float(phases[0].size))
    least = np.array([min(load[i] for load in loads if i < len(load)) for i in range(max(map(len, loads)))])
    times = distinct(least[1:, None] / distinct(capacity)) if len(least) > 1 else np.zeros(0)

    def served(time: float) -> bool:
        held = np.searchsorted(least, time * capacity * (1 + 1e-9), side="right") - 1
        return bool(held.clip(0).sum() >= servers)

    first = bisect_left(times.tolist(), True, key=served)
    return float(times[first]) * len(phases) if first < len(times) else 0.0


def _shortest(pool: Pool) -> FloatArray:
    """The shortest way within each zone: a node's link, and an uplink of every level that all nodes pass."""
    total = np.full(len(pool.zone), float(pool.node_delay.min(initial=np.inf)))
    whole = bool((pool.level[pool.leaf] == 0).all()) and all(
        (pool.level[pool.parent[level.zones]] == pool.level[level.zones] + 1).all() for level in pool.levels)
    for level in pool.levels if whole else ():
        height = int(pool.level[level.zones[0]])
        total[pool.level > height] += float(pool.zone_delay[level.zones].min())
    return total


def _with_delays(pool: Pool, job: Shape, phase: Phase) -> FloatArray:
    """The least time of a ring in each zone over all limits of delay; 0 where these are too many to try."""
    tried = list(limits(pool))
    count = [len(distinct(pool.node_delay))] + [len(distinct(pool.zone_delay[level.zones]))
                                                 for level in pool.levels]
    full = np.prod(count, dtype=float) == len(tried) <= MAX_LIMITS
    if not full or (pool.level[pool.leaf] != 0).any():
        return np.zeros(len(pool.zone))
    best = np.full(len(pool.zone), np.inf)
    for limit in tried:
        widest = bottlenecks(pool, job.nodes, limit)
        time = np.divide(float(phase.size), widest, out=np.full(len(widest), np.inf), where=widest > 0)
        best = np.minimum(best, time + 2 * phase.rounds * limit.latency(pool) * (time < np.inf))
    return np.where(best < np.inf, best, 0.0)


def _least(pool: Pool, holds: Callable[[FloatArray], BoolArray], level: int, seconds: FloatArray,
           latency: FloatArray, placed: float, phases: int) -> float:
    """The longest time tried in which no zone of a level can hold the job, delays included."""
    here = pool.level == level
    shortest = float(latency[here].min())
    low = (float(seconds[here].min()) - shortest) / phases
    high = (placed - shortest) / phases
    if not 0 < low < high:
        return low * phases + shortest
    for _ in range(ROUNDS):
        times = np.geomspace(low, high, STEPS)
        fits = holds(times)[:, here].any(axis=1)
        if not fits.any():
            return placed
        first = int(fits.argmax())
        low, high = float(times[max(first - 1, 0)]), float(times[first])
        if first == 0:
            break
    return low * phases + shortest


def _peers(pool: Pool, job: Shape, phases: Sequence[Phase]) -> Callable[[FloatArray], BoolArray] | None:
    """What zones hold of ranks that all send to each other; with the same number of tasks on every node."""
    if len(phases) > 1 or job.tasks % job.nodes:
        return None
    every = Limit(np.inf, ())
    return Mesh(pool, job, phases[0], every, usable(pool, every)).holds


def _roles(pool: Pool, job: Shape, phases: Sequence[Phase]) -> Callable[[FloatArray], BoolArray]:
    """What zones hold at most of servers and workers together, each mix of the two by itself."""
    servers, workers = len(phases[0].source), len(phases[0].target)
    size, load = float(phases[0].size), least_load(phases[:1], job)
    mine = np.arange(servers + 1.0)

    def most(room: IntArray, carries: FloatArray) -> IntArray:
        """Tasks that fit behind links which carry so many shares, with so much room: two arrays of one shape."""
        with np.errstate(divide="ignore"):
            others = np.minimum(workers, np.floor(carries[:, None] / (servers - mine)))
            others = np.minimum(others, room[:, None] - mine)
            needed = np.where(mine > 0, np.maximum(workers - carries[:, None] / mine, 0.0), 0.0)
        return np.asarray(np.where(others >= np.ceil(needed - 1e-9), mine + others, 0.0).max(axis=1), np.int64)

    def holds(times: FloatArray) -> BoolArray:
        inside = pool.per_leaf(pool.node_capacity >= load / times[:, None] * (1 - 1e-9)) * job.most_per_node
        for level in pool.levels:
            # many zones are alike in room and uplink: each kind is worked out once
            capacity = distinct(pool.zone_capacity[level.zones])
            kind = np.searchsorted(capacity, pool.zone_capacity[level.zones])
            turn = np.arange(len(times))[:, None] * len(capacity) + kind
            below = np.minimum(inside[:, level.zones], job.tasks)
            each = turn * (job.tasks + 1) + below
            kinds = distinct(each)
            turn, room = np.divmod(kinds, job.tasks + 1)
            carries = times[turn // len(capacity)] * capacity[turn % len(capacity)] / size * (1 + 1e-9)
            held = most(room, carries)[np.searchsorted(kinds, each)]
            inside[:, level.parents] += np.add.reduceat(held, level.begin, axis=1)
        return np.asarray(inside >= job.tasks)

    return holds
