"""Candidate nodes of a job and the zones above them as arrays, and Slurm's limits on a choice of them.

The limits are --segment, --switches, --exclusive=topo, and the rule of topology/block. Slurm looks for an aggregate
of base blocks of the smallest configured size that can hold a job without segments, and inside it uses no more of the
next smaller aggregates than the job needs: a job that fits a base block never spans two, even if no base block is
free (_get_block_level and eval_nodes_block in src/plugins/topology/block/eval_nodes_block.c, Slurm 24.11 and 26.05).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np
import numpy.typing as npt

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import PlacementError, UsageError
from slurmdl.job_request import JobRequest
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import (
    BoolArray,
    FloatArray,
    IntArray,
    new_indices,
    run_starts,
    seeded_permutation,
    sorted_unique,
)
from slurmdl.placement.iteration_cost import zone_links
from slurmdl.text import pluralize, sample_names
from slurmdl.topology.source import level_multiples
from slurmdl.topology.topology import Topology

MAX_NAMED_ZONES = 16  # valid zones named in an error message


@dataclass(frozen=True, eq=False)
class ZoneLevel:
    """Zones of one level, grouped by their parents; `child_begin` is the index of the first child of each parent."""

    zones: IntArray
    parents: IntArray
    child_begin: IntArray


@dataclass(frozen=True, eq=False)
class CandidateNodes:
    """Candidate nodes and the zones above them, with indices of their own.

    The nodes of any zone are contiguous. In a leaf they are sorted by Slurm's weight, capacity and latency of the
    link, then by snapshot order or seed.

    Attributes:
        snapshot_index, max_tasks, weight: shape (nodes,); `weight` is Slurm's.
        node_capacity, zone_capacity: bytes/s of the node links and of the zone uplinks.
        leaf_bandwidth: bytes/s between the nodes of a leaf zone over a network of its own; 0 without one.
        node_latency, zone_latency: seconds, one-way.
        ancestors: shape (nodes, depth), zones above each node from the leaf upwards, padded with -1.
        topology_zone_index: shape (zones,); -1 for the zone that joins all trees, always the last one.
        parent, level: shape (zones,), as in the topology.
        node_begin, node_end: shape (zones,), range of the nodes of each zone.
        tie_break: shape (zones,), order of equal zones.
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
    leaf_bandwidth: float = 0.0

    @property
    def zone_count(self) -> int:
        return len(self.topology_zone_index)

    @property
    def leaf(self) -> IntArray:
        """Leaf zone of each node; shape (nodes,)."""
        return self.ancestors[:, 0]

    @property
    def node_count(self) -> IntArray:
        """Number of nodes below each zone; shape (zones,)."""
        return self.node_end - self.node_begin

    @cached_property
    def leaves(self) -> IntArray:
        """The zones that hold nodes themselves, in node order."""
        return self.leaf[self.leaf_begin]

    @cached_property
    def leaf_begin(self) -> IntArray:
        """First node of each of `leaves`."""
        return run_starts(self.leaf)

    @cached_property
    def levels(self) -> tuple[ZoneLevel, ...]:
        """The levels from the lowest to the highest, without the roots."""
        levels = []
        for height in range(int(self.level.max(initial=0))):
            zones = np.flatnonzero((self.level == height) & (self.parent >= 0))
            zones = zones[np.argsort(self.parent[zones], kind="stable")]
            if len(zones):
                begin = run_starts(self.parent[zones])
                levels.append(ZoneLevel(zones, self.parent[zones[begin]], begin))
        return tuple(levels)

    @cached_property
    def _leaf_class(self) -> IntArray | None:
        """Shape (zones,), equal for siblings with equal uplinks; None if nodes differ."""
        node_values = (self.node_capacity, self.node_latency, self.max_tasks, self.weight)
        if any((values != values[0]).any() for values in node_values):
            return None
        keys = np.stack([self.parent.astype(float), self.zone_capacity, self.zone_latency])
        order = np.lexsort(keys)
        classes = np.empty(len(order), np.int64)
        classes[order] = np.cumsum(np.append(0, (np.diff(keys[:, order], axis=1) != 0).any(axis=0)))
        return classes

    def choice_signature(self, nodes: IntArray) -> bytes:
        """Signature of a choice; equal for the same nodes and for equal counts in leaves of one class."""
        if self._leaf_class is None:
            return np.sort(nodes).tobytes()
        count = np.bincount(self.leaf[nodes], minlength=self.zone_count)
        used = np.flatnonzero(count)
        return np.sort(self._leaf_class[used] * (len(self.snapshot_index) + 1) + count[used]).tobytes()

    def nodes_below(self, zone: int) -> slice:
        return slice(int(self.node_begin[zone]), int(self.node_end[zone]))

    def sum_per_leaf(self, values: npt.NDArray[np.generic]) -> IntArray:
        """Sum over the nodes of each leaf zone, 0 for other zones: (..., nodes) -> (..., zones)."""
        total = np.zeros((*values.shape[:-1], self.zone_count), np.int64)
        if len(self.snapshot_index):
            total[..., self.leaves] = np.add.reduceat(values, self.leaf_begin, axis=-1, dtype=np.int64)
        return total


