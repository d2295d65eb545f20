"""Slurm's limits on the nodes of one job: --segment, --switches, --exclusive=topo, and the rule of topology/block.

Slurm looks for an aggregate of base blocks of the smallest configured size that can hold a job without segments, and
inside it uses no more of the next smaller aggregates than the job needs: a job that fits a base block never spans
two, even if no base block is free (_get_block_level and eval_nodes_block in
src/plugins/topology/block/eval_nodes_block.c, Slurm 24.11 and 26.05).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.placement.arrays import BoolArray, IntArray, sorted_unique
from slurmdl.placement.candidate_nodes import CandidateNodes, topology_index
from slurmdl.text import pluralize
from slurmdl.topology.source import level_multiples
from slurmdl.topology.topology import Topology


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
        has_rule = is_block and not segment and request.dl.node_binding != "zone"
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
