"""Rank maps for traffic without a rule: recursive bisection, and swaps that reduce the predicted time.

The time of a phase is the time of its busiest link. Swaps reduce a norm of all link times instead (the sum, then
higher powers, which approximate the maximum), because a norm shows for every link whether a swap helps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.placement.iteration_cost import NetworkLinks, predict_cost
from slurmdl.placement.ranks import recursive_bisection
from slurmdl.placement.traffic import Phase

MAX_ARRAY_ELEMENTS = 2**22  # phases x links x ranks
NORM_POWERS = (1, 4, 16)  # powers of the norm, in this order
MAX_ROUNDS = 512  # rounds of swaps
MAX_PAIRS = 2**25  # pairs of ranks that are evaluated in all rounds
MAX_SWAPS_PER_ROUND = 64


def is_tractable(phases: Sequence[Phase], links: NetworkLinks, rank_count: int) -> bool:
    """Whether no phase is all-to-all and the work is bounded."""
    link_count = len(links.nodes) + len(links.zones) + 1
    return rank_count > 2 and not any(phase.all_pairs for phase in phases) and \
        0 < len(phases) * max(rank_count, link_count) * rank_count <= MAX_ARRAY_ELEMENTS


def bisection_map(phases: Sequence[Phase], links: NetworkLinks, slots: IntArray) -> IntArray:
    """Node of each rank by bisection only.

    The phases must be tractable (`is_tractable`); `slots` are the nodes in depth-first order, shape (ranks,).
    """
    flow = _traffic_matrices(phases, len(slots)).sum(axis=0)
    node_of_rank = np.empty_like(slots)
    node_of_rank[recursive_bisection.bisection_order(flow + flow.T, links, slots)] = slots
    return node_of_rank


def swap_search(phases: Sequence[Phase], links: NetworkLinks, node_of_rank: IntArray,
                keep_rank0: bool = False) -> IntArray:
    """Improve the node of each rank by pairwise swaps; never at a higher predicted cost."""
    maps = [node_of_rank]
    search = _SwapSearch(_traffic_matrices(phases, len(node_of_rank)), links, node_of_rank, keep_rank0)
    rounds = min(MAX_ROUNDS, max(4, MAX_PAIRS // len(node_of_rank)**2))
    for power in NORM_POWERS:
        rounds = search.descend(power, rounds)
        maps.append(search.node_of_rank.copy())
    return min(maps, key=lambda candidate: predict_cost(phases, links, candidate).sort_key)


def _traffic_matrices(phases: Sequence[Phase], rank_count: int) -> FloatArray:
    """Bytes from rank to rank; shape (phases, ranks, ranks)."""
    flow = np.zeros((len(phases), rank_count, rank_count))
    for matrix, phase in zip(flow, phases, strict=True):
        np.add.at(matrix, (phase.source, phase.target), phase.bytes_per_pair)
        np.fill_diagonal(matrix, 0.0)
    return flow


class _SwapSearch:
    """State of a swap search: node of each rank and bytes over each link.

    Attributes
    ----------
    node_of_rank : shape (ranks,).
    keep_rank0 : rank 0 is not swapped.
    link_path : shape (nodes, depth), links above each node, its own first; padded with the last index.
    sent, received : shape (phases, links, ranks), bytes of each rank to and from the ranks below a link.
    outbound, inbound : shape (phases, links), bytes up and down.
    communicating_pairs : (ranks, ranks) with traffic in any phase.
    pair_bytes : shape (phases, pairs), bytes of these pairs in both directions.
    bottleneck_seconds : shape (phases,), time of the busiest link, the unit of times before powers are taken.
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
        self.sent = is_below @ flow.transpose(0, 2, 1)
        self.received = is_below @ flow
        self.all_sent, self.all_received = flow.sum(axis=2), flow.sum(axis=1)
        self.outbound = ((self.all_sent[:, None] - self.sent) * is_below).sum(axis=2)
        self.inbound = ((self.all_received[:, None] - self.received) * is_below).sum(axis=2)
        self.communicating_pairs = np.nonzero(symmetric.any(axis=0))
        self.pair_bytes = symmetric[:, self.communicating_pairs[0], self.communicating_pairs[1]]
        self.bottleneck_seconds = np.zeros(len(flow))

    def descend(self, power: int, rounds: int) -> int:
        """Swap until no swap helps or no rounds are left; return the remaining rounds."""
        while rounds > 0:
            rounds -= 1
            self.bottleneck_seconds = (np.maximum(self.outbound, self.inbound) / self.capacity).max(axis=1)
            if not self.bottleneck_seconds.any() or not self._swap_round(power):
                break
        return rounds

    def _swap_round(self, power: int) -> int:
        """Try one swap for each of the ranks with the largest gains; return the number of swaps."""
        unit = self._time_unit()[:, None] * self.capacity
        # gradient of the norm by direction; phases count in proportion to their time
        norm = self._time_powers(power, self.outbound, self.inbound).sum(axis=1) ** (1 / power)
        norm = norm[:, None]
        gradients = [np.where(norm > 0, (load / unit / np.maximum(norm, 1e-300)) ** (power - 1), 0.0) / self.capacity
                     for load in (self.outbound, self.inbound)]
        both = sum(gradients)
        by_link = (gradients[0] * self.all_sent.T[:, :, None] + gradients[1] * self.all_received.T[:, :, None]).sum(
            axis=1) - np.einsum("pl,plr->rl", both, self.sent + self.received)
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
        swaps = 0
        for i in np.argsort(gain, kind="stable")[:MAX_SWAPS_PER_ROUND].tolist():
            j = int(partner[i])
            if gain[i] < 0 and not is_swapped[i] and not is_swapped[j] and self._try_swap(i, j, power):
                is_swapped[[i, j]] = True
                swaps += 1
        return swaps

    def _time_unit(self) -> FloatArray:
        """Unit of the times of each phase, in seconds."""
        return np.where(self.bottleneck_seconds > 0, self.bottleneck_seconds, 1.0)

    def _time_powers(self, power: int, outbound: FloatArray, inbound: FloatArray,
                     links: IntArray | slice = slice(None)) -> FloatArray:
        """Powers of the times of links; shape (phases, links)."""
        unit = self._time_unit()[:, None] * self.capacity[links]
        return np.asarray((outbound / unit) ** power + (inbound / unit) ** power)

    def _path_weight(self, weight: FloatArray, left: IntArray, right: IntArray) -> FloatArray:
        """Sum of the link weights on the paths between nodes; shape (phases, pairs)."""
        left_path, right_path = self.link_path[left], self.link_path[right]
        is_shared = left_path[:, :, None] == right_path[:, None, :]
        return np.asarray((weight[:, left_path] * ~is_shared.any(axis=2)).sum(axis=2)
                          + (weight[:, right_path] * ~is_shared.any(axis=1)).sum(axis=2))

    def _try_swap(self, i: int, j: int, power: int) -> bool:
        """Swap two ranks if that reduces the norm, summed over the phases."""
        path_i, path_j = self.link_path[self.node_of_rank[i]], self.link_path[self.node_of_rank[j]]
        only_i, only_j = path_i[~np.isin(path_i, path_j)], path_j[~np.isin(path_j, path_i)]
        links = np.concatenate([only_i, only_j])
        if not len(links):
            return False
        outbound, inbound = (np.concatenate(pair, axis=1) for pair in zip(
            self._loads_after_swap(only_i, i, j), self._loads_after_swap(only_j, j, i), strict=True))
        # full sums, not differences: at high powers small terms would cancel next to a large one
        powers = self._time_powers(power, self.outbound, self.inbound)
        before = powers.sum(axis=1)
        powers[:, links] = self._time_powers(power, outbound, inbound, links)
        change = (self._time_unit() * (powers.sum(axis=1) ** (1 / power) - before ** (1 / power))).sum()
        if change >= -1e-9 * self.bottleneck_seconds.sum():
            return False
        self.outbound[:, links], self.inbound[:, links] = outbound, inbound
        rows, columns = self.flow[:, j] - self.flow[:, i], self.flow[:, :, j] - self.flow[:, :, i]
        for changed, sign in ((only_i, 1), (only_j, -1)):
            self.sent[:, changed] += sign * columns[:, None]
            self.received[:, changed] += sign * rows[:, None]
        self.node_of_rank[[i, j]] = self.node_of_rank[[j, i]]
        return True

    def _loads_after_swap(self, links: IntArray, leaving: int, arriving: int) -> tuple[FloatArray, FloatArray]:
        """Bytes up and down these links after one rank below them is replaced by another."""
        forward, back = self.flow[:, leaving, arriving][:, None], self.flow[:, arriving, leaving][:, None]
        sent, received = self.sent[:, links], self.received[:, links]
        all_sent, all_received = self.all_sent[:, :, None], self.all_received[:, :, None]
        outbound = self.outbound[:, links] \
            - (all_sent[:, leaving] - sent[:, :, leaving]) + received[:, :, leaving] \
            + (all_sent[:, arriving] - sent[:, :, arriving] + back) - (received[:, :, arriving] - forward)
        inbound = self.inbound[:, links] \
            - (all_received[:, leaving] - received[:, :, leaving]) + sent[:, :, leaving] \
            + (all_received[:, arriving] - received[:, :, arriving] + forward) - (sent[:, :, arriving] - back)
        return np.maximum(outbound, 0.0), np.maximum(inbound, 0.0)
