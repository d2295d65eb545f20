"""Choices for traffic from every rank to every other, such as random gossip: node counts per zone.

With k of n ranks on one side, a link carries k (n - k) messages each way. Within a time T it can do so if k <= a or
k >= n - a. So each zone holds a minority or a majority of the ranks, and at most one zone of a level holds a
majority. T is the only unknown: one pass up the zones gives the nodes that each zone can hold within T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmdl.placement.algorithms.apportion import take_nodes
from slurmdl.placement.algorithms.bottleneck import LatencyCap, relevant_latency_caps
from slurmdl.placement.algorithms.problem import Proposal, SearchProblem, make_choice
from slurmdl.placement.algorithms.zone_candidates import ZoneCandidate
from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray
from slurmdl.placement.candidate_nodes import CandidateNodes
from slurmdl.placement.job_size import JobSize
from slurmdl.placement.traffic import Phase

TIME_STEPS = 24  # times that are evaluated at once
BRACKET_ROUNDS = 4  # subdivisions of the interval between two of them
MAX_ALL_TO_ALL_ZONES = 6  # zones whose choices are compared


def all_to_all_choices(pool: CandidateNodes, problem: SearchProblem,
                       candidates: Sequence[ZoneCandidate]) -> Iterator[Proposal]:
    """The choice with the least estimated time in each of the most promising zones."""
    for candidate, estimate in rank_zones_all_to_all(pool, problem, candidates):
        quotas, nodes = estimate.model.node_counts_for_time(estimate.high, candidate.zone)
        yield Proposal(make_choice(pool, candidate.zone, take_nodes(pool, nodes, quotas)), candidate.min_seconds,
                       estimate.max_seconds)


@dataclass(frozen=True, eq=False)
class AllToAllEstimate:
    """Estimate for one zone and latency cap if all ranks were peers.

    `low` and `high` are bounds on the least transfer time. All times are in seconds.
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
        return replace(self, low=low, high=high)


