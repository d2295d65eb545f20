"""Recursive bisection: map ranks to the zone tree so that ranks with much traffic are close.

The depth-first list of slots is cut at the highest zone border nearest to its middle. The ranks are split
accordingly, and both halves are cut again, down to the nodes. A split follows the Fiedler vector of the traffic and
is improved by swaps.

Pothen, Simon, Liou: Partitioning sparse matrices with eigenvectors of graphs, SIAM J. Matrix Anal. Appl. 11, 1990.
Kernighan, Lin: An efficient heuristic procedure for partitioning graphs, Bell System Technical Journal 49, 1970.
"""

from __future__ import annotations

import numpy as np

from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray
from slurmdl.placement.iteration_cost import NetworkLinks

MAX_EXACT_RANKS = 384  # ranks whose eigenvectors are computed exactly
LANCZOS_STEPS = 64  # steps of the approximation for more ranks
FIEDLER_VECTORS = 2  # eigenvectors that are tried for a split
MAX_GAINLESS_SWAPS = 16  # swaps without a gain that end an improvement pass
MAX_PASSES = 4  # improvement passes
MAX_SWAP_CANDIDATES = 6  # ranks of each half among which a swap is chosen


def bisection_map(flow: FloatArray, links: NetworkLinks, slots: IntArray) -> IntArray:
    """Node of each rank, for the node of each slot in depth-first order, both of shape (ranks,).

    `flow` is the symmetric matrix of bytes between ranks, with a zero diagonal.
    """
    current, following = slots[:-1], slots[1:]
    # zone levels that end between each slot and the next; -1 inside a node
    ending = (links.level_group[current] != links.level_group[following]).sum(axis=1)
    height = np.where(current == following, -1, ending)
    order = np.arange(len(slots))
    ranges = [(0, len(slots))]
    while ranges:
        begin, end = ranges.pop()
        inner = height[begin:end - 1]
        if not len(inner) or inner.max() < 0:
            continue
        borders = np.flatnonzero(inner == inner.max()) + 1
        cut = int(borders[np.abs(borders - len(inner) / 2).argmin()])
        ranks = order[begin:end]
        order[begin:end] = ranks[_split_ranks(flow[np.ix_(ranks, ranks)], cut)]
        ranges += [(begin, begin + cut), (begin + cut, end)]
    node_of_rank = np.empty_like(slots)
    node_of_rank[order] = slots
    return node_of_rank


def _split_ranks(flow: FloatArray, cut: int) -> IntArray:
    """Order of the ranks whose first `cut` ranks send the least to the others."""
    splits = []
    for order in np.argsort(_fiedler_vectors(flow), axis=1, kind="stable"):
        # either end of the order can be the first part
        for first in (order[:cut], order[len(order) - cut:])[:1 if 2 * cut == len(order) else 2]:
            is_second = np.ones(len(flow), bool)
            is_second[first] = False
            _kernighan_lin(flow, is_second)
            cut_bytes = float(flow[np.ix_(~is_second, is_second)].sum())
            splits.append((cut_bytes, np.argsort(is_second, kind="stable")))
    return min(splits, key=lambda split: split[0])[1]


def _fiedler_vectors(flow: FloatArray) -> FloatArray:
    """Eigenvectors of the smallest nonzero eigenvalues of the Laplacian; shape (FIEDLER_VECTORS, ranks).

    If the traffic is symmetric, e.g. a grid, these eigenvalues are equal, and any of the vectors may be best.
    """
    ranks = len(flow)
    degree = flow.sum(axis=1)
    if ranks <= MAX_EXACT_RANKS:
        laplacian = -flow
        laplacian[np.diag_indices(ranks)] = degree
        return np.asarray(np.linalg.eigh(laplacian)[1][:, 1:1 + FIEDLER_VECTORS].T)
    # Lanczos iteration, orthogonal to the constant vector, with full reorthogonalization
    generator = np.random.default_rng(0)
    basis = np.empty((LANCZOS_STEPS, ranks))
    projected = np.zeros((LANCZOS_STEPS, LANCZOS_STEPS))
    vector = generator.standard_normal(ranks)
    for step in range(LANCZOS_STEPS):
        vector -= vector.mean()
        vector -= basis[:step].T @ (basis[:step] @ vector)
        norm = float(np.linalg.norm(vector))
        if norm <= 1e-9 * (1 + degree.max()):
            basis, projected = basis[:step], projected[:step, :step]
            break
        basis[step] = vector / norm
        vector = degree * basis[step] - flow @ basis[step]
        projected[:step + 1, step] = projected[step, :step + 1] = basis[:step + 1] @ vector
    return np.asarray(np.linalg.eigh(projected)[1][:, :FIEDLER_VECTORS].T @ basis)


def _kernighan_lin(flow: FloatArray, is_second: BoolArray) -> None:
    """Swap ranks between the halves in place; each pass continues past losses and keeps its best state."""
    ranks = len(flow)
    candidates = min(MAX_SWAP_CANDIDATES, int(is_second.sum()), int((~is_second).sum()))
    for _ in range(MAX_PASSES):
        sign = np.where(is_second, -1.0, 1.0)
        # gain if a rank changes sides alone: its flow to the other half minus its flow to its own half
        gain = -sign * (flow @ sign)
        is_free = np.ones(ranks, bool)
        swaps: list[tuple[int, int]] = []
        total = best = 0.0
        kept = 0
        while len(swaps) - kept < MAX_GAINLESS_SWAPS:
            sides = np.flatnonzero(is_free & ~is_second), np.flatnonzero(is_free & is_second)
            if not len(sides[0]) or not len(sides[1]):
                break
            first, second = (_largest_gains(gain, side, candidates) for side in sides)
            pair_gain = gain[first][:, None] + gain[second] - 2 * flow[np.ix_(first, second)]
            row, column = divmod(int(pair_gain.argmax()), pair_gain.shape[1])
            i, j = int(first[row]), int(second[column])
            total += float(pair_gain[row, column])
            gain += 2 * sign * (flow[i] - flow[j])
            is_free[[i, j]] = False
            swaps.append((i, j))
            if total > best * (1 + 1e-12) + 1e-12:
                best, kept = total, len(swaps)
        for i, j in swaps[:kept]:
            is_second[i], is_second[j] = True, False
        if not kept:
            break


def _largest_gains(gain: FloatArray, ranks: IntArray, count: int) -> IntArray:
    if len(ranks) <= count:
        return ranks
    return np.asarray(ranks[np.argpartition(-gain[ranks], count - 1)[:count]])
