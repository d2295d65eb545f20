"""Nodes that slurmdl prefers, as a number of nodes per leaf zone: a fast path for the search of slurmdl.placement.

Whole nodes with default link scores differ only in their leaf. So the search is over quotas: the even and
largest-first quotas of slurmdl.placement.algorithms.apportion in the tightest zones of each level, and for all-to-all
traffic the quotas of the shortest time in which the uplinks can carry the job (as in algorithms.all_to_all). The
choice has the least predicted time, then the fewest bytes between zones, the fewest leaves, the fewest unused nodes,
and the fewest partly used leaves, in the order of place_job; on blocks, the fewest partly used blocks unless others
are much faster. A test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmdl.history.leaves import Leaves
from slurmdl.history.slurm_rules import SlurmBlockRule, SlurmRule
from slurmdl.history.step_cost import StepCost
from slurmdl.history.trace import FloatArray, IntArray
from slurmdl.placement.algorithms.apportion import fill_largest_first, zone_quotas
from slurmdl.placement.search import MAX_BLOCK_TIE

MAX_ZONES_PER_LEVEL = 4  # zones with enough nodes whose quotas are compared
MAX_AGGREGATES = 8
TIME_STEPS = 10  # halvings of the interval of times of all-to-all traffic
SAME_TIME = 1e-9  # relative difference of times that counts as rounding
#: cost, leaves, unused nodes, partly used leaves
_SortKey = tuple[tuple[float, float, float], int, int, int]


class PreferredNodes:
    """slurmdl's choice on one cluster for one kind of traffic."""

    def __init__(self, leaves: Leaves, rule: SlurmRule, cost: StepCost) -> None:
        self.leaves, self.rule, self.cost = leaves, rule, cost
        topology = leaves.topology
        is_block = isinstance(rule, SlurmBlockRule)
        #: nodes of the largest job that a single block may hold, None for trees
        self._base = rule.base_size if isinstance(rule, SlurmBlockRule) else None
        #: leaves of each zone above leaves, the lowest first; of blocks see `_candidate_leaves`
        self._zones: list[IntArray] = []
        levels: list[int] = []
        if not is_block and topology.kind == "tree":
            above = np.unique(leaves.ancestors[:, 1:])
            for zone in sorted((zone for zone in above.tolist() if zone >= 0), key=lambda zone: topology.level[zone]):
                self._zones.append(np.flatnonzero((leaves.ancestors == zone).any(axis=1)))
                levels.append(int(topology.level[zone]))
        self._level = np.array(levels, np.int64)
        self._member = np.array([np.isin(np.arange(len(leaves.size)), below) for below in self._zones], float)
        self._tie_break = np.arange(len(leaves.size))

    def choose(self, free: IntArray, nodes: int) -> IntArray | None:
        """Nodes per leaf, shape (leaves,); None if the job cannot start. A single node is left to Slurm's rule."""
        fitting = np.flatnonzero(free >= nodes)
        if nodes == 1 or self.leaves.topology.kind == "flat":
            return self.rule.choose(free, nodes)
        if len(fitting) and (self._base is None or nodes <= self._base):
            return self._in_leaf(int(fitting[free[fitting].argmin()]), nodes)
        found: dict[bytes, tuple[IntArray, _SortKey, tuple[int, int]]] = {}
        for available in self._candidate_leaves(free, nodes):
            for counts in self._quotas(available, nodes):
                if counts.tobytes() in found:
                    continue
                left = (free - counts)[counts > 0]
                remainders = int(np.count_nonzero(left)), int(left.sum())
                key = self.cost.sort_key(counts), len(left), int(available.sum()) - nodes, remainders[0]
                found[counts.tobytes()] = counts, key, remainders
        if not found:
            return self.rule.choose(free, nodes)
        if self._base is None:
            return min(found.values(), key=lambda item: item[1])[0]
        longest = min(key[0][0] for _, key, _ in found.values()) * (1 + MAX_BLOCK_TIE)
        tied = [item for item in found.values() if item[1][0][0] <= longest]
        return min(tied, key=lambda item: (item[2], item[1]))[0]

    def _in_leaf(self, leaf: int, nodes: int) -> IntArray:
        counts = np.zeros(len(self.leaves.size), np.int64)
        counts[leaf] = nodes
        return counts

    def _candidate_leaves(self, free: IntArray, nodes: int) -> Iterator[IntArray]:
        """Free nodes of the leaves that may be used together, shape (leaves,); 0 for the others."""
        if isinstance(self.rule, SlurmBlockRule):
            rule = self.rule.rule(nodes)
            available = self.rule.available(free, nodes)
            enough = np.flatnonzero(available >= nodes)
            for aggregate in enough[np.argsort(available[enough], kind="stable")][:MAX_AGGREGATES].tolist():
                inside = np.zeros_like(free)
                span = slice(aggregate * rule.aggregate, (aggregate + 1) * rule.aggregate)
                parts = np.arange(len(free)) // rule.part
                sums = np.bincount(parts[span], free[span])
                kept = np.argsort(-sums, kind="stable")[:rule.max_parts]
                inside[span] = np.where(np.isin(parts[span], kept), free[span], 0)
                if inside.sum() >= nodes:
                    yield inside
            return
        below = self._member @ free if len(self._zones) else np.zeros(0)
        enough = np.flatnonzero(below >= nodes)
        for level in np.unique(self._level[enough]).tolist():
            same = enough[self._level[enough] == level]
            for i in same[np.argsort(below[same], kind="stable")][:MAX_ZONES_PER_LEVEL].tolist():
                inside = self._zones[i]
                available = np.zeros_like(free)
                available[inside] = free[inside]
                yield available

    def _quotas(self, available: IntArray, nodes: int) -> Iterator[IntArray]:
        yield from zone_quotas(available, self._tie_break, nodes)
        if self.cost.is_all_to_all and np.count_nonzero(available) > 1:
            quotas = self._all_to_all_quotas(available, nodes)
            if quotas.sum() == nodes:  # less if one zone must hold a majority
                yield quotas

    def _all_to_all_quotas(self, available: IntArray, nodes: int) -> IntArray:
        """Quotas of the shortest time in which each zone holds a minority of the job; a link with k of n nodes on
        one side carries k (n - k) messages each way."""
        pairs = (nodes - 1) / self.cost.node_bandwidth  # the time of a node's own link, in units of a message's bytes
        low, high = pairs, nodes * nodes / 4 / float(self.cost.zone_bandwidth.min())
        held = self._held(available, nodes, low)
        if held[-1].sum() < nodes:
            for _ in range(TIME_STEPS):
                middle = (low * high) ** 0.5 if high > low else low
                if self._held(available, nodes, middle)[-1].sum() < nodes:
                    low = middle
                else:
                    high = middle
            held = self._held(available, nodes, max(high, low))
        return self._fill_from_top(held, nodes)

    def _held(self, available: IntArray, nodes: int, time: float) -> list[IntArray]:
        """Nodes that the zones can hold within a time: first of the leaves, shape (leaves,), then of the zones above
        them, level by level, below the smallest zone that holds them all."""
        bandwidth: FloatArray = np.append(self.cost.zone_bandwidth, np.inf)
        ancestors = self.leaves.ancestors
        levels = [np.minimum(available, _minority(nodes, time * bandwidth[ancestors[:, 0]]))]
        zones = len(bandwidth)
        for column in range(1, ancestors.shape[1]):
            if len(np.unique(ancestors[available > 0, column])) == 1:
                break  # this zone holds the whole job
            above = ancestors[:, column]
            child = ancestors[:, column - 1]
            total = np.zeros(zones, np.int64)
            if column == 1:
                np.add.at(total, above, levels[0])
            else:
                first = np.unique(child, return_index=True)[1]
                np.add.at(total, above[first], levels[-1][child[first]])
            levels.append(np.where(np.arange(zones) < zones - 1,
                                   np.minimum(total, _minority(nodes, time * bandwidth)), 0))
        return levels

    def _fill_from_top(self, held: list[IntArray], nodes: int) -> IntArray:
        """Divide the nodes among the zones, those that can hold most first, then among the leaves of each."""
        leaf_quota = held[0]
        if len(held) == 1:
            return fill_largest_first(leaf_quota, nodes)
        zone_quota = fill_largest_first(held[-1], nodes)
        for column in range(len(held) - 2, -1, -1):
            zones = self.leaves.ancestors[:, column + 1]
            below = np.zeros_like(leaf_quota) if column == 0 else np.zeros_like(held[column])
            for zone in np.flatnonzero(zone_quota).tolist():
                members = np.flatnonzero(zones == zone)
                if column:
                    members = np.unique(self.leaves.ancestors[members, column])
                below[members] = fill_largest_first(held[column][members], int(zone_quota[zone]))
            zone_quota = below
        return zone_quota


def _minority(nodes: int, capacity: FloatArray) -> IntArray:
    """Largest k up to half of `nodes` with k (nodes - k) <= capacity; `nodes` if any k satisfies it."""
    root = np.maximum(nodes * nodes - 4 * capacity, 0.0)
    limit = np.floor((nodes - np.sqrt(root)) / 2 * (1 + SAME_TIME) + SAME_TIME)
    return np.where(4 * capacity >= nodes * nodes, nodes, limit).astype(np.int64)
