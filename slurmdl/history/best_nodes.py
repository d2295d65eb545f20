"""The best whole nodes for a job, as a number of nodes per leaf zone: predicted time of communication, and search.

A fast path for the search of slurmdl.placement: one rank runs on each node, ranks are numbered by leaf zone, and link
scores are defaults, as those of today say nothing about past jobs. Then nodes differ only in their leaf zone, and the
search is over quotas. A test compares it with place_job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.history.accounting import Int32Array
from slurmdl.history.leaves import Leaves
from slurmdl.history.slurm_rules import SlurmBlockRule, SlurmRule
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.place import MAX_BLOCK_TIE
from slurmdl.placement.result import SortKey
from slurmdl.placement.zones import fill_largest_first, zone_quotas
from slurmdl.traffic import Traffic

#: strategies whose time follows from the nodes, with one rank per node, and what is assumed of them
STRATEGIES = {"allreduce": "ring allreduce, ranks in the order of the node list, as by Slurm up to 25.11",
              "gossip": "random partners, as dense as all-to-all traffic"}
MAX_ZONES_PER_LEVEL = 4  # zones with enough nodes whose quotas are compared
MAX_AGGREGATES = 8
TIME_STEPS = 10  # halvings of the interval of times of all-to-all traffic
SAME_TIME = 1e-9  # relative difference of times that counts as rounding

#: time per strategy
Seconds = tuple[float, ...]
_Loads = tuple[tuple[int, int], ...]


class CommCosts:
    """Seconds of communication of one iteration of each strategy; one prediction for all jobs of equal load.

    All node links are equal. So the time depends only on the busiest uplink of each kind: the one that a ring crosses
    most often, or that halves the nodes best.
    """

    def __init__(self, leaves: Leaves, scores: LinkScores, strategies: Sequence[str], model_bytes: float) -> None:
        for strategy in strategies:
            if strategy not in STRATEGIES:
                raise UsageError(f"--strategy {strategy}: expected {' or '.join(STRATEGIES)}")
        self.leaves, self.scores = leaves, scores
        self.traffic = {strategy: Traffic(strategy, model_bytes) for strategy in strategies}
        topology = leaves.topology
        self.zone_bandwidth: FloatArray = capacity.zone_uplinks(
            topology.zones, topology.level, topology.node_count, topology.uplink_bandwidth, scores)[0]
        kinds: dict[tuple[float, int], int] = {}
        #: number of each zone's kind: zones of one kind have equal uplinks; the last entry is for no zone
        self._kind = [*(kinds.setdefault(pair, len(kinds)) for pair in
                        zip(self.zone_bandwidth.tolist(), topology.level.tolist(), strict=True)), -1]
        #: zones above each leaf zone, itself included; without an only root, whose uplink no message uses
        has_one_root = int((topology.parent < 0).sum()) == 1
        self._path = [tuple(zone for zone in reversed(row) if zone >= 0)[has_one_root:]
                      for row in leaves.ancestors.tolist()]
        self._above = [path[:-1] for path in self._path]
        self._leaf_zone = leaves.zone.tolist()
        self._has_equal_leaves = len({self._kind[zone] for zone in self._leaf_zone}) == 1
        self._left: dict[tuple[int, int], tuple[int, ...]] = {}
        self._leaf_order: dict[tuple[int, int, int, _Loads], Seconds] = {}
        self._ring: dict[tuple[int, bool, _Loads], float] = {}

    def of_nodes(self, numbers: Int32Array, in_leaf_order: Seconds) -> Seconds:
        """Time with ranks in the order of these node numbers; `in_leaf_order` is `of_counts` of them."""
        leaf = self.leaves.leaf_of_node[numbers]
        if "allreduce" not in self.traffic or (leaf[1:] >= leaf[:-1]).all():
            return in_leaf_order
        runs = [int(leaf[0]), *leaf[1:][leaf[1:] != leaf[:-1]].tolist()]
        if len(runs) > 1 and runs[0] == runs[-1]:
            runs.pop()
        crossings: dict[int, int] = {}
        if len(runs) > 1:
            for pair in pairwise([*runs, runs[0]]):
                for zone in self._left.get(pair) or self._zones_left(pair):
                    crossings[zone] = crossings.get(zone, 0) + 1
        ring = self._ring_seconds((len(leaf), len(leaf) > len(runs), self._busiest(crossings.items())), numbers)
        return tuple(ring if strategy == "allreduce" else seconds
                     for strategy, seconds in zip(self.traffic, in_leaf_order, strict=True))

    def of_counts(self, counts: IntArray) -> Seconds:
        """Time with ranks in leaf order on these nodes per leaf zone, at least two; shape (leaves,)."""
        used = np.flatnonzero(counts)
        leaves, number = used.tolist(), counts[used].tolist()
        total, fewest, most = sum(number), min(number), max(number)
        # of equal leaf uplinks, the one with most nodes divides the job best
        at_leaves = ((leaves[0], most),) if self._has_equal_leaves else zip(leaves, number, strict=True)
        below: dict[int, int] = {}
        for leaf, count in zip(leaves, number, strict=True):
            for zone in self._above[leaf]:
                below[zone] = below.get(zone, 0) + count
        loads = self._busiest((zone, count if 2 * count <= total else total - count) for zone, count in (
            *((self._leaf_zone[leaf], count) for leaf, count in at_leaves), *below.items()))
        # a network inside leaf zones carries the traffic of the largest share, the node links that of the smallest
        key = (total, *((fewest, most) if self.scores.default_leaf_bandwidth else (0, 0)), loads)
        if key not in self._leaf_order:
            numbers = np.concatenate([np.arange(self.leaves.begin[leaf], self.leaves.begin[leaf] + count)
                                      for leaf, count in zip(leaves, number, strict=True)])
            # in leaf order a ring leaves each zone once
            once = tuple((kind, 1) for kind, _ in loads)
            self._leaf_order[key] = tuple(
                self._ring_seconds((total, most > 1, once), numbers) if strategy == "allreduce"
                else self._predict(strategy, numbers) for strategy in self.traffic)
        return self._leaf_order[key]

    def sort_key(self, counts: IntArray) -> SortKey:
        """As Cost.sort_key, for the first strategy, with messages instead of bytes; `counts` as in `of_counts`."""
        used, total = np.count_nonzero(counts), int(counts.sum())
        if total < 2:
            return 0.0, 0.0, 0.0
        is_ring = next(iter(self.traffic)) == "allreduce"
        between_zones = used * (used > 1) if is_ring else total * total - int((counts * counts).sum())
        return float(f"{self.of_counts(counts)[0]:.9e}"), float(between_zones), float(total)

    def _ring_seconds(self, key: tuple[int, bool, _Loads], numbers: np.typing.NDArray[np.integer]) -> float:
        """Time of a ring of these nodes; `key`: nodes, whether two neighbors share a leaf zone, crossed uplinks."""
        if key not in self._ring:
            self._ring[key] = self._predict("allreduce", numbers)
        return self._ring[key]

    def _busiest(self, loads: Iterable[tuple[int, int]]) -> _Loads:
        """Largest load of each kind of zone, from (zone, load)."""
        largest: dict[int, int] = {}
        for zone, load in loads:
            kind = self._kind[zone]
            if load > largest.get(kind, 0):
                largest[kind] = load
        return tuple(sorted(largest.items()))

    def _zones_left(self, pair: tuple[int, int]) -> tuple[int, ...]:
        """Zones above the first leaf zone and not above the second."""
        source, target = pair
        self._left[pair] = tuple(zone for zone in self._path[source] if zone not in self._path[target])
        return self._left[pair]

    def _predict(self, strategy: str, numbers: np.typing.NDArray[np.integer]) -> float:
        names = [self.leaves.node_names[number] for number in numbers.tolist()]
        links = network_links(names, self.leaves.topology, self.scores)
        return predict_cost(self.traffic[strategy].phases(len(names)), links, np.arange(len(names))).seconds


class BestNodes:
    """Search on one cluster: the quotas of slurmdl.placement in the tightest zones of each level.

    Args:
        costs: the first strategy decides.
        rule: Slurm's rule, which limits the choice on blocks; None for none.
        is_quick: for a million jobs, compare fewer quotas: only those of the tightest zone of each level, and none
            that are made for all-to-all traffic.
    """

    def __init__(self, costs: CommCosts, rule: SlurmRule | None = None, is_quick: bool = False) -> None:
        self.leaves, self.costs, self.rule = costs.leaves, costs, rule
        self._block_rule = rule if isinstance(rule, SlurmBlockRule) else None
        self._is_all_to_all = next(iter(costs.traffic)) == "gossip" and not is_quick
        self._zones_per_level = 1 if is_quick else MAX_ZONES_PER_LEVEL
        level, self._low, self._high = np.array(self.leaves.upper_zones, np.int64).reshape(-1, 3).T
        self._of_level = [np.flatnonzero(level == height) for height in np.unique(level).tolist()]
        self._tie_break = np.arange(len(self.leaves.size))

    def compare(self, own: IntArray, free: IntArray) -> tuple[Seconds, Seconds, IntArray]:
        """Compare a job's own nodes with the best ones, which are never worse.

        Args:
            own: nodes of the job per leaf zone, shape (leaves,).
            free: free nodes and its own ones.

        Returns:
            Time of each strategy on its own nodes with ranks in leaf order; least time of each; nodes with the least
            time of the first strategy, then in the fewest leaf zones.
        """
        choices = [own, *(counts for _, counts in self.candidates(free, int(own.sum())))]
        seconds = [self.costs.of_counts(counts) for counts in choices]
        best = min(range(len(choices)), key=lambda i: (float(f"{seconds[i][0]:.9e}"), np.count_nonzero(choices[i])))
        return seconds[0], tuple(map(min, zip(*seconds, strict=True))), choices[best]

    def choose(self, free: IntArray, nodes: int) -> IntArray | None:
        """slurmdl's choice among the free nodes: nodes per leaf zone; None if Slurm's rule cannot start the job.

        The least predicted time, then the fewest bytes between zones, the fewest leaf zones, the fewest unused nodes,
        and the fewest partly used leaf zones, in the order of place_job; on blocks, the fewest partly used blocks
        unless others are much faster. A single node is left to Slurm's rule.
        """
        assert self.rule is not None, "a replay has a rule"
        if nodes == 1 or self.leaves.topology.kind == "flat":
            return self.rule.choose(free, nodes)
        found = []
        for available, counts in self.candidates(free, nodes):
            left = (free - counts)[counts > 0]
            remainders = int(np.count_nonzero(left)), int(left.sum())
            key = self.costs.sort_key(counts), len(left), int(available.sum()) - nodes, remainders[0]
            found.append((key, remainders, counts))
        if not found:
            return self.rule.choose(free, nodes)
        if self._block_rule:
            longest = min(key[0][0] for key, _, _ in found) * (1 + MAX_BLOCK_TIE)
            tied = [item for item in found if item[0][0][0] <= longest]
            return min(tied, key=lambda item: (item[1], item[0]))[2]
        return min(found, key=lambda item: item[0])[2]

    def candidates(self, free: IntArray, nodes: int) -> Iterator[tuple[IntArray, IntArray]]:
        """Distinct choices: (free nodes of the leaf zones that are compared, chosen nodes); shapes (leaves,)."""
        limit = self.leaves.block_size if self._block_rule else nodes
        if nodes <= limit and free.max() >= nodes:
            leaf = int(np.where(free >= nodes, free, self.leaves.nodes + 1).argmin())
            counts = np.zeros_like(free)
            counts[leaf] = nodes
            yield np.where(np.arange(len(free)) == leaf, free, 0), counts
            return
        seen: set[bytes] = set()
        for available in self._in_blocks(free, nodes, self._block_rule) if self._block_rule else \
                self._in_zones(free, nodes):
            for counts in self._quotas(available, nodes):
                if (key := counts.tobytes()) not in seen:
                    seen.add(key)
                    yield available, counts

    def _in_zones(self, free: IntArray, nodes: int) -> Iterator[IntArray]:
        """Free nodes of the tightest zones of each level with enough nodes, shape (leaves,); 0 outside."""
        total = np.concatenate([[0], np.cumsum(free)])
        below = total[self._high] - total[self._low]
        for zones in self._of_level:
            enough = zones[below[zones] >= nodes]
            for zone in enough[np.argsort(below[enough], kind="stable")][:self._zones_per_level].tolist():
                available = np.zeros_like(free)
                inside = slice(self._low[zone], self._high[zone])
                available[inside] = free[inside]
                yield available
        if self.rule is None and not (below >= nodes).any():
            yield free  # a past job may have used several roots

    def _in_blocks(self, free: IntArray, nodes: int, block_rule: SlurmBlockRule) -> Iterator[IntArray]:
        """Free nodes of the blocks that Slurm may use together, of the tightest aggregates; 0 outside."""
        rule, available = block_rule.rule(nodes), block_rule.available(free, nodes)
        enough = np.flatnonzero(available >= nodes)
        for aggregate in enough[np.argsort(available[enough], kind="stable")][:MAX_AGGREGATES].tolist():
            inside = np.zeros_like(free)
            span = slice(aggregate * rule.parent_blocks, (aggregate + 1) * rule.parent_blocks)
            parts = np.arange(len(free)) // rule.child_blocks
            sums = np.bincount(parts[span], free[span])
            kept = np.argsort(-sums, kind="stable")[:rule.max_children]
            inside[span] = np.where(np.isin(parts[span], kept), free[span], 0)
            if inside.sum() >= nodes:
                yield inside

    def _quotas(self, available: IntArray, nodes: int) -> Iterator[IntArray]:
        yield from zone_quotas(available, self._tie_break, nodes)
        if self._is_all_to_all and np.count_nonzero(available) > 1:
            quotas = self._all_to_all_quotas(available, nodes)
            if quotas.sum() == nodes:  # less if one zone must hold a majority
                yield quotas

    def _all_to_all_quotas(self, available: IntArray, nodes: int) -> IntArray:
        """Quotas of the shortest time in which each zone holds a minority of the job; a link with k of n nodes on
        one side carries k (n - k) messages each way."""
        # times in units of a message's bytes; the shortest one is limited by a node's own link
        low = (nodes - 1) / self.costs.scores.default_node_bandwidth
        high = nodes * nodes / 4 / float(self.costs.zone_bandwidth.min())
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
        bandwidth: FloatArray = np.append(self.costs.zone_bandwidth, np.inf)
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
