"""The links of a job's nodes as SimGrid's platform: zones, capacities and delays are those of the cost model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.placement.cost import FloatArray, IntArray, NetworkLinks


class SimulatedNetwork:
    """Ways between nodes: up from the leaf zone to the lowest common zone, and down again.

    A node's link and a zone's uplink carry their capacity in each direction. A slow way between two leaf zones
    (cost.Trunks) is a further link on it. Nodes without a zone are joined by their own links alone.

    Attributes
    ----------
    leaf : shape (nodes,), number of each node's leaf zone, counted over those that have a node.
    """

    def __init__(self, links: NetworkLinks) -> None:
        self._links = links
        zones, first, leaf = np.unique(links.leaf, return_index=True, return_inverse=True)
        self.leaf: IntArray = leaf.astype(np.int64)
        self._ancestors = [[zone for zone in row if zone >= 0] for row in links.ancestors[first].tolist()]
        number = {zone: place for place, zone in enumerate(zones.tolist())}
        self._inter_leaf = {frozenset(number[end] for end in ends): (trunk, number[ends[0]])
                        for trunk, ends in enumerate(links.slow_paths.leaf_pairs.tolist())}
        self._leaf_latencies: dict[tuple[int, int], float] = {}

    def latency(self, source: IntArray, target: IntArray) -> FloatArray:
        """Seconds one way from node to node, 0 inside a node; source and target broadcast against each other."""
        source, target = np.broadcast_arrays(source, target)
        count = len(self._ancestors)
        pairs, which = np.unique(self.leaf[source] * count + self.leaf[target], return_inverse=True)
        between = np.array([self._leaf_latency(int(pair) // count, int(pair) % count) for pair in pairs])
        node = self._links.node_latency
        return np.asarray(np.where(source == target, 0.0,
                                   node[source] + node[target] + between[which].reshape(source.shape)))

    def _leaf_latency(self, left: int, right: int) -> float:
        """Seconds one way from leaf zone to leaf zone."""
        if (left, right) not in self._leaf_latencies:
            up, down = self._uplinks_on_path(left, right)
            usual = float(self._links.zone_latency[up + down].sum())
            trunk = self._inter_leaf.get(frozenset((left, right)))
            slow = float(self._links.slow_paths.latency[trunk[0]]) if trunk and left != right else 0.0
            self._leaf_latencies[left, right] = max(usual, slow)
        return self._leaf_latencies[left, right]

    def _uplinks_on_path(self, left: int, right: int) -> tuple[list[int], list[int]]:
        """Zones whose uplinks are passed upwards, and then downwards, in this order."""
        here, there = self._ancestors[left], self._ancestors[right]
        return ([zone for zone in here if zone not in there],
                [zone for zone in reversed(there) if zone not in here])

    def _route(self, left: int, right: int) -> list[int]:
        """The links from leaf zone to leaf zone as `engine` counts them."""
        nodes, zones = len(self._links.nodes), len(self._links.zones)
        up, down = self._uplinks_on_path(left, right)
        way = [2 * (nodes + zone) for zone in up]
        if trunk := self._inter_leaf.get(frozenset((left, right))):
            way.append(2 * (nodes + zones + trunk[0]) + (trunk[1] != left))
        return way + [2 * (nodes + zone) + 1 for zone in down]

    def platform_spec(self, pairs: Iterable[tuple[int, int]], multiplicity: npt.ArrayLike = 1) -> dict[str, Any]:
        """The platform as `engine` reads it, with ways for all messages between these pairs of nodes.

        Parameters
        ----------
        times : shape (nodes,), how many nodes each stands for.
        """
        links = self._links
        capacity = np.concatenate([links.node_capacity * np.asarray(multiplicity), links.zone_capacity,
                                   links.slow_paths.capacity])
        leaves = {(min(ends), max(ends)) for ends in {(int(self.leaf[one]), int(self.leaf[other]))
                                                      for one, other in pairs}}
        return {"links": capacity.tolist(), "zones": len(self._ancestors),
                "hosts": [[leaf, node] for node, leaf in enumerate(self.leaf.tolist())],
                "ways": [[one, other, self._route(one, other)] for one, other in sorted(leaves) if one != other]}
