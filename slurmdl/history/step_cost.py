"""Predicted communication time of a job from its number of nodes per leaf zone, by the cost model of placement."""

from __future__ import annotations

from typing import Any

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.history.leaves import Leaves
from slurmdl.history.trace import FloatArray, IntArray
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.traffic import Traffic

#: strategies whose time depends only on the number of nodes per zone, with one rank per node, by leaf
STRATEGIES = {"allreduce": "a ring", "gossip": "all to all"}


class StepCost:
    """Seconds of communication of one iteration, cached by the shape of an allocation.

    Every node has one rank, and ranks are numbered by leaf for any choice of nodes. So only the choice of nodes
    counts. Link scores are defaults: single links were not measured in the past of a trace.
    """

    def __init__(self, leaves: Leaves, strategy: str, model_bytes: float, scores: LinkScores) -> None:
        if strategy not in STRATEGIES:
            raise UsageError(f"--strategy {strategy}: expected {' or '.join(STRATEGIES)}")
        self.leaves, self.scores, self.traffic = leaves, scores, Traffic(strategy, model_bytes)
        topology = leaves.topology
        self.is_all_to_all = strategy == "gossip"
        self.node_bandwidth = scores.default_node_bandwidth
        self.zone_bandwidth: FloatArray = capacity.zone_uplinks(
            topology.zones, topology.level, topology.node_count, topology.uplink_bandwidth, scores)[0]
        kinds: dict[tuple[Any, ...], int] = {}
        #: number of each zone's kind: zones of one kind have the same uplink, level and parent's kind
        self._kind = [kinds.setdefault((float(bandwidth), int(level), int(nodes)), len(kinds)) for bandwidth, level,
                      nodes in zip(self.zone_bandwidth, topology.level, topology.node_count, strict=True)] + [-1]
        self._cache: dict[Any, tuple[float, float, float]] = {}

    def seconds(self, counts: IntArray) -> float:
        """Time on these nodes per leaf, shape (leaves,); 0 for a single node."""
        return self.sort_key(counts)[0]

    def sort_key(self, counts: IntArray) -> tuple[float, float, float]:
        """Time, bytes between zones and bytes between nodes: Cost.sort_key."""
        if counts.sum() < 2:
            return 0.0, 0.0, 0.0
        used = np.flatnonzero(counts)
        key = self._shape(used, counts[used])
        if key not in self._cache:
            begin = self.leaves.begin
            names = [name for leaf in used.tolist()
                     for name in self.leaves.names[begin[leaf]:begin[leaf] + counts[leaf]]]
            links = network_links(names, self.leaves.topology, self.scores)
            self._cache[key] = predict_cost(self.traffic.phases(len(names)), links, np.arange(len(names))).sort_key
        return self._cache[key]

    def _shape(self, used: IntArray, counts: IntArray) -> Any:
        """Nested, sorted node counts per zone, from the smallest zone that holds the job; equal for equal costs."""
        ancestors = self.leaves.ancestors[used]
        if ancestors.shape[1] <= 2 or len(used) == 1:
            kinds = [self._kind[zone] for zone in ancestors[:, 0].tolist()]
            return tuple(sorted(zip(kinds, counts.tolist(), strict=True)))
        below: dict[int, list[Any]] = {}
        current = [(zone, (self._kind[zone], count)) for zone, count in
                   zip(ancestors[:, 0].tolist(), counts.tolist(), strict=True)]
        parent = self.leaves.topology.parent
        level, levels = self.leaves.topology.level, int(self.leaves.topology.level.max())
        for height in range(levels + 1):
            if len(current) == 1:
                return current[0][1]
            below, rest = {}, []
            for zone, shape in current:
                above = int(parent[zone])
                if above >= 0 and level[above] == height + 1:
                    below.setdefault(above, []).append(shape)
                else:
                    rest.append((zone, shape))
            current = rest + [(zone, (self._kind[zone], *sorted(shapes, key=repr))) for zone, shapes in below.items()]
        return tuple(sorted((shape for _, shape in current), key=repr))
