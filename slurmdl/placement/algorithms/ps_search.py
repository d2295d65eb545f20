"""Nodes for parameter servers and their workers: how many of both below each zone.

A link with s of P servers and w of W workers on one side carries max(s (W - w), w (P - s)) shares of the model
each way. Once it is settled how many servers each leaf zone has, a time T leaves each zone an interval of
workers, and intervals add up: one pass up the zones says whether the job fits. So the splits of the servers over
the leaves are searched, all at once for one T, and T is halved between what fits and what does not.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurmdl.placement.algorithms.all_to_all import AllToAllEstimate, merge_phases, rank_zones_all_to_all
from slurmdl.placement.algorithms.apportion import fill_largest_first
from slurmdl.placement.algorithms.bottleneck import relevant_latency_caps
from slurmdl.placement.algorithms.zone_candidates import NodeChoice, ZoneCandidate, make_choice
from slurmdl.placement.arrays import sorted_unique
from slurmdl.placement.candidate_nodes import BoolArray, CandidateNodes, FloatArray, IntArray, subset
from slurmdl.placement.job_size import JobSize
from slurmdl.placement.traffic import Phase

#: most splits of the servers that are tried one by one; above that some are, and moves from the best of them
MAX_SPLITS = 20_000
#: most rounds of moves, and most zones that give, and that take, a server in a round
MAX_MOVE_ROUNDS, MAX_MOVE_LEAVES = 8, 6
#: two times that are closer than this are the same
TIME_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class ServerSplit:
    """Where the servers and the nodes of a job go; arrays of shape (leaves,), in the order of `Pool.leaves`.

    Attributes
    ----------
    seconds : time of one phase.
    servers, nodes : counts per leaf.
    """

    seconds: float
    servers: IntArray
    nodes: IntArray


class PsSearch:
    """One job on the nodes of one pool, which has one root."""

    def __init__(self, pool: CandidateNodes, job: JobSize, ps: int, bytes_per_pair: float) -> None:
        self.pool, self.job, self.ps, self.bytes_per_pair = pool, job, ps, bytes_per_pair
        self.tasks_per_node = job.tasks / job.nodes
        self.workers = job.tasks - ps
        self.leaf_sizes = np.diff(np.append(pool.leaf_begin, len(pool.snapshot_index)))
        most = min(ps, math.ceil(self.tasks_per_node))
        held = np.arange(most + 1.0)
        #: bytes over the link of a node with so many servers; one with servers alone may be fuller than `each`
        self.bytes_by_servers = bytes_per_pair * np.maximum(held * (self.workers - np.maximum(self.tasks_per_node - held, 0)),
                                      np.maximum(self.tasks_per_node - held, 0) * (ps - held))

    @cached_property
    def node_capacities(self) -> FloatArray:
        """Capacities of the nodes' links that differ, ascending."""
        return sorted_unique(self.pool.node_capacity)

    @cached_property
    def nodes_with_capacity(self) -> IntArray:
        """Shape (capacities + 1, leaves): nodes of each leaf with at least that capacity."""
        found = [np.add.reduceat(self.pool.node_capacity >= capacity, self.pool.leaf_begin, dtype=np.int64)
                 for capacity in self.node_capacities]
        return np.stack([*found, np.zeros_like(self.leaf_sizes)])

    def sum_below(self, values: IntArray) -> IntArray:
        """Sums over the leaves below each zone: (ways, leaves) -> (ways, zones)."""
        total = np.zeros((len(values), len(self.pool.topology_zone_index)), np.int64)
        total[:, self.pool.leaves] = values
        for level in self.pool.levels:
            total[:, level.parents] += np.add.reduceat(total[:, level.zones], level.child_begin, axis=1)
        return total

    def node_count_bounds(self, seconds: float, servers: IntArray) -> tuple[IntArray, IntArray]:
        """Fewest and most nodes below each zone; no node count fits where the first exceeds the second.

        Parameters
        ----------
        servers : shape (ways, zones), below each zone.

        Returns
        -------
        two arrays of shape (ways, zones).
        """
        pool, split = self.pool, servers[:, self.pool.leaves]
        wide = self.nodes_with_capacity[np.searchsorted(
            self.node_capacities, self.bytes_by_servers / seconds * (1 - 1e-9))]
        stacked = np.minimum(-(-split // self.leaf_sizes), len(self.bytes_by_servers) - 1)
        leaf = np.arange(split.shape[1])
        fit = wide[stacked, leaf]
        hosts = -(-split // np.maximum(stacked, 1))
        # a server's node needs the wider link as a rule; where it does not, workers leave narrow links to servers
        most = wide[0] + np.where(self.bytes_by_servers[stacked] < self.bytes_by_servers[0],
                                  np.minimum(hosts, fit - wide[0]), 0)
        most = np.where(fit >= hosts, most, -1)
        fewest = np.zeros_like(servers)
        upper = np.zeros_like(servers)
        fewest[:, pool.leaves], upper[:, pool.leaves] = np.maximum(
            hosts, -(-split // math.ceil(self.tasks_per_node))), most
        carries = seconds * pool.zone_capacity / self.bytes_per_pair * (1 + 1e-9)
        inner = pool.parent >= 0
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.where(servers > 0, self.workers - carries / servers, 0.0)
            largest = np.where(servers < self.ps, carries / (self.ps - servers), np.inf)
        low = np.ceil((np.maximum(least, 0.0) + servers) / self.tasks_per_node - 1e-9)
        high = np.floor((np.minimum(largest, self.workers) + servers) / self.tasks_per_node + 1e-9)
        low, high = np.where(inner & (servers > 0), low, 0).astype(np.int64), np.where(inner, high, self.job.nodes)
        high = high.astype(np.int64)
        empty = np.zeros_like(servers, bool)
        for level in pool.levels:
            zones = level.zones
            fewest[:, zones] = np.maximum(fewest[:, zones], low[:, zones])
            upper[:, zones] = np.minimum(upper[:, zones], high[:, zones])
            empty[:, zones] |= fewest[:, zones] > upper[:, zones]
            fewest[:, level.parents] += np.add.reduceat(fewest[:, zones], level.child_begin, axis=1)
            upper[:, level.parents] += np.add.reduceat(upper[:, zones], level.child_begin, axis=1)
            empty[:, level.parents] |= np.logical_or.reduceat(empty[:, zones], level.child_begin, axis=1)
        upper[empty] = -1
        return fewest, upper

    def fits_in_time(self, seconds: float, servers: IntArray) -> BoolArray:
        """Which of the ways fit into this time; shape (ways,)."""
        fewest, most = self.node_count_bounds(seconds, servers)
        root = int(self.pool.level.argmax())
        return np.asarray((fewest[:, root] <= self.job.nodes) & (self.job.nodes <= most[:, root]))

    def min_time(self, splits: IntArray, low: float, high: float) -> tuple[float, IntArray] | None:
        """The least time in which one of the splits fits, and those that do then; None where none fits in `high`.

        Parameters
        ----------
        splits : shape (ways, leaves), servers of each leaf.
        low : a time that no split undercuts.
        """
        if high < low:
            return None
        servers = self.sum_below(splits)
        # most large jobs need no more than the links of their nodes
        fits = self.fits_in_time(low * (1 + TIME_TOLERANCE), servers)
        if fits.any():
            return min(low * (1 + TIME_TOLERANCE), high), splits[fits]
        fits = self.fits_in_time(high, servers)
        if not fits.any():
            return None
        splits, servers = splits[fits], servers[fits]
        while high > low * (1 + TIME_TOLERANCE):
            middle = math.sqrt(low * high)
            fits = self.fits_in_time(middle, servers)
            if fits.any():
                high, splits, servers = middle, splits[fits], servers[fits]
            else:
                low = middle
        return high, splits

    def best_split(self, low: float, high: float) -> ServerSplit | None:
        """The deal of the least time that is found, None where that exceeds `high`."""
        if math.comb(self.ps + len(self.leaf_sizes) - 1, self.ps) <= MAX_SPLITS:
            found = self.min_time(self.all_splits(), low, high)
        else:
            found = self.min_time(np.array(sorted({tuple(split.tolist())
                                  for split in self.initial_splits()})), low, high)
            for _ in range(MAX_MOVE_ROUNDS if found else 0):
                assert found is not None
                moves = self.neighbor_splits(found[1][0])
                better = self.min_time(moves, low, found[0] / (1 + 10 * TIME_TOLERANCE)) if len(moves) else None
                if better is None:
                    break
                found = better
        if found is None:
            return None
        seconds, splits = found
        # few leaves with servers, so that fewer bytes cross
        split = splits[(splits > 0).sum(axis=1).argmin()]
        return ServerSplit(seconds, split, self.split_nodes(seconds, split))

    def all_splits(self) -> IntArray:
        """All splits that the room allows."""
        leaves = len(self.leaf_sizes)
        ways = list(itertools.combinations(range(self.ps + leaves - 1), leaves - 1))
        bars = np.array(ways, np.int64).reshape(len(ways), leaves - 1)
        edges = np.column_stack([np.full(len(bars), -1), bars, np.full(len(bars), self.ps + leaves - 1)])
        splits = np.diff(edges, axis=1) - 1
        return splits[(splits <= self.leaf_sizes * math.ceil(self.tasks_per_node)).all(axis=1)]

    def initial_splits(self) -> Iterator[IntArray]:
        """All servers in one of the largest leaves, or in proportion to the room of the largest ones."""
        room = self.leaf_sizes * math.ceil(self.tasks_per_node)
        order = np.argsort(-self.leaf_sizes, kind="stable")
        for leaf in order[:MAX_MOVE_LEAVES]:
            one = np.zeros_like(room)
            one[leaf] = min(self.ps, int(room[leaf]))
            rest = np.where(one > 0, 0, room)
            yield one + fill_largest_first(rest, self.ps - int(one.sum()))
        fewest = int(np.searchsorted(np.cumsum(self.leaf_sizes[order]), self.job.nodes) + 1)
        for count in sorted({min(len(order), c) for c in (2, 3, 4, fewest, fewest + 1, 2 * fewest, len(order))}):
            exact = np.zeros(len(room))
            exact[order[:count]] = self.ps * self.leaf_sizes[order[:count]] / self.leaf_sizes[order[:count]].sum()
            split = np.minimum(exact.astype(np.int64), room)
            for leaf in np.argsort(split - exact, kind="stable")[:self.ps - int(split.sum())]:
                split[leaf] += 1
            if split.sum() == self.ps and (split <= room).all():
                yield split

    def neighbor_splits(self, split: IntArray) -> IntArray:
        """The splits after a move of one server between two leaves; shape (ways, leaves)."""
        givers = [leaf for leaf in np.argsort(-split, kind="stable")[:MAX_MOVE_LEAVES] if split[leaf]]
        least = [leaf for leaf in np.argsort(split, kind="stable")[::-1] if split[leaf]][-MAX_MOVE_LEAVES:]
        open_ = np.flatnonzero(split < self.leaf_sizes * math.ceil(self.tasks_per_node))
        takers = open_[np.argsort(split[open_] - self.leaf_sizes[open_], kind="stable")[:MAX_MOVE_LEAVES]]
        pairs = [(giver, taker) for giver in {*givers, *least} for taker in takers if giver != taker]
        found = np.repeat(split[None], len(pairs), axis=0)
        for row, (giver, taker) in zip(found, pairs, strict=True):
            row[giver] -= 1
            row[taker] += 1
        return found

    def split_nodes(self, seconds: float, split: IntArray) -> IntArray:
        """Nodes of each leaf: no fewer than they need, the rest first where servers are, then in the largest."""
        servers = self.sum_below(split[None])
        fewest, most = (bounds[0] for bounds in self.node_count_bounds(seconds, servers))
        count = fewest.copy()
        root = int(self.pool.level.argmax())
        count[root] = self.job.nodes
        for zone in np.argsort(-self.pool.level, kind="stable"):
            below = np.flatnonzero(self.pool.parent == zone)
            left = int(count[zone] - fewest[below].sum())
            for child in below[np.lexsort((-most[below], -servers[0, below]))] if len(below) else []:
                more = min(left, int(most[child] - fewest[child]))
                count[child] = fewest[child] + more
                left -= more
        return np.asarray(count[self.pool.leaves])

    def select_nodes(self, split: ServerSplit) -> IntArray:
        """Indices in the pool of the nodes: the widest links for the servers, for workers what is wide enough."""
        taken = []
        for begin, room, servers, wanted in zip(self.pool.leaf_begin, self.leaf_sizes, split.servers, split.nodes,
                                                strict=True):
            nodes = np.arange(begin, begin + room)
            capacity = self.pool.node_capacity[nodes]
            hosts = nodes[np.argsort(-capacity, kind="stable")[:min(int(servers), int(wanted))]]
            narrow = capacity < self.bytes_by_servers[0] / split.seconds * (1 - 1e-9)
            others = nodes[np.lexsort((nodes, np.where(narrow, -capacity, -np.inf)))]
            others = others[~np.isin(others, hosts)][:wanted - len(hosts)]
            taken += [hosts, others]
        return np.sort(np.concatenate(taken))


def min_serving_seconds(pool: CandidateNodes, job: JobSize, phases: Sequence[Phase]) -> float:
    """Seconds after which the links of the nodes can serve so many workers, wherever these nodes are.

    A node with s servers among its t tasks carries max(s (W - t + s), (t - s) (P - s)) shares of the model each way.
    """
    capacity = np.sort(pool.node_capacity)[::-1][:job.nodes]
    servers, workers = len(phases[0].source), len(phases[0].target)
    loads = []
    for tasks in {job.tasks // job.nodes, job.max_tasks_per_node}:
        mine = np.arange(min(tasks, servers) + 1.0)
        load = np.maximum(mine * (workers - tasks + mine), (tasks - mine) * (servers - mine))
        # with more servers than this the load may fall again: what counts is how many fit, by the time
        loads.append(np.minimum.accumulate(load[::-1])[::-1] * float(phases[0].bytes_per_pair))
    least = np.array([min(load[i] for load in loads if i < len(load)) for i in range(max(map(len, loads)))])
    times = sorted_unique(least[1:, None] / sorted_unique(capacity)) if len(least) > 1 else np.zeros(0)

    def served(time: float) -> bool:
        held = np.searchsorted(least, time * capacity * (1 + 1e-9), side="right") - 1
        return bool(held.clip(0).sum() >= servers)

    first = bisect_left(times.tolist(), True, key=served)
    return float(times[first]) * len(phases) if first < len(times) else 0.0

#: most leaves over which the servers are split
MAX_SERVER_LEAVES = 16

#: most zones in which a choice is made, for peers and for servers
MAX_PS_ZONES = 12


def ps_choices(pool: CandidateNodes, job: JobSize, zone_candidates: Sequence[ZoneCandidate],
            phases: Sequence[Phase]) -> Iterator[tuple[float, ZoneCandidate, NodeChoice]]:
    rounds, times = sum(phase.rounds for phase in phases), len(phases)
    ps = min(len(phases[0].source), len(phases[0].target)) if phases[0].target[0] < phases[0].source[0] else \
        len(phases[0].source)
    best, served = np.inf, min_serving_seconds(pool, job, phases)
    # any choice keeps the time of all traffic over the slowest link
    high = float(phases[0].bytes_per_pair) * len(phases[0].source) * len(phases[0].target) / min(
        float(pool.node_capacity.min()), float(pool.zone_capacity.min()))
    ranked = {start.zone: entry for start, entry in rank_zones_all_to_all(
        pool, job, zone_candidates, merge_phases(phases), rounds, False)}
    for start in sorted(zone_candidates, key=lambda start: (
        start.zone not in ranked, start.min_seconds))[:MAX_PS_ZONES]:
        if start.min_seconds > best * (1 + 1e-6):
            continue
        found: tuple[float, IntArray] | None = None
        for limit in relevant_latency_caps(pool, start.min_seconds, rounds):
            latency = 2 * rounds * float(limit.path_latency(pool)[start.zone])
            low = max(start.min_seconds, served) / times
            bound = (best - latency) / times
            if bound <= low:
                continue
            inside = pool.nodes_below(start.zone).start + np.flatnonzero(limit.allowed_nodes(pool, start.zone))
            if len(inside) < job.nodes:
                continue
            inside = limit_leaves(pool, inside, ranked.get(start.zone), start, job)
            below = subset(pool, inside, start.zone)
            search = PsSearch(below, job, ps, float(phases[0].bytes_per_pair))
            deal = search.best_split(low, min(high, bound))
            if deal is not None:
                best = times * deal.seconds + latency
                found = best, inside[search.select_nodes(deal)]
        if found is not None:
            yield found[0], start, make_choice(pool, start.zone, found[1])


def limit_leaves(pool: CandidateNodes, nodes: IntArray, estimate: AllToAllEstimate | None, candidate: ZoneCandidate,
                job: JobSize) -> IntArray:
    """The nodes of the leaves that would serve peers best, and of the largest."""
    room = np.bincount(pool.leaf[nodes], minlength=len(pool.topology_zone_index))
    if (room > 0).sum() <= MAX_SERVER_LEAVES:
        return nodes
    kept = np.zeros(len(room), bool)
    if estimate is not None:
        quota, _ = estimate.model.node_counts_for_time(estimate.high, candidate.zone)
        kept |= quota > 0
    order = np.argsort(-room, kind="stable")
    fewest = int(np.searchsorted(np.cumsum(room[order]), job.nodes) + 1)
    kept[order[:fewest + 2]] = True
    return nodes[kept[pool.leaf[nodes]]]
