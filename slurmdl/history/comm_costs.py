"""Predicted communication time of jobs, by the cost model of placement; one prediction for all jobs of equal load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.history.accounting import Int32Array
from slurmdl.history.job_nodes import LeafZones
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.traffic import Traffic

#: strategies whose time follows from the nodes, with one rank per node, and what is assumed of them
STRATEGIES = {"allreduce": "ring allreduce, ranks in the order of the node list, as by Slurm up to 25.11",
              "gossip": "random partners, as dense as all-to-all traffic"}

#: leaf zones, ascending, and the number of nodes in each
NodeCounts = tuple[tuple[int, ...], tuple[int, ...]]
#: time per strategy
Seconds = tuple[float, ...]
_Loads = tuple[tuple[int, int], ...]


class CommCosts:
    """Seconds of communication of one iteration of each strategy.

    One rank runs on each node, and all node links are equal: link scores of today say nothing about past jobs. So the
    time depends only on the busiest uplink of each kind: the one that a ring crosses most often, or that halves the
    nodes best.
    """

    def __init__(self, leaves: LeafZones, scores: LinkScores, strategies: Sequence[str], model_bytes: float) -> None:
        for strategy in strategies:
            if strategy not in STRATEGIES:
                raise UsageError(f"--strategy {strategy}: not supported; expected {' or '.join(STRATEGIES)}")
        self.leaves, self.scores = leaves, scores
        self.traffic = {strategy: Traffic(strategy, model_bytes) for strategy in strategies}
        topology = leaves.topology
        bandwidth = capacity.zone_uplinks(topology.zones, topology.level, topology.node_count,
                                          topology.uplink_bandwidth, scores)[0]
        kinds: dict[tuple[float, int], int] = {}
        #: number of each zone's kind: zones of one kind have equal uplinks
        self._kind = [kinds.setdefault(pair, len(kinds))
                      for pair in zip(bandwidth.tolist(), topology.level.tolist(), strict=True)]
        #: zones above each leaf zone, itself included; without an only root, whose uplink no message uses
        has_one_root = int((topology.parent < 0).sum()) == 1
        self._path = [tuple(topology.zone_index[name] for name in topology.zone_path(zone)[has_one_root:])
                      for zone in leaves.zones.tolist()]
        self._above = [path[:-1] for path in self._path]
        self._leaf_zone = leaves.zones.tolist()
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

    def of_counts(self, nodes: NodeCounts) -> Seconds:
        """Time with ranks in leaf order."""
        leaves, counts = nodes
        total, above, largest = sum(counts), self._above, dict[int, int]()
        # of equal leaf uplinks, the one with most nodes divides the job best
        at_leaves = ((leaves[0], max(counts)),) if self._has_equal_leaves else zip(leaves, counts, strict=True)
        below: dict[int, int] = {}
        for leaf, count in zip(leaves, counts, strict=True):
            for zone in above[leaf]:
                below[zone] = below.get(zone, 0) + count
        for zone, count in (*((self._leaf_zone[leaf], count) for leaf, count in at_leaves), *below.items()):
            load = count if 2 * count <= total else total - count
            kind = self._kind[zone]
            if load > largest.get(kind, 0):
                largest[kind] = load
        loads = tuple(sorted(largest.items()))
        # a network inside leaf zones carries the traffic of the largest share, the node links that of the smallest
        key = (total, *((min(counts), max(counts)) if self.scores.default_leaf_bandwidth else (0, 0)), loads)
        if key not in self._leaf_order:
            numbers = np.concatenate([np.arange(self.leaves.begin[leaf], self.leaves.begin[leaf] + count)
                                      for leaf, count in zip(leaves, counts, strict=True)])
            # in leaf order a ring leaves each zone once
            once = tuple((kind, 1) for kind, _ in loads)
            self._leaf_order[key] = tuple(
                self._ring_seconds((total, max(counts) > 1, once), numbers) if strategy == "allreduce"
                else self._predict(strategy, numbers) for strategy in self.traffic)
        return self._leaf_order[key]

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
        topology = self.leaves.topology
        names = [topology.nodes[index] for index in self.leaves.order[numbers].tolist()]
        links = network_links(names, topology, self.scores)
        return predict_cost(self.traffic[strategy].phases(len(names)), links, np.arange(len(names))).seconds
