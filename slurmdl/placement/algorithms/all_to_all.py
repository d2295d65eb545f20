"""Nodes for traffic from every rank to every other, as random gossip: how many below each zone.

A link with k of n ranks on one side carries size k (n - k) bytes each way. Within a time T that is at most what
the link can take where k <= a or k >= n - a: so a zone holds few ranks or most of them, and at most one zone of
a level holds most. That leaves one number to search, T: one pass up the zones says what each can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.placement.algorithms.apportion import take_nodes
from slurmdl.placement.algorithms.bottleneck import LatencyCap, relevant_latency_caps
from slurmdl.placement.algorithms.zone_candidates import NodeChoice, ZoneCandidate, make_choice
from slurmdl.placement.candidate_nodes import BoolArray, CandidateNodes, FloatArray, IntArray
from slurmdl.placement.job_size import JobSize
from slurmdl.placement.traffic import Phase

#: times that are tried at once, and how often the interval between two of them is divided again
TIME_STEPS, BRACKET_ROUNDS = 24, 4


@dataclass(frozen=True, eq=False)
class ZoneNodeCounts:
    """How many nodes each zone can hold within given times; arrays of shape (times, zones).

    Attributes
    ----------
    few : where it holds few of the job's ranks.
    most : where it holds most of them; `few` where it cannot.
    inside, gain : what its leaves or the zones below can hold, and how much more if one of these holds most.
    least : the fewest that count as most.
    """

    minority: IntArray
    majority: IntArray
    in_children: IntArray
    majority_gain: IntArray
    min_majority: IntArray


class AllToAllModel:
    """One job on the nodes of one pool, over links of limited delay."""

    def __init__(self, pool: CandidateNodes, job: JobSize, phase: Phase,
                 latency_cap: LatencyCap, usable_nodes: BoolArray) -> None:
        self.pool, self.job, self.bytes_per_pair, self.usable_nodes = pool, job, float(
            np.mean(phase.bytes_per_pair)), usable_nodes
        self.tasks_per_node = job.tasks / job.nodes
        longest = np.append(np.array(latency_cap.uplinks_s), np.inf)[
                            np.minimum(pool.level, len(latency_cap.uplinks_s))]
        self.uplink_capacity = np.where(pool.zone_latency <= longest, pool.zone_capacity, 0.0)

    def fast_enough_nodes(self, times: FloatArray) -> BoolArray:
        """Which nodes' links carry their share in time: (times,) -> (times, nodes)."""
        share = self.bytes_per_pair * self.tasks_per_node * (self.job.tasks - self.tasks_per_node)
        return (self.pool.node_capacity >= share / times[:, None] * (1 - 1e-9)) & self.usable_nodes

    def zone_node_counts(self, times: FloatArray) -> ZoneNodeCounts:
        pool, wanted, ranks = self.pool, self.job.nodes, self.job.tasks
        inside = pool.sum_per_leaf(self.fast_enough_nodes(times))
        carries = times[:, None] * self.uplink_capacity / self.bytes_per_pair
        root = np.sqrt(np.maximum(0.0, ranks * ranks - 4 * carries))
        few_at_most = np.where(root > 0, np.floor((ranks - root) / 2 / \
                               self.tasks_per_node * (1 + 1e-9) + 1e-9), wanted)
        least = wanted - few_at_most.astype(np.int64)
        gain = np.zeros_like(inside)
        few, most = inside.copy(), inside.copy()
        for level in pool.levels:
            zones = level.zones
            few[:, zones] = np.minimum(inside[:, zones], few_at_most[:, zones]).astype(np.int64)
            best = np.minimum(inside[:, zones] + gain[:, zones], wanted)
            most[:, zones] = np.where(best >= least[:, zones], np.maximum(best, few[:, zones]), few[:, zones])
            inside[:, level.parents] += np.add.reduceat(few[:, zones], level.child_begin, axis=1)
            more = np.maximum.reduceat(most[:, zones] - few[:, zones], level.child_begin, axis=1)
            gain[:, level.parents] = np.maximum(gain[:, level.parents], more)
        return ZoneNodeCounts(few, most, inside, gain, least)

    def can_hold_job(self, times: FloatArray) -> BoolArray:
        """Whether each zone can hold the job: (times,) -> (times, zones)."""
        room = self.zone_node_counts(times)
        return np.asarray(room.in_children + room.majority_gain >= self.job.nodes)

    def bracket_time(self, low: float, high: float, zone: int | None = None) -> tuple[FloatArray, FloatArray]:
        """For each zone a time in which it cannot hold the job, and the next one tried, in which it can.

        Parameters
        ----------
        low, high : seconds; where `high` does not suffice both are infinite.
        zone : divide the interval again for this zone alone.
        """
        bounds = np.full(len(self.pool.topology_zone_index), np.inf), np.full(
            len(self.pool.topology_zone_index), np.inf)
        for _ in range(1 if zone is None else BRACKET_ROUNDS):
            times = np.geomspace(low, high, TIME_STEPS)
            holds = self.can_hold_job(times)
            first = np.where(holds.any(axis=0), holds.argmax(axis=0), TIME_STEPS)
            bounds = np.append(times, np.inf)[np.maximum(first - 1, 0)], np.append(times, np.inf)[first]
            if zone is None:
                return np.where(first > 0, bounds[0], low), bounds[1]
            if first[zone] == TIME_STEPS:
                break
            low, high = float(bounds[0][zone]), float(bounds[1][zone])
            if low == high:
                break
        return bounds

    def node_counts_for_time(self, seconds: float, zone: int) -> tuple[IntArray, IntArray]:
        """Nodes per zone that hold the job in this time below one zone, and the nodes to take them from.

        Returns
        -------
        shape (zones,), and indices in the pool.
        """
        times = np.array([seconds])
        room = self.zone_node_counts(times)
        below = self.pool.nodes_below(zone)
        nodes = below.start + np.flatnonzero(self.fast_enough_nodes(times)[0, below])
        quota = np.zeros(len(self.pool.topology_zone_index), np.int64)
        own = np.bincount(self.pool.leaf[nodes], minlength=len(self.pool.topology_zone_index))
        todo = [(zone, self.job.nodes)]
        while todo:
            here, wanted = todo.pop()
            quota[here] = min(wanted, int(own[here]))
            children = np.flatnonzero(self.pool.parent == here)
            todo += self.split_among_children(room, children, wanted - int(quota[here]))
        return quota, nodes

    def split_among_children(self, counts: ZoneNodeCounts, zones: IntArray, wanted: int) -> list[tuple[int, int]]:
        """So many nodes over the zones below one: the roomiest first, the last in the zone that they fit best."""
        few, most, least = counts.minority[0, zones], counts.majority[0, zones], counts.min_majority[0, zones]
        found: list[tuple[int, int]] = []
        open_ = np.ones(len(zones), bool)
        gains = np.where(most > few, np.minimum(most, wanted), 0)
        gains[gains < least] = 0
        if gains.any():
            i = int(gains.argmax())
            found.append((int(zones[i]), int(gains[i])))
            wanted -= int(gains[i])
            open_[i] = False
        while wanted > 0:
            fits = np.flatnonzero(open_ & (few >= wanted))
            i = int(fits[few[fits].argmin()] if len(fits) else np.where(open_, few, -1).argmax())
            count = min(wanted, int(few[i]))
            found.append((int(zones[i]), count))
            wanted -= count
            open_[i] = False
            if not count:
                raise ValueError("the zones hold fewer nodes than was said")
        return found


