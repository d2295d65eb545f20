"""Rank maps for traffic that no rule fits: recursive bisection, and swaps that follow the predicted time.

The time of a phase is that of its busiest link, the largest of many; swaps follow a norm of the links' times
instead (the sum, then higher powers, which come near the largest), since it tells of every link whether it helps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.placement.cost import FloatArray, IntArray, Links, cost
from slurmdl.placement.ranks import bisect
from slurmdl.placement.traffic import Phase

#: most numbers in an array: phases x links x ranks
MAX_NUMBERS = 2**22
#: most rounds of swaps, and most pairs of ranks that are looked at in all of them
MAX_ROUNDS, MAX_PAIRS = 512, 2**25
#: powers of the norm that swaps reduce, in this order
POWERS = (1, 4, 16)
#: most swaps in a round
MAX_SWAPS = 64


def fits(phases: Sequence[Phase], links: Links, ranks: int) -> bool:
    """Whether this traffic can be mapped here: not every rank sends to every one, and the work is bounded."""
    count = len(links.nodes) + len(links.zones) + 1
    return ranks > 2 and not any(phase.crossed for phase in phases) and \
        0 < len(phases) * max(ranks, count) * ranks <= MAX_NUMBERS


def bisected(phases: Sequence[Phase], links: Links, slots: IntArray) -> IntArray:
    """The node of each rank by bisection alone.

    Parameters
    ----------
    phases : pairs of ranks, see `fits`.
    slots : shape (ranks,), the node of each slot, in depth-first order.
    """
    flow = _flow(phases, len(slots)).sum(axis=0)
    place = np.empty_like(slots)
    place[bisect.order(flow + flow.T, links, slots)] = slots
    return place


def swapped(phases: Sequence[Phase], links: Links, place: IntArray, held: bool = False) -> IntArray:
    """A place of each rank that swaps of two lead to from this one, by the predicted cost never a worse one.

    Parameters
    ----------
    held : rank 0 stays where it is.
    """
    found = [place]
    search = _Swaps(_flow(phases, len(place)), links, place, held)
    rounds = min(MAX_ROUNDS, max(4, MAX_PAIRS // len(place)**2))
    for power in POWERS:
        rounds = search.reduce(power, rounds)
        found.append(search.place.copy())
    return min(found, key=lambda place: cost(phases, links, place).key)


def _flow(phases: Sequence[Phase], ranks: int) -> FloatArray:
    """Bytes from rank to rank; shape (phases, ranks, ranks)."""
    flow = np.zeros((len(phases), ranks, ranks))
    for number, phase in enumerate(phases):
        np.add.at(flow[number], (phase.source, phase.target), phase.size)
        np.fill_diagonal(flow[number], 0.0)
    return flow


class _Swaps:
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

    def __init__(self, flow: FloatArray, links: Links, place: IntArray, held: bool = False) -> None:
        nodes, zones = len(links.nodes), len(links.zones)
        self.flow, self.place, self.held = flow, place.copy(), held
        above = np.where(links.above >= 0, links.above + nodes, nodes + zones)
        self.path = np.concatenate([np.arange(nodes)[:, None], above], axis=1)
        self.capacity = np.concatenate([links.node_capacity, links.zone_capacity, [np.inf]])
        below = np.zeros((len(self.capacity), len(place)))
        below[self.path[place].T, np.arange(len(place))] = 1.0
        below[-1] = 0.0
        self.sent = below @ flow.transpose(0, 2, 1)
        self.received = below @ flow
        self.all_sent, self.all_received = flow.sum(axis=2), flow.sum(axis=1)
        self.out = ((self.all_sent[:, None] - self.sent) * below).sum(axis=2)
        self.into = ((self.all_received[:, None] - self.received) * below).sum(axis=2)
        self.edges = np.nonzero((flow + flow.transpose(0, 2, 1)).any(axis=0))
        self.scale = np.zeros(len(flow))
        self.between = (flow + flow.transpose(0, 2, 1))[:, self.edges[0], self.edges[1]]

    def reduce(self, power: int, rounds: int) -> int:
        """Swap until nothing helps any more or the rounds are used up; returns those that are left."""
        while rounds > 0:
            rounds -= 1
            self.scale = (np.maximum(self.out, self.into) / self.capacity).max(axis=1)
            if not self.scale.any() or not self._round(power):
                break
        return rounds

    def _round(self, power: int) -> int:
        """One swap for each of the ranks that gain most; how many were made."""
        unit = self._unit()[:, None] * self.capacity
        # the norm's gradient, by direction; a phase counts as much as it takes
        norm = self._powers(power, self.out, self.into).sum(axis=1) ** (1 / power)
        steep = [np.where(norm[:, None] > 0, (load / unit / np.maximum(norm, 1e-300)[:, None]) ** (power - 1), 0.0)
                 / self.capacity for load in (self.out, self.into)]
        sides = sum(steep)
        single = (steep[0] * self.all_sent.T[:, :, None] + steep[1] * self.all_received.T[:, :, None]).sum(axis=1) \
            - np.einsum("pl,plr->rl", sides, self.sent + self.received)
        at_node = single[:, self.path].sum(axis=2)
        there = at_node[:, self.place]
        own = np.diag(there)
        change = there + there.T - own[:, None] - own
        # the bytes between the two ranks themselves stay where they are
        one, two = self.edges
        change[one, two] += (self.between * self._apart(sides, self.place[one], self.place[two])).sum(axis=0)
        if self.held:
            change[0] = change[:, 0] = 0.0
        partner = change.argmin(axis=1)
        gain = change[np.arange(len(partner)), partner]
        taken = np.zeros(len(partner), bool)
        made = 0
        for i in np.argsort(gain, kind="stable")[:MAX_SWAPS].tolist():
            j = int(partner[i])
            if gain[i] < 0 and not taken[i] and not taken[j] and self._swap(i, j, power):
                taken[[i, j]] = True
                made += 1
        return made

    def _unit(self) -> FloatArray:
        """What the times of each phase are divided by."""
        return np.where(self.scale > 0, self.scale, 1.0)

    def _powers(self, power: int, out: FloatArray, into: FloatArray,
                links: IntArray | slice = slice(None)) -> FloatArray:
        """Powers of the times of links; shape (phases, links)."""
        unit = self._unit()[:, None] * self.capacity[links]
        return np.asarray((out / unit) ** power + (into / unit) ** power)

    def _apart(self, weight: FloatArray, one: IntArray, two: IntArray) -> FloatArray:
        """Weight of the links on the way between nodes; shape (phases, pairs)."""
        here, there = self.path[one], self.path[two]
        shared = here[:, :, None] == there[:, None, :]
        return np.asarray((weight[:, here] * ~shared.any(axis=2)).sum(axis=2)
                          + (weight[:, there] * ~shared.any(axis=1)).sum(axis=2))

    def _swap(self, i: int, j: int, power: int) -> bool:
        """Swap two ranks if it reduces the norm, summed over the phases."""
        a, b = self.path[self.place[i]], self.path[self.place[j]]
        own, other = a[~np.isin(a, b)], b[~np.isin(b, a)]
        links = np.concatenate([own, other])
        if not len(links):
            return False
        out, into = (np.concatenate(pair, axis=1) for pair in zip(
            self._moved(own, i, j), self._moved(other, j, i), strict=True))
        # summed anew, not by differences: at high powers small terms would be lost beside a large one that goes
        powers = self._powers(power, self.out, self.into)
        before = powers.sum(axis=1)
        powers[:, links] = self._powers(power, out, into, links)
        change = (self._unit() * (powers.sum(axis=1) ** (1 / power) - before ** (1 / power))).sum()
        if change >= -1e-9 * self.scale.sum():
            return False
        self.out[:, links], self.into[:, links] = out, into
        rows, columns = self.flow[:, j] - self.flow[:, i], self.flow[:, :, j] - self.flow[:, :, i]
        for changed, sign in ((own, 1), (other, -1)):
            self.sent[:, changed] += sign * columns[:, None]
            self.received[:, changed] += sign * rows[:, None]
        self.place[[i, j]] = self.place[[j, i]]
        return True

    def _moved(self, links: IntArray, leaves: int, comes: int) -> tuple[FloatArray, FloatArray]:
        """Bytes up and down these links once one rank below them has given way to another."""
        to, back = self.flow[:, leaves, comes][:, None], self.flow[:, comes, leaves][:, None]
        sent, got = self.sent[:, links], self.received[:, links]
        out = self.out[:, links] - (self.all_sent[:, leaves, None] - sent[:, :, leaves]) + got[:, :, leaves] \
            + (self.all_sent[:, comes, None] - sent[:, :, comes] + back) - (got[:, :, comes] - to)
        into = self.into[:, links] - (self.all_received[:, leaves, None] - got[:, :, leaves]) + sent[:, :, leaves] \
            + (self.all_received[:, comes, None] - got[:, :, comes] + to) - (sent[:, :, comes] - back)
        return np.maximum(out, 0.0), np.maximum(into, 0.0)