def nodes_in_zones(topology: Topology, zones: Sequence[str]) -> BoolArray:
    """Mask of the topology's nodes below any named zone, or in any zone if none is named; UsageError if unknown."""
    if not zones:
        return np.asarray(topology.leaf >= 0)
    inside = np.zeros(len(topology.nodes), bool)
    for zone in zones:
        if zone not in topology.zone_index:
            valid = sample_names(topology.zones, MAX_NAMED_ZONES)
            raise UsageError(f"--dl-zone={zone}: no such zone; expected one of {valid}")
        inside[topology.indices_below(topology.zone_index[zone])] = True
    return inside


def topology_index(cluster: ClusterSnapshot, topology: Topology) -> IntArray:
    """Topology index of each node of the snapshot, -1 if unknown; shape (nodes of the snapshot,)."""
    if cluster.names == topology.nodes:
        return np.arange(len(topology.nodes))
    indices = map(topology.node_index.get, cluster.names, repeat(-1))
    return np.fromiter(indices, np.int64, len(cluster.names))


def snapshot_nodes_in_zones(cluster: ClusterSnapshot, topology: Topology, zones: Sequence[str]) -> BoolArray:
    """Like `nodes_in_zones`, for the nodes of the snapshot."""
    return np.asarray(np.append(nodes_in_zones(topology, zones), False)[topology_index(cluster, topology)])


def build_candidate_nodes(request: JobRequest, cluster: ClusterSnapshot, topology: Topology, scores: LinkScores,
                          max_tasks: IntArray) -> CandidateNodes:
    """The nodes that can take tasks, restricted to the zones of the request.

    Trees are joined below one zone if the job may span them: Slurm joins no switch trees.
    `max_tasks` gives the tasks that each node of the snapshot can take. Raises UsageError for an unknown zone.
    """
    snapshot = np.flatnonzero((max_tasks > 0) & snapshot_nodes_in_zones(cluster, topology, request.options.zone))
    nodes = topology_index(cluster, topology)[snapshot]
    bandwidth, latency = capacity.node_links([cluster.names[i] for i in snapshot.tolist()], scores)
    weight = cluster.weight[snapshot]
    order = np.lexsort((seeded_permutation(len(snapshot), request.seed), latency, -bandwidth, weight,
                        topology.node_begin[topology.leaf[nodes]]))
    snapshot, nodes = snapshot[order], nodes[order]
    ancestors = topology.ancestors(nodes)
    zones, index, zone_bandwidth, zone_latency = zone_links(ancestors, topology, scores)
    ancestors = index[ancestors]
    begin = np.searchsorted(topology.node_begin[topology.leaf[nodes]], topology.node_begin[zones])
    end = begin + np.bincount(ancestors[ancestors >= 0], minlength=len(zones))
    parent, level = index[topology.parent[zones]], topology.level[zones].astype(np.int64)
    if topology.kind != "tree" and (parent < 0).sum() > 1:
        top = len(zones)
        parent = np.append(np.where(parent < 0, top, parent), -1)
        level = np.append(level, level.max() + 1)
        zones, begin, end = np.append(zones, -1), np.append(begin, 0), np.append(end, len(nodes))
        zone_bandwidth, zone_latency = np.append(zone_bandwidth, np.inf), np.append(zone_latency, 0.0)
        depth = (ancestors >= 0).sum(axis=1)
        ancestors = np.column_stack([ancestors, np.full(len(nodes), -1)])
        ancestors[np.arange(len(nodes)), depth] = top
    return CandidateNodes(snapshot, max_tasks[snapshot], weight[order], bandwidth[order], latency[order], ancestors,
                          zones, zone_bandwidth, zone_latency, parent, level, begin, end,
                          seeded_permutation(len(zones), request.seed), scores.default_leaf_bandwidth)


