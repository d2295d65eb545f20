"""Base blocks that Slurm's topology/block gives to a job without segments.

Slurm looks for an aggregate of the smallest configured size that can hold the job, and inside it uses no more of the
next smaller aggregates than the job needs: a job that fits a base block never spans two, even if no base block is
free (_get_block_level and eval_nodes_block in src/plugins/topology/block/eval_nodes_block.c, Slurm 24.11 and 26.05).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurmdl.placement.arrays import IntArray, sorted_unique
from slurmdl.topology.source import level_multiples
from slurmdl.topology.topology import Topology


@dataclass(frozen=True)
class BlockRule:
    """Limits for one job.

    Attributes:
        aggregate: base blocks of the aggregate that must hold the job; aggregates begin at multiples of it.
        part: base blocks of the next smaller aggregate.
        max_parts: number of these that the job may use.
    """

    aggregate: int
    part: int
    max_parts: int

    def allows(self, blocks: IntArray) -> bool:
        """Whether a job may have nodes in these base blocks, by their position in the topology."""
        parts = sorted_unique(blocks // self.part)
        return len(sorted_unique(blocks // self.aggregate)) == 1 and len(parts) <= self.max_parts


def block_rule(topology: Topology, nodes: int) -> BlockRule:
    """The rule for a job of this number of nodes, on a topology of blocks."""
    base = np.flatnonzero(topology.level == 0)
    size = topology.block_sizes[0] if topology.block_sizes else int(topology.node_count[base[0]])
    needed = -(-nodes // size)
    configured = (1, *level_multiples(topology.block_sizes))
    aggregate = next((multiple for multiple in configured if multiple >= needed), len(base))
    part = max((multiple for multiple in configured if multiple < needed), default=1)
    max_parts = -(-nodes // (part * size))
    if aggregate != part * max_parts:
        max_parts = min(max_parts, aggregate // part)  # as in Slurm, 0 parts if the last aggregate is incomplete
    return BlockRule(aggregate, part, max_parts)
