"""Choices for traffic from every rank to every other, such as random gossip: node counts per zone.

With k of n ranks on one side, a link carries k (n - k) messages each way. Within a time T it can do so if k <= a or
k >= n - a. So each zone holds a minority or a majority of the ranks, and at most one zone of a level holds a
majority. T is the only unknown: one pass up the zones gives the nodes that each zone can hold within T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmdl.job_request import JobSize
from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray
from slurmdl.placement.candidate_nodes import CandidateNodes
from slurmdl.placement.zones import (
    LatencyCap,
    Proposal,
    RankedZone,
    SearchProblem,
    make_choice,
    relevant_latency_caps,
    take_nodes,
)
from slurmdl.traffic import Phase

TIME_STEPS = 24  # times that are evaluated at once
BRACKET_ROUNDS = 4  # subdivisions of the interval between two of them
MAX_ALL_TO_ALL_ZONES = 6  # zones whose choices are compared

Feasibility = Callable[[FloatArray], BoolArray]
"""Whether each zone can hold the job: (times,) -> (times, zones)."""


def all_to_all_choices(candidates: CandidateNodes, problem: SearchProblem,
                       zones: Sequence[RankedZone]) -> Iterator[Proposal]:
    """The choice with the least estimated time in each of the most promising zones."""
    for zone, estimate in rank_zones_all_to_all(candidates, problem, zones):
        quotas, nodes = estimate.model.node_counts_for_time(estimate.high, zone.index)
        choice = make_choice(candidates, zone.index, take_nodes(candidates, nodes, quotas))
        yield Proposal(choice, zone.min_seconds, estimate.max_seconds)


@dataclass(frozen=True, eq=False)
class AllToAllEstimate:
    """Bounds in s on the least transfer time in one zone if all ranks were peers, and the latency of its cap."""

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
        low, high = narrow_time(self.model.can_hold_job, np.array([zone]), self.low, self.high, BRACKET_ROUNDS)
        return replace(self, low=low, high=high)


def rank_zones_all_to_all(candidates: CandidateNodes, problem: SearchProblem, zones: Sequence[RankedZone],
                          refine: bool = True) -> list[tuple[RankedZone, AllToAllEstimate]]:
    """The most promising zones with the estimate of their best latency cap, by time; `refine` narrows its bounds."""
    size, bytes_per_pair = problem.size, merged_bytes_per_pair(problem.phases)
    load = bytes_per_pair * size.tasks * size.tasks
    min_capacity = min(float(candidates.node_capacity.min()), float(candidates.zone_capacity.min()))
    fraction = (size.tasks // size.nodes) / size.tasks
    min_time = load * fraction * (1 - fraction) / float(candidates.node_capacity.max())
    estimates: dict[int, list[AllToAllEstimate]] = {ranked_zone.index: [] for ranked_zone in zones}
    for cap in relevant_latency_caps(candidates, min_time, problem.rounds):
        model = AllToAllModel(candidates, size, bytes_per_pair, cap)
        low, high = model.bracket_times(min_time, load / min_capacity)
        latency = 2 * problem.rounds * cap.path_latency(candidates)
        for zone, of_zone in estimates.items():
            if high[zone] < np.inf:
                of_zone.append(AllToAllEstimate(model, float(low[zone]), float(high[zone]), float(latency[zone])))
    promising = sorted((min(estimate.min_seconds for estimate in of_zone), i, ranked_zone)
                       for i, ranked_zone in enumerate(zones)
                       if (of_zone := estimates[ranked_zone.index]))[:MAX_ALL_TO_ALL_ZONES]
    ranked = [(ranked_zone, _best_estimate(estimates[ranked_zone.index], ranked_zone.index) if refine else
               min(estimates[ranked_zone.index], key=lambda estimate: estimate.max_seconds))
              for _, _, ranked_zone in promising]
    return sorted(ranked, key=lambda entry: entry[1].max_seconds)


def _best_estimate(estimates: Sequence[AllToAllEstimate], zone: int) -> AllToAllEstimate:
    """Best of the estimates for a zone; narrows each one that can still win."""
    first, *others = sorted(estimates, key=lambda estimate: estimate.min_seconds)
    best = first.narrowed(zone)
    for estimate in others:
        if estimate.min_seconds < best.max_seconds:
            best = min(best, estimate.narrowed(zone), key=lambda estimate: estimate.max_seconds)
    return best


def merged_bytes_per_pair(phases: Sequence[Phase]) -> float:
    """Bytes per pair of all phases if servers and workers were peers that load a link like their average mix."""
    bytes_per_pair = 0.0
    for phase in phases:
        sources, targets = len(phase.source), len(phase.target)
        bytes_per_pair += float(phase.bytes_per_pair) * (
            sources * targets / (sources + targets)**2 if phase.has_two_roles else 1)
    return bytes_per_pair


def narrow_time(can_hold_job: Feasibility, zones: IntArray, low: float, high: float,
                rounds: int) -> tuple[float, float]:
    """The longest evaluated time in which none of the zones can hold the job, and the next one.

    `low` and `high` bound the times in s; each round subdivides the interval. (`high`, inf) if `high` is too short.
    """
    for _ in range(rounds):
        times = np.geomspace(low, high, TIME_STEPS)
        fits = can_hold_job(times)[:, zones].any(axis=1)
        if not fits.any():
            return high, np.inf
        first = int(fits.argmax())
        low, high = float(times[max(first - 1, 0)]), float(times[first])
        if first == 0:
            break
    return low, high


@dataclass(frozen=True, eq=False)
class ZoneNodeCounts:
    """Number of nodes that each zone can hold within each time; arrays of shape (times, zones).

    Attributes:
        minority: if it holds a minority of the ranks.
        majority: if it holds a majority; equals `minority` if it cannot.
        in_children: in its leaves or children, with minorities only.
        majority_gain: additional nodes if one child holds a majority.
        min_majority: smallest majority.
    """

    minority: IntArray
    majority: IntArray
    in_children: IntArray
    majority_gain: IntArray
    min_majority: IntArray


class AllToAllModel:
    """All-to-all phase of a job on candidate nodes, over links that keep a latency cap."""

    def __init__(self, candidates: CandidateNodes, size: JobSize, bytes_per_pair: float,
                 latency_cap: LatencyCap) -> None:
        self.candidates, self.size, self.bytes_per_pair = candidates, size, bytes_per_pair
        self.tasks_per_node = size.tasks / size.nodes
        self.usable_nodes = candidates.node_latency <= latency_cap.node_s
        self.uplink_capacity = latency_cap.zone_capacity(candidates)

    def fast_enough_nodes(self, times: FloatArray) -> BoolArray:
        """Usable nodes whose links carry their traffic in time: (times,) -> (times, nodes)."""
        node_bytes = self.bytes_per_pair * self.tasks_per_node * (self.size.tasks - self.tasks_per_node)
        return (self.candidates.node_capacity >= node_bytes / times[:, None] * (1 - 1e-9)) & self.usable_nodes

    def zone_node_counts(self, times: FloatArray) -> ZoneNodeCounts:
        wanted, ranks = self.size.nodes, self.size.tasks
        in_children = self.candidates.sum_per_leaf(self.fast_enough_nodes(times))
        max_messages = times[:, None] * self.uplink_capacity / self.bytes_per_pair
        root = np.sqrt(np.maximum(0.0, ranks * ranks - 4 * max_messages))
        max_minority = np.where(
            root > 0, np.floor((ranks - root) / 2 / self.tasks_per_node * (1 + 1e-9) + 1e-9), wanted)
        min_majority = wanted - max_minority.astype(np.int64)
        gain = np.zeros_like(in_children)
        minority, majority = in_children.copy(), in_children.copy()
        for level in self.candidates.levels:
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
        return np.asarray(counts.in_children + counts.majority_gain >= self.size.nodes)

    def bracket_times(self, low: float, high: float) -> tuple[FloatArray, FloatArray]:
        """For each zone a time too short for the job, and the next evaluated one; infinite if `high` is too short."""
        times = np.geomspace(low, high, TIME_STEPS)
        fits = self.can_hold_job(times)
        first = np.where(fits.any(axis=0), fits.argmax(axis=0), TIME_STEPS)
        return times[np.maximum(first - 1, 0)], np.append(times, np.inf)[first]

    def node_counts_for_time(self, seconds: float, zone: int) -> tuple[IntArray, IntArray]:
        """Quotas below one zone that keep the time, of shape (zones,), and indices of the candidate nodes to take."""
        times = np.array([seconds])
        counts = self.zone_node_counts(times)
        below = self.candidates.nodes_below(zone)
        nodes = below.start + np.flatnonzero(self.fast_enough_nodes(times)[0, below])
        quotas = np.zeros(self.candidates.zone_count, np.int64)
        leaf_nodes = np.bincount(self.candidates.leaf[nodes], minlength=self.candidates.zone_count)
        stack = [(zone, self.size.nodes)]
        while stack:
            parent, wanted = stack.pop()
            quotas[parent] = min(wanted, int(leaf_nodes[parent]))
            children = np.flatnonzero(self.candidates.parent == parent)
            stack += self.split_among_children(counts, children, wanted - int(quotas[parent]))
        return quotas, nodes

    def split_among_children(self, counts: ZoneNodeCounts, zones: IntArray, wanted: int) -> list[tuple[int, int]]:
        """Split `wanted` nodes among sibling zones: largest first, the remainder best-fit; (zone, count) pairs."""
        minority, majority = counts.minority[0, zones], counts.majority[0, zones]
        split: list[tuple[int, int]] = []
        with_majority = np.where(majority > minority, np.minimum(majority, wanted), 0)
        with_majority[with_majority < counts.min_majority[0, zones]] = 0
        if with_majority.any():
            i = int(with_majority.argmax())
            split.append((int(zones[i]), int(with_majority[i])))
            wanted -= int(with_majority[i])
            minority[i] = 0
        while wanted > 0:
            fitting = np.flatnonzero(minority >= wanted)
            i = int(fitting[minority[fitting].argmin()] if len(fitting) else minority.argmax())
            count = min(wanted, int(minority[i]))
            if not count:
                raise ValueError("the zones hold fewer nodes than their counts")
            split.append((int(zones[i]), count))
            wanted -= count
            minority[i] = 0
        return split
