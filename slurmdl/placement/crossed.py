"""Choices for traffic from all of one role to all of another, or of all to all: the time depends on the counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slurmdl.placement.choose import Choice, Start
from slurmdl.placement.floors import Limit, limits
from slurmdl.placement.mesh import Mesh, usable
from slurmdl.placement.pool import IntArray, Pool, part
from slurmdl.placement.quota import take
from slurmdl.placement.shape import Shape
from slurmdl.placement.shards import Shards
from slurmdl.placement.traffic import Phase

#: most limits of delay that are tried
MAX_LIMITS = 64
#: a share of the time that delays must make up to be looked at
MIN_SHARE = 1e-4
#: most leaves over which the servers are split
MAX_LEAVES = 16
#: most zones in which a choice is made
MAX_STARTS = 6


def relevant(pool: Pool, seconds: float, rounds: float) -> list[Limit]:
    """Limits of delay that may matter beside so much time, the tightest first."""
    found = list(limits(pool))
    longest = float(found[-1].latency(pool).max())
    if 2 * rounds * longest < MIN_SHARE * seconds:
        return found[-1:]
    return [found[i] for i in np.unique(np.linspace(0, len(found) - 1, MAX_LIMITS).astype(int))]


def choices(pool: Pool, job: Shape, starts: Sequence[Start],
            phases: Sequence[Phase]) -> Iterator[tuple[Start, Choice]]:
    """The choice of the least time in each of the most promising zones."""
    if job.nodes == 1:
        return
    best = np.inf
    found = _meshes(pool, job, starts, phases) if phases[0].source[0] == phases[0].target[0] else \
        _shards(pool, job, starts, phases)
    for seconds, start, choice in found:
        if seconds < best * 2:
            best = min(best, seconds)
            yield start, choice


def _meshes(pool: Pool, job: Shape, starts: Sequence[Start],
            phases: Sequence[Phase]) -> Iterator[tuple[float, Start, Choice]]:
    rounds = sum(phase.rounds for phase in phases)
    for start, (seconds, low, high, mesh) in _ranked(pool, job, starts, _as_one(phases), rounds):
        low, high = (float(bound[start.zone]) for bound in mesh.bracket(low, high, start.zone))
        if high < np.inf:
            quota, nodes = mesh.quota(high, start.zone)
            yield seconds, start, _choice(pool, job, start, take(pool, nodes, quota))


def _ranked(pool: Pool, job: Shape, starts: Sequence[Start], phase: Phase,
            rounds: float) -> list[tuple[Start, tuple[float, float, float, Mesh]]]:
    """The most promising zones, each with its time, an interval that holds it, and the mesh over its best links."""
    lowest = max(min(start.seconds for start in starts), 1e-12)
    load = float(phase.size) * job.tasks * job.tasks
    slowest = min(float(pool.node_capacity.min()), float(pool.zone_capacity.min()))
    best: dict[int, tuple[float, float, float, Mesh]] = {}
    for limit in relevant(pool, lowest, rounds):
        mesh = Mesh(pool, job, phase, limit, usable(pool, limit))
        least = load * (job.tasks // job.nodes) * (1 - (job.tasks // job.nodes) / job.tasks) / job.tasks
        low, high = mesh.bracket(least / float(pool.node_capacity.max()), load / slowest)
        total = high + 2 * rounds * limit.latency(pool)
        for start in starts:
            if total[start.zone] < best.get(start.zone, (np.inf,))[0]:
                best[start.zone] = float(total[start.zone]), float(low[start.zone]), float(high[start.zone]), mesh
    ranked = sorted((start for start in starts if start.zone in best), key=lambda start: best[start.zone][0])
    return [(start, best[start.zone]) for start in ranked[:MAX_STARTS]]


def _as_one(phases: Sequence[Phase]) -> Phase:
    """All phases as one; servers and workers as so many peers that a link with their average mix bears the same."""
    everyone = phases[0].source
    size = 0.0
    for phase in phases:
        ranks = len(phase.source) + len(phase.target)
        mixed = phase.source[0] == phase.target[0]
        size += float(phase.size) * (1 if mixed else len(phase.source) * len(phase.target) / ranks**2)
    return Phase(everyone, everyone, size, crossed=True)


def _shards(pool: Pool, job: Shape, starts: Sequence[Start],
            phases: Sequence[Phase]) -> Iterator[tuple[float, Start, Choice]]:
    rounds, times = sum(phase.rounds for phase in phases), len(phases)
    ps = min(len(phases[0].source), len(phases[0].target)) if phases[0].target[0] < phases[0].source[0] else \
        len(phases[0].source)
    best = np.inf
    ranked = {start.zone: entry for start, entry in _ranked(pool, job, starts, _as_one(phases), rounds)}
    for start in sorted(starts, key=lambda start: (start.seconds, ranked.get(start.zone, (np.inf,))[0]))[:12]:
        if start.seconds > best * (1 + 1e-6):
            continue
        found: tuple[float, IntArray] | None = None
        for limit in relevant(pool, start.seconds, rounds):
            latency = 2 * rounds * float(limit.latency(pool)[start.zone])
            low, high = _interval(pool, job, start, phases)
            bound = (best - latency) / times
            if bound <= low:
                continue
            inside = pool.nodes_below(start.zone).start + np.flatnonzero(limit.holds(pool, start.zone))
            if len(inside) < job.nodes:
                continue
            inside = _few_leaves(pool, inside, ranked.get(start.zone), start, job)
            below = part(pool, inside, start.zone)
            search = Shards(below, job, ps, float(phases[0].size))
            deal = search.best(low, min(high, bound))
            if deal is not None:
                best = times * deal.seconds + latency
                found = best, inside[search.take(deal)]
        if found is not None:
            yield found[0], start, _choice(pool, job, start, found[1])


def _interval(pool: Pool, job: Shape, start: Start, phases: Sequence[Phase]) -> tuple[float, float]:
    """A time of one phase that no choice undercuts, and one that any choice keeps."""
    load = float(phases[0].size) * len(phases[0].source) * len(phases[0].target)
    slowest = min(float(pool.node_capacity.min()), float(pool.zone_capacity.min()))
    widest = max(float(pool.node_capacity.max()), slowest)
    return load / job.tasks**2 / widest, load / slowest


def _few_leaves(pool: Pool, nodes: IntArray, ranked: tuple[float, float, float, Mesh] | None, start: Start,
                job: Shape) -> IntArray:
    """The nodes of the leaves that would serve peers best, and of the largest."""
    room = np.bincount(pool.leaf[nodes], minlength=len(pool.zone))
    if (room > 0).sum() <= MAX_LEAVES:
        return nodes
    kept = np.zeros(len(room), bool)
    if ranked is not None:
        quota, _ = ranked[3].quota(ranked[2], start.zone)
        kept |= quota > 0
    order = np.argsort(-room, kind="stable")
    fewest = int(np.searchsorted(np.cumsum(room[order]), job.nodes) + 1)
    kept[order[:fewest + 2]] = True
    return nodes[kept[pool.leaf[nodes]]]


def _choice(pool: Pool, job: Shape, start: Start, nodes: IntArray) -> Choice:
    smallest = not (pool.size[pool.parent == start.zone] >= job.nodes).any()
    return Choice(start.zone, nodes, int(pool.size[start.zone]) - job.nodes, smallest)
