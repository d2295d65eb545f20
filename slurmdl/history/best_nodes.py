"""The best nodes that a job could have had: fewest leaf zones, and least communication time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from slurmdl.history.accounting import Int32Array, IntArray
from slurmdl.history.comm_costs import CommCosts, NodeCounts, Seconds
from slurmdl.history.job_nodes import LeafZones
from slurmdl.placement.algorithms.apportion import zone_quotas

MAX_ZONES_PER_LEVEL = 1  # zones of a level, those with the least free nodes, whose quotas are compared


@dataclass(frozen=True, eq=False)
class BestResult:
    """Best nodes of one job.

    Attributes:
        fewest_zones: fewest leaf zones with enough free nodes.
        seconds: least communication time of each strategy.
        own_seconds: the time on the job's own nodes with ranks in leaf order.
        counts: nodes with the least time of the first strategy, then in the fewest zones.
    """

    fewest_zones: int
    seconds: Seconds
    own_seconds: Seconds
    counts: NodeCounts


class BestNodes:
    """Search for the best nodes, with the quotas per leaf zone of slurmdl.placement."""

    def __init__(self, leaves: LeafZones, costs: CommCosts) -> None:
        self.leaves, self.costs = leaves, costs
        bounds = np.array(leaves.ranges, np.int64).reshape(-1, 2)
        self._low, self._high = bounds.T
        levels = np.array(leaves.range_level, np.int64)
        self._of_level = [np.flatnonzero(levels == level) for level in np.unique(levels).tolist()]
        self._tie_break = np.arange(len(leaves.zones))
        self._has_groups = bool(leaves.group.any())

    def find(self, own: Int32Array, free: IntArray) -> BestResult:
        """Compare with the job's own nodes, so that the result is never worse than these in leaf order.

        Args:
            own: node numbers of the job, in several leaf zones.
            free: shape (leaves,), free nodes and the job's own.
        """
        nodes = len(own)
        leaf = self.leaves.leaf_of_node[own]
        counts = np.bincount(leaf, minlength=len(free))
        own_counts = _compact(counts)
        own_seconds = self.costs.of_counts(own_counts)
        if self._has_groups:  # jobs do not span roots, unless this one does
            groups = np.unique(self.leaves.group[leaf])
            free = np.where(np.isin(self.leaves.group, groups), free, 0)
        if free.max() >= nodes:
            tightest = int(np.where(free >= nodes, free, len(self.leaves.order) + 1).argmin())
            counts_in_one = (tightest,), (nodes,)
            return BestResult(1, self.costs.of_counts(counts_in_one), own_seconds, counts_in_one)
        fewest = int(np.searchsorted(np.cumsum(np.sort(free)[::-1]), nodes)) + 1
        candidates = [own_counts, *dict.fromkeys(self._candidates(free, nodes))]
        seconds = [self.costs.of_counts(candidate) for candidate in candidates]
        best = min(range(len(candidates)), key=lambda i: (float(f"{seconds[i][0]:.9e}"), len(candidates[i][0])))
        return BestResult(fewest, tuple(map(min, zip(*seconds, strict=True))), own_seconds, candidates[best])

    def _candidates(self, free: IntArray, nodes: int) -> Iterator[NodeCounts]:
        """Quotas in the tightest zones of each level, or in the whole cluster if no zone has enough nodes."""
        total = np.concatenate([[0], np.cumsum(free)])
        below = total[self._high] - total[self._low]
        found = False
        for zones in self._of_level:
            enough = zones[below[zones] >= nodes]
            for zone in enough[np.argsort(below[enough], kind="stable")][:MAX_ZONES_PER_LEVEL].tolist():
                found = True
                yield from self._quotas(free, int(self._low[zone]), int(self._high[zone]), nodes)
        if not found:
            yield from self._quotas(free, 0, len(free), nodes)

    def _quotas(self, free: IntArray, low: int, high: int, nodes: int) -> Iterator[NodeCounts]:
        for quota in zone_quotas(free[low:high], self._tie_break[low:high], nodes):
            used = np.flatnonzero(quota)
            yield tuple((used + low).tolist()), tuple(quota[used].tolist())


def _compact(counts: IntArray) -> NodeCounts:
    used = np.flatnonzero(counts)
    return tuple(used.tolist()), tuple(counts[used].tolist())
