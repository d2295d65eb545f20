"""Nodes for traffic from every rank to every other, as random gossip: how many below each zone.

A link with k of n ranks on one side carries size k (n - k) bytes each way. Within a time T that is at most what
the link can take where k <= a or k >= n - a: so a zone holds few ranks or most of them, and at most one zone of
a level holds most. That leaves one number to search, T: one pass up the zones says what each can hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.placement.choice.floors import LatencyCap
from slurmdl.placement.nodes.pool import BoolArray, CandidateNodes, FloatArray, IntArray
from slurmdl.placement.shape import JobSize
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
