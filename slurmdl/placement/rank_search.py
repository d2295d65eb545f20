"""Rank maps for traffic without a rule: swaps that reduce the predicted time, and recursive bisection.

Swaps. The time of a phase is the time of its busiest link. Swaps reduce a norm of all link times instead (the sum,
then higher powers, which approximate the maximum), because a norm shows for every link whether a swap helps.

Recursive bisection. Map ranks to the zone tree so that ranks with much traffic are close.

The depth-first list of slots is cut at the highest zone border nearest to its middle. The ranks are split
accordingly, and both halves are cut again, down to the nodes. A split follows the Fiedler vector of the traffic and
is improved by swaps.

Pothen, Simon, Liou: Partitioning sparse matrices with eigenvectors of graphs, SIAM J. Matrix Anal. Appl. 11, 1990.
Kernighan, Lin: An efficient heuristic procedure for partitioning graphs, Bell System Technical Journal 49, 1970.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray
from slurmdl.placement.iteration_cost import NetworkLinks, predict_cost
from slurmdl.traffic import Phase

MAX_ARRAY_ELEMENTS = 2**22  # phases x links x ranks
NORM_POWERS = (1, 4, 16)  # powers of the norm, in this order
MAX_ROUNDS = 512  # rounds of swaps
MAX_PAIRS = 2**25  # pairs of ranks that are evaluated in all rounds
MAX_SWAPS_PER_ROUND = 64
MAX_ALTERNATIONS = 2  # of swaps of nodes and of ranks
MAX_EXACT_RANKS = 384  # ranks whose eigenvectors are computed exactly
LANCZOS_STEPS = 64  # steps of the approximation for more ranks
FIEDLER_VECTORS = 2  # eigenvectors that are tried for a split
MAX_GAINLESS_SWAPS = 16  # swaps without a gain that end an improvement pass
MAX_PASSES = 4  # improvement passes
MAX_SWAP_CANDIDATES = 6  # ranks of each half among which a swap is chosen


def is_tractable(phases: Sequence[Phase], links: NetworkLinks, rank_count: int) -> bool:
    """Whether no phase is all-to-all and the work is bounded."""
    link_count = len(links.nodes) + len(links.zones) + 1
    return rank_count > 2 and not any(phase.all_pairs for phase in phases) and \
        0 < len(phases) * max(rank_count, link_count) * rank_count <= MAX_ARRAY_ELEMENTS


def swap_search(phases: Sequence[Phase], links: NetworkLinks, node_of_rank: IntArray,
                keep_rank0: bool = False) -> IntArray:
    """Improve the node of each rank by pairwise swaps; never at a higher predicted cost."""
    maps = [node_of_rank]
    search = _SwapSearch(traffic_matrices(phases, len(node_of_rank)), links.as_tree, node_of_rank, keep_rank0)
    rounds = min(MAX_ROUNDS, max(4, MAX_PAIRS // len(node_of_rank)**2))
    for power in NORM_POWERS:
        rounds = search.descend(power, rounds)
        maps.append(search.node_of_rank.copy())
    return min(maps, key=lambda candidate: predict_cost(phases, links, candidate).sort_key)


def traffic_matrices(phases: Sequence[Phase], rank_count: int) -> FloatArray:
    """Bytes from rank to rank; shape (phases, ranks, ranks)."""
    flow = np.zeros((len(phases), rank_count, rank_count))
    for matrix, phase in zip(flow, phases, strict=True):
        np.add.at(matrix, (phase.source, phase.target), phase.bytes_per_pair)
        np.fill_diagonal(matrix, 0.0)
    return flow


class _SwapSearch:
    """State of a swap search: node of each rank and bytes over each link.

    Attributes:
        node_of_rank: shape (ranks,).
        link_path: shape (nodes, depth), links above each node, its own first; padded with the last index.
        load: shape (2, phases, links), bytes up and down.
        total: shape (2, phases, ranks), bytes that each rank sends and receives.
        below: shape (2, phases, links, ranks), bytes of each rank to and from the ranks below a link.
        communicating_pairs: (ranks, ranks) with traffic in any phase.
        pair_bytes: shape (phases, pairs), bytes of these pairs in both directions.
        time_unit: shape (phases,), seconds of the busiest link, or 1 if none is loaded; the unit of times in powers.
    """

    def __init__(self, flow: FloatArray, links: NetworkLinks, node_of_rank: IntArray,
                 keep_rank0: bool = False) -> None:
        nodes, zones = len(links.nodes), len(links.zones)
        self.flow, self.node_of_rank, self.keep_rank0 = flow, node_of_rank.copy(), keep_rank0
        zone_links = np.where(links.ancestors >= 0, links.ancestors + nodes, nodes + zones)
        self.link_path = np.concatenate([np.arange(nodes)[:, None], zone_links], axis=1)
        self.capacity = np.concatenate([links.node_capacity, links.zone_capacity, [np.inf]])
        is_below = np.zeros((len(self.capacity), len(node_of_rank)))
        is_below[self.link_path[node_of_rank].T, np.arange(len(node_of_rank))] = 1.0
        is_below[-1] = 0.0
        symmetric = flow + flow.transpose(0, 2, 1)
        self.below = np.stack([is_below @ flow.transpose(0, 2, 1), is_below @ flow])
        self.total = np.stack([flow.sum(axis=2), flow.sum(axis=1)])
        self.load = ((self.total[:, :, None] - self.below) * is_below).sum(axis=3)
        self.communicating_pairs = np.nonzero(symmetric.any(axis=0))
        self.pair_bytes = symmetric[:, self.communicating_pairs[0], self.communicating_pairs[1]]
        self.time_unit = np.ones(len(flow))

    def descend(self, power: int, rounds: int) -> int:
        """Swap until no swap helps or no rounds are left; return the remaining rounds."""
        while rounds > 0:
            rounds -= 1
            bottleneck_s = (self.load.max(axis=0) / self.capacity).max(axis=1)
            self.time_unit = np.where(bottleneck_s > 0, bottleneck_s, 1.0)
            if not bottleneck_s.any() or not self._swap_round(power, 1e-9 * float(bottleneck_s.sum())):
                break
        return rounds

    def _swap_round(self, power: int, min_gain_s: float) -> bool:
        """Try one swap for each of the ranks with the largest gains; return whether any were swapped."""
        unit = self.time_unit[:, None] * self.capacity
        # gradient of the norm by direction; phases count in proportion to their time
        norm = self._time_powers(power, self.load).sum(axis=1, keepdims=True) ** (1 / power)
        relative = self.load / unit / np.maximum(norm, 1e-300)
        gradient = np.where(norm > 0, relative ** (power - 1), 0.0) / self.capacity
        both = gradient.sum(axis=0)
        by_rank = (gradient[:, None] * self.total.transpose(0, 2, 1)[..., None]).sum(axis=0)
        by_link = by_rank.sum(axis=1) - np.einsum("pl,plr->rl", both, self.below.sum(axis=0))
        at_node_of = by_link[:, self.link_path].sum(axis=2)[:, self.node_of_rank]
        current = np.diag(at_node_of)
        change = at_node_of + at_node_of.T - current[:, None] - current
        # the bytes between the two swapped ranks stay on the same links
        left, right = self.communicating_pairs
        weight = self._path_weight(both, self.node_of_rank[left], self.node_of_rank[right])
        change[left, right] += (self.pair_bytes * weight).sum(axis=0)
        if self.keep_rank0:
            change[0] = change[:, 0] = 0.0
        partner = change.argmin(axis=1)
        gain = change[np.arange(len(partner)), partner]
        is_swapped = np.zeros(len(partner), bool)
        for i in np.argsort(gain, kind="stable")[:MAX_SWAPS_PER_ROUND].tolist():
            j = int(partner[i])
            if gain[i] < 0 and not is_swapped[i] and not is_swapped[j] and self._try_swap(i, j, power, min_gain_s):
                is_swapped[[i, j]] = True
        return bool(is_swapped.any())

    def _time_powers(self, power: int, load: FloatArray, links: IntArray | slice = slice(None)) -> FloatArray:
        """Powers of the times of links, summed over both directions; shape (phases, links)."""
        return np.asarray(((load / (self.time_unit[:, None] * self.capacity[links])) ** power).sum(axis=0))

    def _path_weight(self, weight: FloatArray, left: IntArray, right: IntArray) -> FloatArray:
        """Sum of the link weights on the paths between nodes; shape (phases, pairs)."""
        left_path, right_path = self.link_path[left], self.link_path[right]
        is_shared = left_path[:, :, None] == right_path[:, None, :]
        return np.asarray((weight[:, left_path] * ~is_shared.any(axis=2)).sum(axis=2)
                          + (weight[:, right_path] * ~is_shared.any(axis=1)).sum(axis=2))

    def _try_swap(self, i: int, j: int, power: int, min_gain_s: float) -> bool:
        """Swap two ranks if that reduces the norm, summed over the phases, by more than `min_gain_s`."""
        path_i, path_j = self.link_path[self.node_of_rank[i]], self.link_path[self.node_of_rank[j]]
        only_i, only_j = path_i[~np.isin(path_i, path_j)], path_j[~np.isin(path_j, path_i)]
        links = np.concatenate([only_i, only_j])
        if not len(links):
            return False
        load = np.concatenate([self._load_after_swap(only_i, i, j), self._load_after_swap(only_j, j, i)], axis=2)
        # full sums, not differences: at high powers small terms would cancel next to a large one
        powers = self._time_powers(power, self.load)
        before = powers.sum(axis=1)
        powers[:, links] = self._time_powers(power, load, links)
        change = (self.time_unit * (powers.sum(axis=1) ** (1 / power) - before ** (1 / power))).sum()
        if change >= -min_gain_s:
            return False
        self.load[:, :, links] = load
        change_below = np.stack([self.flow[:, :, j] - self.flow[:, :, i], self.flow[:, j] - self.flow[:, i]])
        self.below[:, :, only_i] += change_below[:, :, None]
        self.below[:, :, only_j] -= change_below[:, :, None]
        self.node_of_rank[[i, j]] = self.node_of_rank[[j, i]]
        return True

    def _load_after_swap(self, links: IntArray, leaving: int, arriving: int) -> FloatArray:
        """Bytes up and down these links after one rank below them is replaced by another."""
        between = np.stack([self.flow[:, arriving, leaving], self.flow[:, leaving, arriving]])[..., None]
        total, below = self.total[..., None], self.below[:, :, links]
        reverse = below[::-1]  # bytes in the other direction
        load = self.load[:, :, links] - (total[:, :, leaving] - below[..., leaving]) + reverse[..., leaving] \
            + (total[:, :, arriving] - below[..., arriving] + between) - (reverse[..., arriving] - between[::-1])
        return np.asarray(np.maximum(load, 0.0))


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
        for _ in range(2):  # once loses digits: what is left is shorter than what is subtracted
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