def rank_zones_all_to_all(pool: CandidateNodes, problem: SearchProblem, candidates: Sequence[ZoneCandidate],
                          refine: bool = True) -> list[tuple[ZoneCandidate, AllToAllEstimate]]:
    """The most promising zones with the estimate of their best latency cap, the least time first.

    `refine` narrows the bounds of the best estimates.
    """
    job, phase = problem.job, merge_phases(problem.phases)
    load = float(phase.bytes_per_pair) * job.tasks * job.tasks
    min_capacity = min(float(pool.node_capacity.min()), float(pool.zone_capacity.min()))
    fraction = (job.tasks // job.nodes) / job.tasks
    min_time = load * fraction * (1 - fraction) / float(pool.node_capacity.max())
    estimates: dict[int, list[AllToAllEstimate]] = {candidate.zone: [] for candidate in candidates}
    for cap in relevant_latency_caps(pool, min_time, problem.rounds):
        model = AllToAllModel(pool, job, phase, cap)
        low, high = model.bracket_time(min_time, load / min_capacity)
        latency = 2 * problem.rounds * cap.path_latency(pool)
        for zone, of_zone in estimates.items():
            if high[zone] < np.inf:
                of_zone.append(AllToAllEstimate(model, float(low[zone]), float(high[zone]), float(latency[zone])))
    promising = sorted((min(estimate.min_seconds for estimate in of_zone), i, candidate)
                       for i, candidate in enumerate(candidates)
                       if (of_zone := estimates[candidate.zone]))[:MAX_ALL_TO_ALL_ZONES]
    ranked = [(candidate, _best_estimate(estimates[candidate.zone], candidate.zone) if refine else
               min(estimates[candidate.zone], key=lambda estimate: estimate.max_seconds))
              for _, _, candidate in promising]
    return sorted(ranked, key=lambda entry: entry[1].max_seconds)


def _best_estimate(estimates: Sequence[AllToAllEstimate], zone: int) -> AllToAllEstimate:
    """Best of the estimates for a zone; narrows each one that can still win."""
    best: AllToAllEstimate | None = None
    for estimate in sorted(estimates, key=lambda estimate: estimate.min_seconds):
        if best is None or estimate.min_seconds < best.max_seconds:
            narrowed = estimate.narrowed(zone)
            if best is None or narrowed.max_seconds < best.max_seconds:
                best = narrowed
    assert best is not None
    return best


def merge_phases(phases: Sequence[Phase]) -> Phase:
    """Merge all phases into one.

    Servers and workers become peers that load a link like their average mix.
    """
    bytes_per_pair = 0.0
    for phase in phases:
        sources, targets = len(phase.source), len(phase.target)
        bytes_per_pair += float(phase.bytes_per_pair) * (
            sources * targets / (sources + targets)**2 if phase.has_two_roles else 1)
    return Phase(phases[0].source, phases[0].source, bytes_per_pair, all_pairs=True)


@dataclass(frozen=True, eq=False)
class ZoneNodeCounts:
    """Number of nodes that each zone can hold within each time; arrays of shape (times, zones).

    Attributes
    ----------
    minority : if it holds a minority of the ranks.
    majority : if it holds a majority; equals `minority` if it cannot.
    in_children : in its leaves or children, with minorities only.
    majority_gain : additional nodes if one child holds a majority.
    min_majority : smallest majority.
    """

    minority: IntArray
    majority: IntArray
    in_children: IntArray
    majority_gain: IntArray
    min_majority: IntArray


class AllToAllModel:
    """All-to-all phase of a job on a pool, over links that keep a latency cap."""

    def __init__(self, pool: CandidateNodes, job: JobSize, phase: Phase, latency_cap: LatencyCap) -> None:
        self.pool, self.job = pool, job
        self.bytes_per_pair = float(np.mean(phase.bytes_per_pair))
        self.tasks_per_node = job.tasks / job.nodes
        self.usable_nodes = pool.node_latency <= latency_cap.node_s
        is_usable = pool.zone_latency <= latency_cap.max_uplink_latency(pool.level)
        self.uplink_capacity = np.where(is_usable, pool.zone_capacity, 0.0)

    def fast_enough_nodes(self, times: FloatArray) -> BoolArray:
        """Usable nodes whose links carry their traffic in time: (times,) -> (times, nodes)."""
        node_bytes = self.bytes_per_pair * self.tasks_per_node * (self.job.tasks - self.tasks_per_node)
        return (self.pool.node_capacity >= node_bytes / times[:, None] * (1 - 1e-9)) & self.usable_nodes

    def zone_node_counts(self, times: FloatArray) -> ZoneNodeCounts:
        wanted, ranks = self.job.nodes, self.job.tasks
        in_children = self.pool.sum_per_leaf(self.fast_enough_nodes(times))
        max_messages = times[:, None] * self.uplink_capacity / self.bytes_per_pair
        root = np.sqrt(np.maximum(0.0, ranks * ranks - 4 * max_messages))
        max_minority = np.where(
            root > 0, np.floor((ranks - root) / 2 / self.tasks_per_node * (1 + 1e-9) + 1e-9), wanted)
        min_majority = wanted - max_minority.astype(np.int64)
        gain = np.zeros_like(in_children)
        minority, majority = in_children.copy(), in_children.copy()
        for level in self.pool.levels:
            zones = level.zones
            minority[:, zones] = np.minimum(in_children[:, zones], max_minority[:, zones]).astype(np.int64)
            most = np.minimum(in_children[:, zones] + gain[:, zones], wanted)
            majority[:, zones] = np.where(most >= min_majority[:, zones],
                                          np.maximum(most, minority[:, zones]), minority[:, zones])
            in_children[:, level.parents] += np.add.reduceat(minority[:, zones], level.child_begin, axis=1)
            child_gain = np.maximum.reduceat(majority[:, zones] - minority[:, zones], level.child_begin, axis=1)
            gain[:, level.parents] = np.maximum(gain[:, level.parents], child_gain)
        return ZoneNodeCounts(minority, majority, in_children, gain, min_majority)

    def can_hold_job(self, times: FloatArray) -> BoolArray:
        """Whether each zone can hold the job: (times,) -> (times, zones)."""
        counts = self.zone_node_counts(times)
        return np.asarray(counts.in_children + counts.majority_gain >= self.job.nodes)

    def bracket_time(self, low: float, high: float, zone: int | None = None) -> tuple[FloatArray, FloatArray]:
        """For each zone a time that is too short for the job, and the next evaluated time, which suffices.

        Both are infinite if `high` is too short. `zone` subdivides the interval for this zone only.
        """
        bounds = np.full(self.pool.zone_count, np.inf), np.full(self.pool.zone_count, np.inf)
        for _ in range(1 if zone is None else BRACKET_ROUNDS):
            times = np.geomspace(low, high, TIME_STEPS)
            fits = self.can_hold_job(times)
            first = np.where(fits.any(axis=0), fits.argmax(axis=0), TIME_STEPS)
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
        """Node counts below one zone that keep the time, and the nodes to take them from.

        The quotas have shape (zones,); the nodes are pool indices.
        """
        times = np.array([seconds])
        counts = self.zone_node_counts(times)
        below = self.pool.nodes_below(zone)
        nodes = below.start + np.flatnonzero(self.fast_enough_nodes(times)[0, below])
        quotas = np.zeros(self.pool.zone_count, np.int64)
        leaf_nodes = np.bincount(self.pool.leaf[nodes], minlength=self.pool.zone_count)
        stack = [(zone, self.job.nodes)]
        while stack:
            parent, wanted = stack.pop()
            quotas[parent] = min(wanted, int(leaf_nodes[parent]))
            children = np.flatnonzero(self.pool.parent == parent)
            stack += self.split_among_children(counts, children, wanted - int(quotas[parent]))
        return quotas, nodes

    def split_among_children(self, counts: ZoneNodeCounts, zones: IntArray, wanted: int) -> list[tuple[int, int]]:
        """Split `wanted` nodes among sibling zones: largest first, the remainder best-fit; (zone, count) pairs."""
        minority, majority = counts.minority[0, zones], counts.majority[0, zones]
        split: list[tuple[int, int]] = []
        is_open = np.ones(len(zones), bool)
        with_majority = np.where(majority > minority, np.minimum(majority, wanted), 0)
        with_majority[with_majority < counts.min_majority[0, zones]] = 0
        if with_majority.any():
            i = int(with_majority.argmax())
            split.append((int(zones[i]), int(with_majority[i])))
            wanted -= int(with_majority[i])
            is_open[i] = False
        while wanted > 0:
            fitting = np.flatnonzero(is_open & (minority >= wanted))
            i = int(fitting[minority[fitting].argmin()] if len(fitting) else np.where(is_open, minority, -1).argmax())
            count = min(wanted, int(minority[i]))
            split.append((int(zones[i]), count))
            wanted -= count
            is_open[i] = False
            if not count:
                raise ValueError("the zones hold fewer nodes than their counts")
        return split
