"""Rank maps for traffic that no rule fits: recursive bisection, and swaps that follow the predicted time.

The time of a phase is that of its busiest link, the largest of many; swaps follow a norm of the links' times
instead (the sum, then higher powers, which come near the largest), since it tells of every link whether it helps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.placement.iteration_cost import FloatArray, IntArray, NetworkLinks, predict_cost
from slurmdl.placement.ranks import recursive_bisection
from slurmdl.placement.traffic import Phase

#: most numbers in an array: phases x links x ranks
MAX_ARRAY_ELEMENTS = 2**22
#: most rounds of swaps, and most pairs of ranks that are looked at in all of them
MAX_ROUNDS, MAX_PAIRS = 512, 2**25
#: powers of the norm that swaps reduce, in this order
NORM_POWERS = (1, 4, 16)
#: most swaps in a round
MAX_SWAPS_PER_ROUND = 64


def is_tractable(phases: Sequence[Phase], links: NetworkLinks, rank_count: int) -> bool:
    """Whether this traffic can be mapped here: not every rank sends to every one, and the work is bounded."""
    count = len(links.nodes) + len(links.zones) + 1
    return rank_count > 2 and not any(phase.all_pairs for phase in phases) and \
        0 < len(phases) * max(rank_count, count) * rank_count <= MAX_ARRAY_ELEMENTS


def bisection_map(phases: Sequence[Phase], links: NetworkLinks, slots: IntArray) -> IntArray:
    """The node of each rank by bisection alone.

    Parameters
    ----------
    phases : pairs of ranks, see `fits`.
    slots : shape (ranks,), the node of each slot, in depth-first order.
    """
    flow = _traffic_matrices(phases, len(slots)).sum(axis=0)
    place = np.empty_like(slots)
    place[recursive_bisection.bisection_order(flow + flow.T, links, slots)] = slots
    return place


def swap_search(phases: Sequence[Phase], links: NetworkLinks,
                node_of_rank: IntArray, keep_rank0: bool = False) -> IntArray:
    """A place of each rank that swaps of two lead to from this one, by the predicted cost never a worse one.

    Parameters
    ----------
    held : rank 0 stays where it is.
    """
    found = [node_of_rank]
    search = _SwapSearch(_traffic_matrices(phases, len(node_of_rank)), links, node_of_rank, keep_rank0)
    rounds = min(MAX_ROUNDS, max(4, MAX_PAIRS // len(node_of_rank)**2))
    for power in NORM_POWERS:
        rounds = search.descend(power, rounds)
        found.append(search.node_of_rank.copy())
    return min(found, key=lambda place: predict_cost(phases, links, place).sort_key)


def _traffic_matrices(phases: Sequence[Phase], rank_count: int) -> FloatArray:
    """Bytes from rank to rank; shape (phases, ranks, ranks)."""
    flow = np.zeros((len(phases), rank_count, rank_count))
    for number, phase in enumerate(phases):
        np.add.at(flow[number], (phase.source, phase.target), phase.bytes_per_pair)
        np.fill_diagonal(flow[number], 0.0)
    return flow


class _SwapSearch:
    """Where the ranks are, the bytes over each link, and what a swap changes.

    Attributes
    ----------
    place : shape (ranks,).
    held : rank 0 is not swapped.
    path : shape (nodes, depth), the links above each node, its own first; the last index stands for none.
    sent, received : shape (phases, links, ranks), bytes that a rank sends to, and gets from, the ranks below a link.
    out, into : shape (phases, links), bytes that go up and down.
    scale : shape (phases,), seconds of the busiest link, by which times are divided before powers are taken.
    """

    def __init__(self, flow: FloatArray, links: NetworkLinks,
                 node_of_rank: IntArray, keep_rank0: bool = False) -> None:
        nodes, zones = len(links.nodes), len(links.zones)
        self.flow, self.node_of_rank, self.keep_rank0 = flow, node_of_rank.copy(), keep_rank0
        above = np.where(links.ancestors >= 0, links.ancestors + nodes, nodes + zones)
        self.link_path = np.concatenate([np.arange(nodes)[:, None], above], axis=1)
        self.capacity = np.concatenate([links.node_capacity, links.zone_capacity, [np.inf]])
        below = np.zeros((len(self.capacity), len(node_of_rank)))
        below[self.link_path[node_of_rank].T, np.arange(len(node_of_rank))] = 1.0
        below[-1] = 0.0
        self.sent = below @ flow.transpose(0, 2, 1)
        self.received = below @ flow
        self.all_sent, self.all_received = flow.sum(axis=2), flow.sum(axis=1)
        self.outbound = ((self.all_sent[:, None] - self.sent) * below).sum(axis=2)
        self.inbound = ((self.all_received[:, None] - self.received) * below).sum(axis=2)
        self.communicating_pairs = np.nonzero((flow + flow.transpose(0, 2, 1)).any(axis=0))
        self.bottleneck_seconds = np.zeros(len(flow))
        self.pair_bytes = (flow + flow.transpose(0, 2, 1))[:,
                           self.communicating_pairs[0], self.communicating_pairs[1]]

    def descend(self, power: int, rounds: int) -> int:
        """Swap until nothing helps any more or the rounds are used up; returns those that are left."""
        while rounds > 0:
            rounds -= 1
            self.bottleneck_seconds = (np.maximum(self.outbound, self.inbound) / self.capacity).max(axis=1)
            if not self.bottleneck_seconds.any() or not self._swap_round(power):
                break
        return rounds

    def _swap_round(self, power: int) -> int:
        """One swap for each of the ranks that gain most; how many were made."""
        unit = self._time_unit()[:, None] * self.capacity
        # the norm's gradient, by direction; a phase counts as much as it takes
        norm = self._time_powers(power, self.outbound, self.inbound).sum(axis=1) ** (1 / power)
        steep = [np.where(norm[:, None] > 0, (load / unit / np.maximum(norm, 1e-300)[:, None]) ** (power - 1), 0.0)
                 / self.capacity for load in (self.outbound, self.inbound)]
        sides = sum(steep)
        single = (steep[0] * self.all_sent.T[:, :, None] + steep[1] * self.all_received.T[:, :, None]).sum(axis=1) \
            - np.einsum("pl,plr->rl", sides, self.sent + self.received)
        at_node = single[:, self.link_path].sum(axis=2)
        there = at_node[:, self.node_of_rank]
        own = np.diag(there)
        change = there + there.T - own[:, None] - own
        # the bytes between the two ranks themselves stay where they are
        one, two = self.communicating_pairs
        change[one, two] += (self.pair_bytes * self._path_weight(sides,
                             self.node_of_rank[one], self.node_of_rank[two])).sum(axis=0)
        if self.keep_rank0:
            change[0] = change[:, 0] = 0.0
        partner = change.argmin(axis=1)
        gain = change[np.arange(len(partner)), partner]
        taken = np.zeros(len(partner), bool)
        made = 0
        for i in np.argsort(gain, kind="stable")[:MAX_SWAPS_PER_ROUND].tolist():
            j = int(partner[i])
            if gain[i] < 0 and not taken[i] and not taken[j] and self._try_swap(i, j, power):
                taken[[i, j]] = True
                made += 1
        return made

    def _time_unit(self) -> FloatArray:
        """What the times of each phase are divided by."""
        return np.where(self.bottleneck_seconds > 0, self.bottleneck_seconds, 1.0)

    def _time_powers(self, power: int, outbound: FloatArray, inbound: FloatArray,
                links: IntArray | slice = slice(None)) -> FloatArray:
        """Powers of the times of links; shape (phases, links)."""
        unit = self._time_unit()[:, None] * self.capacity[links]
        return np.asarray((outbound / unit) ** power + (inbound / unit) ** power)

    def _path_weight(self, weight: FloatArray, left: IntArray, right: IntArray) -> FloatArray:
        """Weight of the links on the way between nodes; shape (phases, pairs)."""
        here, there = self.link_path[left], self.link_path[right]
        shared = here[:, :, None] == there[:, None, :]
        return np.asarray((weight[:, here] * ~shared.any(axis=2)).sum(axis=2)
                          + (weight[:, there] * ~shared.any(axis=1)).sum(axis=2))

    def _try_swap(self, i: int, j: int, power: int) -> bool:
        """Swap two ranks if it reduces the norm, summed over the phases."""
        a, b = self.link_path[self.node_of_rank[i]], self.link_path[self.node_of_rank[j]]
        own, other = a[~np.isin(a, b)], b[~np.isin(b, a)]
        links = np.concatenate([own, other])
        if not len(links):
            return False
        out, into = (np.concatenate(pair, axis=1) for pair in zip(
            self._loads_after_swap(own, i, j), self._loads_after_swap(other, j, i), strict=True))
        # summed anew, not by differences: at high powers small terms would be lost beside a large one that goes
        powers = self._time_powers(power, self.outbound, self.inbound)
        before = powers.sum(axis=1)
        powers[:, links] = self._time_powers(power, out, into, links)
        change = (self._time_unit() * (powers.sum(axis=1) ** (1 / power) - before ** (1 / power))).sum()
        if change >= -1e-9 * self.bottleneck_seconds.sum():
            return False
        self.outbound[:, links], self.inbound[:, links] = out, into
        rows, columns = self.flow[:, j] - self.flow[:, i], self.flow[:, :, j] - self.flow[:, :, i]
        for changed, sign in ((own, 1), (other, -1)):
            self.sent[:, changed] += sign * columns[:, None]
            self.received[:, changed] += sign * rows[:, None]
        self.node_of_rank[[i, j]] = self.node_of_rank[[j, i]]
        return True

    def _loads_after_swap(self, links: IntArray, leaving: int, arriving: int) -> tuple[FloatArray, FloatArray]:
        """Bytes up and down these links once one rank below them has given way to another."""
        to, back = self.flow[:, leaving, arriving][:, None], self.flow[:, arriving, leaving][:, None]
        sent, got = self.sent[:, links], self.received[:, links]
        out = self.outbound[:, links] - (self.all_sent[:, leaving, None] - sent[:, :, leaving]) + got[:, :, leaving] \
            + (self.all_sent[:, arriving, None] - sent[:, :, arriving] + back) - (got[:, :, arriving] - to)
        into = self.inbound[:, links] - (self.all_received[:, leaving, None] - got[:, :, leaving]) + sent[:, :, leaving] \
            + (self.all_received[:, arriving, None] - got[:, :, arriving] + to) - (sent[:, :, arriving] - back)
        return np.maximum(out, 0.0), np.maximum(into, 0.0)
