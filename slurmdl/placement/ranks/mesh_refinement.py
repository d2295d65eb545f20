"""Improve the rank maps of small meshes: swaps of whole nodes and of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.placement.arrays import IntArray
from slurmdl.placement.iteration_cost import NetworkLinks, predict_cost
from slurmdl.placement.phase import Phase
from slurmdl.placement.ranks.rank_swaps import swap_search

MAX_ALTERNATIONS = 2  # of swaps of nodes and of ranks


def refine_map(phases: Sequence[Phase], links: NetworkLinks, node_of_rank: IntArray, *, node_by_node: bool,
               keep_rank0: bool = False) -> IntArray:
    """Improve the node of each rank, shape (ranks,); never at a higher predicted cost.

    Nodes are swapped only if all have the same number of ranks.

    Args:
        node_by_node: the ranks of a node stay together.
        keep_rank0: rank 0 stays on its node.
    """
    def cost(candidate: IntArray) -> tuple[float, ...]:
        return predict_cost(phases, links, candidate).sort_key

    for _ in range(MAX_ALTERNATIONS):
        improved = _swap_nodes(phases, links, node_of_rank, keep_rank0)
        if not node_by_node:
            improved = swap_search(phases, links, improved, keep_rank0)
        if cost(improved) >= cost(node_of_rank):
            break
        node_of_rank = improved
    return node_of_rank


def _swap_nodes(phases: Sequence[Phase], links: NetworkLinks, node_of_rank: IntArray,
                keep_rank0: bool) -> IntArray:
    """Swap all ranks of nodes: the swap search for the traffic between the sets of ranks that share a node.

    The set with rank 0 comes first, as the search keeps the first one in its place.
    """
    used, block, counts = np.unique(node_of_rank, return_inverse=True, return_counts=True)
    if counts.min() != counts.max():
        return node_of_rank
    first = int(block[0])
    number = np.where(block == first, 0, np.where(block < first, block + 1, block))
    nodes = np.concatenate([used[first:first + 1], np.delete(used, first)])
    between = [Phase(number[phase.source], number[phase.target], phase.bytes_per_pair, phase.rounds)
               for phase in phases]
    return swap_search(between, links, nodes, keep_rank0)[number]
