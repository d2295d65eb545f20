"""Choices for traffic from all of one role to all of another, or of all to all: the time depends on the counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slurmdl.placement.arrays import distinct
from slurmdl.placement.choice.bound import serving
from slurmdl.placement.choice.choose import Choice, Start, chosen, roles
from slurmdl.placement.choice.floors import Limit, limits
from slurmdl.placement.choice.mesh import Mesh, usable
from slurmdl.placement.choice.quota import take
from slurmdl.placement.choice.shards import Shards
from slurmdl.placement.nodes.pool import IntArray, Pool, part
from slurmdl.placement.shape import Shape
from slurmdl.placement.traffic import Phase

#: most limits of delay that are tried
MAX_LIMITS = 64
#: a share of the time that delays must make up to be looked at
MIN_SHARE = 1e-4
#: most leaves over which the servers are split
MAX_LEAVES = 16
#: most zones in which a choice is made, for peers and for servers
MAX_STARTS, MAX_ZONES = 6, 12


def relevant(pool: Pool, seconds: float, rounds: float) -> list[Limit]:
    """Limits of delay that may matter beside so much time, the tightest first."""
    found = list(limits(pool))
    longest = float(found[-1].latency(pool).max())
    if 2 * rounds * longest < MIN_SHARE * seconds:
        return found[-1:]
    return [found[i] for i in distinct(np.linspace(0, len(found) - 1, MAX_LIMITS).astype(int))]


def choices(pool: Pool, job: Shape, starts: Sequence[Start],
            phases: Sequence[Phase], almost: float) -> Iterator[tuple[Start, Choice]]:
    """The choice of the least time in each of the most promising zones.

    Parameters
    ----------
    almost : choices that take more than so many times the least time are left out.
    """
    if job.nodes == 1:
        return
    found = _shards(pool, job, starts, phases) if roles(phases) else _meshes(pool, job, starts, phases)
    ways = list(found)
    least = min((seconds for seconds, _, _ in ways), default=0.0)
    for seconds, start, choice in ways:
        if seconds <= almost * least:
            yield start, choice


@dataclass(frozen=True, eq=False)
class _Peers:
    """What a zone can do if all ranks were peers, within one limit of delay.

    Attributes
    ----------
    low, high : seconds between which the least time lies, without delays.
    latency : seconds of the delays.
    """

    mesh: Mesh
    low: float
    high: float
    latency: float

    @property
    def least(self) -> float:
        return self.low + self.latency

    @property
    def most(self) -> float:
        return self.high + self.latency

    def refined(self, zone: int) -> _Peers:
        low, high = (float(bound[zone]) for bound in self.mesh.bracket(self.low, self.high, zone))
        return _Peers(self.mesh, low, high, self.latency)


def _meshes(pool: Pool, job: Shape, starts: Sequence[Start],
            phases: Sequence[Phase]) -> Iterator[tuple[float, Start, Choice]]:
    for start, peers in _ranked(pool, job, starts, _as_one(phases), sum(phase.rounds for phase in phases)):
        quota, nodes = peers.mesh.quota(peers.high, start.zone)
        yield peers.most, start, chosen(pool, start.zone, take(pool, nodes, quota))


def _ranked(pool: Pool, job: Shape, starts: Sequence[Start], phase: Phase,
            rounds: float, close: bool = True) -> list[tuple[Start, _Peers]]:
    """The most promising zones, each with the best limit of delay, the least time first.

    Parameters
    ----------
    close : divide the interval of the least time until it is short.
    """
    load = float(phase.size) * job.tasks * job.tasks
    slowest = min(float(pool.node_capacity.min()), float(pool.zone_capacity.min()))
    share = (job.tasks // job.nodes) / job.tasks
    least = load * share * (1 - share) / float(pool.node_capacity.max())
    tried: dict[int, list[_Peers]] = {start.zone: [] for start in starts}
    for limit in relevant(pool, least, rounds):
        mesh = Mesh(pool, job, phase, limit, usable(pool, limit))
        low, high = mesh.bracket(least, load / slowest)
        latency = 2 * rounds * limit.latency(pool)
        for zone, found in tried.items():
            if high[zone] < np.inf:
                found.append(_Peers(mesh, float(low[zone]), float(high[zone]), float(latency[zone])))
    promising = sorted((min(peers.least for peers in found), i, start) for i, start in enumerate(starts)
                       if (found := tried[start.zone]))[:MAX_STARTS]
    ranked = [(start, _best(tried[start.zone], start.zone) if close else
               min(tried[start.zone], key=lambda peers: peers.most)) for _, _, start in promising]
    return sorted(ranked, key=lambda entry: entry[1].most)


def _best(tried: Sequence[_Peers], zone: int) -> _Peers:
    """The best limit for a zone: each is looked at closely until the rest cannot win."""
    best: _Peers | None = None
    for peers in sorted(tried, key=lambda peers: peers.least):
        if best is None or peers.least < best.most:
            close = peers.refined(zone)
            if best is None or close.most < best.most:
                best = close
    assert best is not None
    return best


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
    best, served = np.inf, serving(pool, job, phases)
    # any choice keeps the time of all traffic over the slowest link
    high = float(phases[0].size) * len(phases[0].source) * len(phases[0].target) / min(
        float(pool.node_capacity.min()), float(pool.zone_capacity.min()))
    ranked = {start.zone: entry for start, entry in _ranked(pool, job, starts, _as_one(phases), rounds, False)}
    for start in sorted(starts, key=lambda start: (start.zone not in ranked, start.seconds))[:MAX_ZONES]:
        if start.seconds > best * (1 + 1e-6):
            continue
        found: tuple[float, IntArray] | None = None
        for limit in relevant(pool, start.seconds, rounds):
            latency = 2 * rounds * float(limit.latency(pool)[start.zone])
            low = max(start.seconds, served) / times
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
            yield found[0], start, chosen(pool, start.zone, found[1])


def _few_leaves(pool: Pool, nodes: IntArray, peers: _Peers | None, start: Start,
                job: Shape) -> IntArray:
    """The nodes of the leaves that would serve peers best, and of the largest."""
    room = np.bincount(pool.leaf[nodes], minlength=len(pool.zone))
    if (room > 0).sum() <= MAX_LEAVES:
        return nodes
    kept = np.zeros(len(room), bool)
    if peers is not None:
        quota, _ = peers.mesh.quota(peers.high, start.zone)
        kept |= quota > 0
    order = np.argsort(-room, kind="stable")
    fewest = int(np.searchsorted(np.cumsum(room[order]), job.nodes) + 1)
    kept[order[:fewest + 2]] = True
    return nodes[kept[pool.leaf[nodes]]]