def subset(every: CandidateNodes, nodes: IntArray, top: int) -> CandidateNodes:
    """The candidate nodes with these ascending indices, below zone `top`, without the zones above it."""
    ancestors = every.ancestors[nodes]
    ancestors = np.where(every.level[ancestors] <= every.level[top], ancestors, -1)
    used = sorted_unique(ancestors[ancestors >= 0])
    index = new_indices(used, every.zone_count)
    begin, end = np.searchsorted(nodes, every.node_begin[used]), np.searchsorted(nodes, every.node_end[used])
    return CandidateNodes(every.snapshot_index[nodes], every.max_tasks[nodes], every.weight[nodes],
                          every.node_capacity[nodes], every.node_latency[nodes], index[ancestors],
                          every.topology_zone_index[used], every.zone_capacity[used], every.zone_latency[used],
                          index[every.parent[used]], every.level[used], begin, end, every.tie_break[used],
                          every.leaf_bandwidth)


@dataclass(frozen=True)
class BlockRule:
    """Limits for one job.

    Attributes:
        parent_blocks: base blocks of the aggregate that must hold the job; aggregates begin at multiples of it.
        child_blocks: base blocks of the next smaller aggregate.
        max_children: number of these that the job may use.
    """

    parent_blocks: int
    child_blocks: int
    max_children: int

    def allows(self, blocks: IntArray) -> bool:
        """Whether a job may have nodes in these base blocks, by their position in the topology."""
        children = sorted_unique(blocks // self.child_blocks)
        return len(sorted_unique(blocks // self.parent_blocks)) == 1 and len(children) <= self.max_children


def block_rule(topology: Topology, nodes: int) -> BlockRule:
    """The rule for a job of this number of nodes, on a topology of blocks."""
    base = np.flatnonzero(topology.level == 0)
    size = topology.block_sizes[0] if topology.block_sizes else int(topology.node_count[base[0]])
    needed = -(-nodes // size)
    configured = (1, *level_multiples(topology.block_sizes))
    parent = next((multiple for multiple in configured if multiple >= needed), len(base))
    child = max((multiple for multiple in configured if multiple < needed), default=1)
    max_children = -(-nodes // (child * size))
    if parent != child * max_children:
        max_children = min(max_children, parent // child)  # as in Slurm, 0 if the last aggregate is incomplete
    return BlockRule(parent, child, max_children)


@dataclass(frozen=True)
class SlurmLimits:
    """Limits on the nodes of one job.

    Attributes:
        segment: nodes of each segment that must share a leaf zone; 0 without segments, which only blocks have.
        switches: most leaf zones; 0 for any number.
        block_rule: rule for jobs without segments on blocks; None if it does not apply.
        block_number: position of each base block among them; shape (zones of the topology,).
    """

    segment: int
    switches: int
    block_rule: BlockRule | None
    block_number: IntArray

    @classmethod
    def of_job(cls, request: JobRequest, topology: Topology, nodes: int) -> SlurmLimits:
        """Limits of a job with this number of nodes; PlacementError if no allocation can consist of its segments.

        With --dl-node-binding=zone a job on blocks gets the segments of the choice.
        """
        is_block = topology.kind == "block"
        segment = request.segment if is_block and request.segment <= nodes else 0  # Slurm ignores larger segments
        if segment and nodes % segment:
            valid = ", ".join(str(size) for size in range(1, nodes + 1) if nodes % size == 0)
            raise PlacementError(f"--segment={segment} does not divide {pluralize(nodes, 'node')}; expected {valid}")
        if segment and segment > (largest := int(np.bincount(topology.leaf[topology.leaf >= 0]).max())):
            raise PlacementError(f"--segment={segment}: the largest block has {pluralize(largest, 'node')}")
        has_rule = is_block and not segment and request.options.node_binding != "zone"
        return cls(segment, request.switches, block_rule(topology, nodes) if has_rule else None,
                   np.cumsum(topology.level == 0) - 1)

    def __str__(self) -> str:
        return f"--segment={self.segment}" if self.segment else f"--switches={self.switches}" if self.switches \
            else "topology/block without --segment"

    def allows(self, candidates: CandidateNodes, nodes: IntArray) -> bool:
        """Whether a job may have these nodes, indices of candidates."""
        counts = np.bincount(candidates.leaf[nodes])
        used = np.flatnonzero(counts)
        if (self.segment and (counts % self.segment).any()) or 0 < self.switches < len(used):
            return False
        blocks = self.block_number[candidates.topology_zone_index[used]]
        return self.block_rule is None or self.block_rule.allows(blocks)


def in_idle_leaf(cluster: ClusterSnapshot, topology: Topology) -> BoolArray:
    """Whether no node of a node's leaf zone runs anything; shape (nodes of the snapshot,)."""
    index = topology_index(cluster, topology)
    leaf = np.append(topology.leaf, -1)[index]
    is_busy = cluster.cpus_unallocated < cluster.cpus
    return np.asarray(~np.isin(leaf, leaf[is_busy & (leaf >= 0)]))