def nodes_within_latency(pool: CandidateNodes, cap: LatencyCap) -> npt.NDArray[np.bool_]:
    """Nodes whose own link has no longer delay; shape (nodes,)."""
    return np.asarray(pool.node_latency <= cap.node_s)


# MERGED: Choices for traffic from all of one role to all of another, or of all to all: the time depends on the counts.




#: zones that are compared with all their nodes
MAX_ALL_TO_ALL_ZONES = 6


@dataclass(frozen=True, eq=False)
class AllToAllEstimate:
    """What a zone can do if all ranks were peers, within one limit of delay.

    Attributes
    ----------
    low, high : seconds between which the least time lies, without delays.
    latency : seconds of the delays.
    """

    model: AllToAllModel
    low: float
    high: float
    latency: float

    @property
    def min_seconds(self) -> float:
        return self.low + self.latency

    @property
    def max_seconds(self) -> float:
        return self.high + self.latency

    def narrowed(self, zone: int) -> AllToAllEstimate:
        low, high = (float(bound[zone]) for bound in self.model.bracket_time(self.low, self.high, zone))
        return AllToAllEstimate(self.model, low, high, self.latency)


def all_to_all_choices(pool: CandidateNodes, job: JobSize, zone_candidates: Sequence[ZoneCandidate],
            phases: Sequence[Phase]) -> Iterator[tuple[float, ZoneCandidate, NodeChoice]]:
    for start, peers in rank_zones_all_to_all(
        pool, job, zone_candidates, merge_phases(phases), sum(phase.rounds for phase in phases)):
        quota, nodes = peers.model.node_counts_for_time(peers.high, start.zone)
        yield peers.max_seconds, start, make_choice(pool, start.zone, take_nodes(pool, nodes, quota))


