"""Ranks onto the zone tree so that those that send each other much are close: recursive bisection.

The slots stand in depth-first order. They are cut at the border of zones that is highest and nearest to their
middle, the ranks are split accordingly, and both halves are cut again, down to the nodes. A split follows the
Fiedler vector of the ranks' traffic and is then improved by swaps.

Pothen, Simon, Liou: Partitioning sparse matrices with eigenvectors of graphs, SIAM J. Matrix Anal. Appl. 11, 1990.
Kernighan, Lin: An efficient heuristic procedure for partitioning graphs, Bell System Technical Journal 49, 1970.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.placement.iteration_cost import FloatArray, IntArray, NetworkLinks

#: most ranks whose eigenvectors are computed exactly
MAX_EXACT_RANKS = 384
#: steps of the iteration that approximates them where there are more
LANCZOS_STEPS = 64
#: eigenvectors of which each is tried for a split
FIEDLER_VECTORS = 2
#: swaps without a gain after which a pass of improvement ends
MAX_GAINLESS_SWAPS = 16
#: most passes of improvement
MAX_PASSES = 4
#: ranks of each half that a swap is chosen from
MAX_SWAP_CANDIDATES = 6


def bisection_order(flow: FloatArray, links: NetworkLinks, slots: IntArray) -> IntArray:
    """The rank of each slot.

    Parameters
    ----------
    flow : shape (ranks, ranks), symmetric, bytes between two ranks; the diagonal is 0.
    slots : shape (ranks,), the node of each slot, in depth-first order.
    """
    height = _border_heights(links, slots)
    ranks = np.arange(len(slots))
    parts = [(0, len(slots))]
    while parts:
        begin, end = parts.pop()
        inner = height[begin:end - 1]
        if not len(inner) or inner.max() < 0:
            continue
        borders = np.flatnonzero(inner == inner.max()) + 1
        cut = int(borders[np.abs(borders - len(inner) / 2).argmin()])
        here = ranks[begin:end]
        ranks[begin:end] = here[_split_ranks(flow[np.ix_(here, here)], cut)]
        parts += [(begin, begin + cut), (begin + cut, end)]
    return ranks


def _border_heights(links: NetworkLinks, slots: IntArray) -> IntArray:
    """Height of the border between each slot and the next: -1 inside a node, else how many levels of zones end."""
    here, after = slots[:-1], slots[1:]
    ending = (links.level_group[here] != links.level_group[after]).sum(axis=1)
    return np.where(here == after, -1, ending)


def _split_ranks(flow: FloatArray, cut: int) -> IntArray:
    """An order of the ranks of which the first `cut` belong together, and the others."""
    ways = []
    for line in np.argsort(_fiedler_vectors(flow), axis=1, kind="stable"):
        # either end of the line can be the first part
        for first in (line[:cut], line[len(line) - cut:])[:1 if 2 * cut == len(line) else 2]:
            other = np.ones(len(flow), bool)
            other[first] = False
            _kernighan_lin(flow, other)
            ways.append((float(flow[np.ix_(~other, other)].sum()), np.argsort(other, kind="stable")))
    return min(ways, key=lambda way: way[0])[1]


def _fiedler_vectors(flow: FloatArray) -> FloatArray:
    """Eigenvectors of the smallest eigenvalues of the Laplacian of the flow but the first; shape (VECTORS, ranks).

    Where the traffic has symmetries, as in a grid, these eigenvalues are alike, and any of the vectors may be best.
    """
    ranks = len(flow)
    degree = flow.sum(axis=1)
    if ranks <= MAX_EXACT_RANKS:
        laplacian = -flow
        laplacian[np.diag_indices(ranks)] = degree
        return np.asarray(np.linalg.eigh(laplacian)[1][:, 1:1 + FIEDLER_VECTORS].T)
    # Lanczos, orthogonal to the constant vector, all directions kept
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


def _kernighan_lin(flow: FloatArray, in_second_half: npt.NDArray[np.bool_]) -> None:
    """Swap ranks between the halves, in passes that go on past losses and keep their best moment."""
    ranks = len(flow)
    ends = min(MAX_SWAP_CANDIDATES, int(in_second_half.sum()), int((~in_second_half).sum()))
    for _ in range(MAX_PASSES):
        sign = np.where(in_second_half, -1.0, 1.0)
        # what is gained if a rank alone changed sides: its flow to the other half less that to its own
        gain = -sign * (flow @ sign)
        free = np.ones(ranks, bool)
        swaps: list[tuple[int, int]] = []
        total = best = 0.0
        kept = 0
        while len(swaps) - kept < MAX_GAINLESS_SWAPS:
            one, two = np.flatnonzero(free & ~in_second_half), np.flatnonzero(free & in_second_half)
            if not len(one) or not len(two):
                break
            one, two = (_largest_gains(gain, side, ends) for side in (one, two))
            pairs = gain[one][:, None] + gain[two] - 2 * flow[np.ix_(one, two)]
            row, column = divmod(int(pairs.argmax()), pairs.shape[1])
            a, b = int(one[row]), int(two[column])
            total += float(pairs[row, column])
            gain += 2 * sign * (flow[a] - flow[b])
            free[[a, b]] = False
            swaps.append((a, b))
            if total > best * (1 + 1e-12) + 1e-12:
                best, kept = total, len(swaps)
        for a, b in swaps[:kept]:
            in_second_half[a], in_second_half[b] = True, False
        if not kept:
            break


def _largest_gains(gain: FloatArray, among: IntArray, count: int) -> IntArray:
    if len(among) <= count:
        return among
    return np.asarray(among[np.argpartition(-gain[among], count - 1)[:count]])
