"""The nodes to choose from and the zones above them, as arrays, with the capacity and delay of every link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import UsageError
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import run_starts, seeded_permutation, sorted_unique
from slurmdl.topology.topology import Topology

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: bits of a figure that count where figures are compared: rounding noise is no difference
_MANTISSA_BITS = 30


@dataclass(frozen=True, eq=False)
class ZoneLevel:
    """The zones of one height that have a zone above.

    Attributes
    ----------
    zones : indices of the zones, those below one zone side by side.
    begin : where the zones below each of `parents` begin in `zones`.
    """

    zones: IntArray
    parents: IntArray
    child_begin: IntArray


@dataclass(frozen=True, eq=False)
class CandidateNodes:
    """The nodes of a snapshot that can take tasks, and the zones above them, numbered anew.

    The nodes of any zone stand together; in a leaf the preferred come first: by Slurm's weight, then by capacity
    and delay of the link, then in the order of the snapshot or of the seed.

    Attributes
    ----------
    node : shape (nodes,), index in the snapshot.
    room : shape (nodes,), tasks that each can take.
    weight : shape (nodes,), Slurm's.
    node_capacity, zone_capacity : bytes/s.
    node_delay, zone_delay : seconds, one way.
    above : shape (nodes, depth), the zones above each node from the leaf upwards, -1 where there are no more.
    zone : shape (zones,), index in the topology; the last one is -1, for all trees together, where they are joined.
    parent, level : shape (zones,), as in the topology.
    begin, end : shape (zones,), the nodes of each zone are those from `begin` up to `end`.
    turn : shape (zones,), settles the order of equal zones.
    """

    snapshot_index: IntArray
    max_tasks: IntArray
    weight: IntArray
    node_capacity: FloatArray
    node_latency: FloatArray
    ancestors: IntArray
    topology_zone_index: IntArray
    zone_capacity: FloatArray
    zone_latency: FloatArray
    parent: IntArray
    level: IntArray
    node_begin: IntArray
    node_end: IntArray
    tie_break: IntArray

    @property
    def leaf(self) -> IntArray:
        """Shape (nodes,), the leaf zone of each node."""
        return self.ancestors[:, 0]

    @property
    def node_count(self) -> IntArray:
        """Shape (zones,), nodes below each zone."""
        return self.node_end - self.node_begin

    @cached_property
    def leaves(self) -> IntArray:
        """The zones that hold nodes themselves, in the order of the nodes."""
        return self.leaf[self.leaf_begin]

    @cached_property
    def leaf_begin(self) -> IntArray:
        """Where the nodes of each of `leaves` begin."""
        return run_starts(self.leaf)

    @cached_property
    def _leaf_class(self) -> IntArray | None:
        """Shape (zones,), equal for leaves below one zone with equal uplinks; None where nodes differ."""
        figures = (self.node_capacity, self.node_latency, self.max_tasks, self.weight)
        if any((figure != figure[0]).any() for figure in figures):
            return None
        keys = np.stack([self.parent.astype(float), self.zone_capacity, self.zone_latency])
        order = np.lexsort(keys)
        kind = np.empty(len(order), np.int64)
        kind[order] = np.cumsum(np.append(0, (np.diff(keys[:, order], axis=1) != 0).any(axis=0)))
        return kind

    def choice_signature(self, nodes: IntArray) -> bytes:
        """Equal for choices that no figure tells apart: the same nodes, or as many of leaves that are alike.

        Parameters
        ----------
        nodes : indices in the pool.
        """
        if self._leaf_class is None:
            return np.sort(nodes).tobytes()
        count = np.bincount(self.leaf[nodes], minlength=len(self.topology_zone_index))
        used = np.flatnonzero(count)
        return np.sort(self._leaf_class[used] * (len(self.snapshot_index) + 1) + count[used]).tobytes()

    @cached_property
    def levels(self) -> tuple[ZoneLevel, ...]:
        """The zones height by height, the lowest first, without the roots."""
        found = []
        for height in range(int(self.level.max(initial=0))):
            zones = np.flatnonzero((self.level == height) & (self.parent >= 0))
            zones = zones[np.argsort(self.parent[zones], kind="stable")]
            if len(zones):
                begin = run_starts(self.parent[zones])
                found.append(ZoneLevel(zones, self.parent[zones[begin]], begin))
        return tuple(found)

    def nodes_below(self, zone: int) -> slice:
        return slice(int(self.node_begin[zone]), int(self.node_end[zone]))

    def sum_per_leaf(self, values: npt.NDArray[np.generic]) -> IntArray:
        """Sums over the nodes of each zone that holds nodes itself: (..., nodes) -> (..., zones)."""
        total = np.zeros((*values.shape[:-1], len(self.topology_zone_index)), np.int64)
        if len(self.snapshot_index):
            total[..., self.leaves] = np.add.reduceat(values, self.leaf_begin, axis=-1, dtype=np.int64)
        return total


def round_mantissa(values: FloatArray) -> FloatArray:
    """The figures without rounding noise."""
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(fraction * 2.0**_MANTISSA_BITS), exponent - _MANTISSA_BITS))


def nodes_in_zones(topology: Topology, zones: Sequence[str]) -> BoolArray:
    """Which nodes lie below one of the named zones, of any level; shape (nodes,).

    Raises
    ------
    UsageError : a zone that the topology does not have.
    """
    for zone in zones:
        if zone not in topology.zone_index:
            shown = ", ".join(topology.zones[:16]) + (", ..." if len(topology.zones) > 16 else "")
            raise UsageError(f"--dl-zone={zone}: no such zone; valid: {shown}")
    if not zones:
        return np.asarray(topology.leaf >= 0)
    inside = np.zeros(len(topology.nodes), bool)
    for zone in zones:
        inside |= topology.mask_below(topology.zone_index[zone])
    return inside


def topology_index(cluster: ClusterSnapshot, topology: Topology) -> IntArray:
    """Index in the topology of each node of the snapshot, -1 where it does not know the node; shape (nodes,)."""
    if cluster.names == topology.nodes:
        return np.arange(len(topology.nodes))
    found = map(topology.node_index.get, cluster.names, repeat(-1))
    return np.fromiter(found, np.int64, len(cluster.names))


def snapshot_nodes_in_zones(cluster: ClusterSnapshot, topology: Topology, zones: Sequence[str]) -> BoolArray:
    """Which nodes of the snapshot lie below one of the named zones, see `allowed`; shape (nodes,)."""
    return np.asarray(np.append(nodes_in_zones(topology, zones), False)[topology_index(cluster, topology)])


def build_candidate_nodes(cluster: ClusterSnapshot, topology: Topology, scores: LinkScores, max_tasks: IntArray,
         zones: Sequence[str] = (), join_trees: bool = False, seed: int = 0) -> CandidateNodes:
    """The nodes with room, below the named zones.

    Parameters
    ----------
    room : shape (nodes of the snapshot,), tasks that each node can take.
    joined : a zone over all trees, for jobs that may span them.
    seed : settles the order of equal nodes and zones; 0 for that of the snapshot and the topology.

    Raises
    ------
    UsageError : a zone that the topology does not have.
    """
    node = np.flatnonzero((max_tasks > 0) & snapshot_nodes_in_zones(cluster, topology, zones))
    where = topology_index(cluster, topology)[node]
    names = [cluster.names[i] for i in node.tolist()]
    speed, delay = capacity.node_links(names, scores)
    weight = cluster.weight[node]
    order = np.lexsort((seeded_permutation(len(node), seed), delay, -speed,
                       weight, topology.node_begin[topology.leaf[where]]))
    node, where = node[order], where[order]
    above = topology.ancestors(where)
    used = np.zeros(len(topology.zones), bool)
    used[above[above >= 0]] = True
    zone = np.flatnonzero(used)
    number = np.full(len(topology.zones) + 1, -1, np.int64)
    number[zone] = np.arange(len(zone))
    zone_speed, zone_delay = capacity.zone_uplinks([topology.zones[i] for i in zone.tolist()], topology.level[zone],
                                                   topology.node_count[zone], topology.uplink_bandwidth[zone], scores)
    above = number[above]
    begin = np.searchsorted(topology.node_begin[topology.leaf[where]], topology.node_begin[zone])
    end = begin + np.bincount(above[above >= 0], minlength=len(zone))
    parent, level = number[topology.parent[zone]], topology.level[zone].astype(np.int64)
    if join_trees and (parent < 0).sum() > 1:
        top = len(zone)
        parent = np.append(np.where(parent < 0, top, parent), -1)
        level = np.append(level, level.max() + 1)
        zone, begin, end = np.append(zone, -1), np.append(begin, 0), np.append(end, len(node))
        zone_speed, zone_delay = np.append(zone_speed, np.inf), np.append(zone_delay, 0.0)
        depth = (above >= 0).sum(axis=1)
        above = np.column_stack([above, np.full(len(node), -1)])
        above[np.arange(len(node)), depth] = top
    return CandidateNodes(node, max_tasks[node], weight[order], speed[order], delay[order], above, zone, zone_speed, zone_delay,
                parent, level, begin, end, seeded_permutation(len(zone), seed))


def subset(pool: CandidateNodes, nodes: IntArray, top: int) -> CandidateNodes:
    """Some of the nodes below one zone, and no zone above it.

    Parameters
    ----------
    nodes : indices in the pool, ascending.
    """
    above = np.where(pool.level[pool.ancestors[nodes]] <= pool.level[top], pool.ancestors[nodes], -1)
    used = sorted_unique(above[above >= 0])
    number = np.full(len(pool.topology_zone_index) + 1, -1, np.int64)
    number[used] = np.arange(len(used))
    above = number[above]
    begin = np.full(len(used), len(nodes))
    for column in above.T[::-1]:
        inside = column >= 0
        np.minimum.at(begin, column[inside], np.flatnonzero(inside))
    end = begin + np.bincount(above[above >= 0], minlength=len(used))
    return CandidateNodes(pool.snapshot_index[nodes], pool.max_tasks[nodes], pool.weight[nodes], pool.node_capacity[nodes],
                pool.node_latency[nodes], above, pool.topology_zone_index[used], pool.zone_capacity[used], pool.zone_latency[used],
                number[pool.parent[used]], pool.level[used], begin, end, pool.tie_break[used])