def rank_zones_all_to_all(pool: CandidateNodes, job: JobSize, zone_candidates: Sequence[ZoneCandidate], phase: Phase,
            rounds: float, refine: bool = True) -> list[tuple[ZoneCandidate, AllToAllEstimate]]:
    """The most promising zones, each with the best limit of delay, the least time first.

    Parameters
    ----------
    close : divide the interval of the least time until it is short.
    """
    load = float(phase.bytes_per_pair) * job.tasks * job.tasks
    slowest = min(float(pool.node_capacity.min()), float(pool.zone_capacity.min()))
    share = (job.tasks // job.nodes) / job.tasks
    least = load * share * (1 - share) / float(pool.node_capacity.max())
    tried: dict[int, list[AllToAllEstimate]] = {start.zone: [] for start in zone_candidates}
    for limit in relevant_latency_caps(pool, least, rounds):
        mesh = AllToAllModel(pool, job, phase, limit, nodes_within_latency(pool, limit))
        low, high = mesh.bracket_time(least, load / slowest)
        latency = 2 * rounds * limit.path_latency(pool)
        for zone, found in tried.items():
            if high[zone] < np.inf:
                found.append(AllToAllEstimate(mesh, float(low[zone]), float(high[zone]), float(latency[zone])))
    promising = sorted((min(peers.min_seconds for peers in found), i, start) for i, start in enumerate(zone_candidates)
                       if (found := tried[start.zone]))[:MAX_ALL_TO_ALL_ZONES]
    ranked = [(start, _best_estimate(tried[start.zone], start.zone) if refine else
               min(tried[start.zone], key=lambda peers: peers.max_seconds)) for _, _, start in promising]
    return sorted(ranked, key=lambda entry: entry[1].max_seconds)


def _best_estimate(tried: Sequence[AllToAllEstimate], zone: int) -> AllToAllEstimate:
    """The best limit for a zone: each is looked at closely until the rest cannot win."""
    best: AllToAllEstimate | None = None
    for peers in sorted(tried, key=lambda peers: peers.min_seconds):
        if best is None or peers.min_seconds < best.max_seconds:
            close = peers.narrowed(zone)
            if best is None or close.max_seconds < best.max_seconds:
                best = close
    assert best is not None
    return best


def merge_phases(phases: Sequence[Phase]) -> Phase:
    """All phases as one; servers and workers as so many peers that a link with their average mix bears the same."""
    everyone = phases[0].source
    size = 0.0
    for phase in phases:
        ranks = len(phase.source) + len(phase.target)
        mixed = phase.source[0] == phase.target[0]
        size += float(phase.bytes_per_pair) * (1 if mixed else len(phase.source) * len(phase.target) / ranks**2)
    return Phase(everyone, everyone, size, all_pairs=True)




