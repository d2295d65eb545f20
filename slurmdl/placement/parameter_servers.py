"""Choices for parameter servers and their workers: how many of both below each zone.

With s of P servers and w of W workers on one side, a link carries max(s (W - w), w (P - s)) shards each way. If the
servers of each leaf zone are fixed, a time T gives each zone an interval of node counts, and intervals add up: one
pass up the zones tells whether the job fits. So the splits of the servers over the leaves are searched, all at once
for one T, by bisection over T.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from slurmdl.job_request import JobSize
from slurmdl.placement.all_to_all import AllToAllEstimate, rank_zones_all_to_all
from slurmdl.placement.arrays import BoolArray, IntArray, sorted_unique
from slurmdl.placement.candidate_nodes import CandidateNodes, subset
from slurmdl.placement.zones import (
    Proposal,
    RankedZone,
    SearchProblem,
    fill_largest_first,
    make_choice,
    path_widths,
    relevant_latency_caps,
)
from slurmdl.traffic import count_shards

MAX_PS_ZONES = 12  # zones in which a choice is made
MAX_SERVER_LEAVES = 16  # leaves over which the servers are split
MAX_SPLITS = 20_000  # splits that are all evaluated; with more, a local search is used
MAX_MOVE_ROUNDS = 8  # rounds of the local search
MAX_MOVE_LEAVES = 6  # leaves that give a server in a round, and leaves that take one
TIME_TOLERANCE = 1e-5  # relative precision of times


def ps_choices(candidates: CandidateNodes, problem: SearchProblem,
               zones: Sequence[RankedZone]) -> Iterator[Proposal]:
    """The choice with the least estimated time in each zone, if it is better than those before."""
    size, phases, phase = problem.size, problem.phases, problem.phases[0]
    servers, workers = len(phase.source), len(phase.target)
    pair_bytes = float(phase.bytes_per_pair)
    best, served = np.inf, min_serving_seconds(candidates, problem)
    # no choice takes longer than all traffic over the slowest link
    min_capacity = min(float(candidates.node_capacity.min()), float(candidates.zone_capacity.min()))
    max_time = pair_bytes * servers * workers / min_capacity
    estimates = {ranked_zone.index: estimate
                 for ranked_zone, estimate in rank_zones_all_to_all(candidates, problem, zones, refine=False)}
    for ranked_zone in sorted(zones, key=lambda ranked_zone: (
            ranked_zone.index not in estimates, ranked_zone.min_seconds))[:MAX_PS_ZONES]:
        if ranked_zone.min_seconds > best * (1 + 1e-6):
            continue
        zone, min_seconds = ranked_zone.index, ranked_zone.min_seconds
        choice = None
        for cap in relevant_latency_caps(candidates, min_seconds, problem.rounds):
            latency = 2 * problem.rounds * float(cap.path_latency(candidates)[zone])
            low, high = max(min_seconds, served) / len(phases), (best - latency) / len(phases)
            nodes = candidates.nodes_below(zone).start + np.flatnonzero(path_widths(candidates, zone, cap))
            if high <= low or len(nodes) < size.nodes:
                continue
            nodes = limit_leaves(candidates, nodes, size, zone, estimates.get(zone))
            search = PsSearch(subset(candidates, nodes, zone), size, servers, pair_bytes)
            seconds, split = search.best_split(low, min(max_time, high)) or (np.inf, None)
            if split is not None:
                best = len(phases) * seconds + latency
                choice = make_choice(candidates, zone, nodes[search.select_nodes(seconds, split)])
        if choice is not None:
            yield Proposal(choice, min_seconds, best)


def limit_leaves(candidates: CandidateNodes, nodes: IntArray, size: JobSize, zone: int,
                 estimate: AllToAllEstimate | None) -> IntArray:
    """The nodes of the leaves that are best for all-to-all traffic, and of the largest leaves."""
    leaf_sizes = np.bincount(candidates.leaf[nodes], minlength=candidates.zone_count)
    if (leaf_sizes > 0).sum() <= MAX_SERVER_LEAVES:
        return nodes
    kept = np.zeros(len(leaf_sizes), bool)
    if estimate is not None:
        kept |= estimate.model.node_counts_for_time(estimate.high, zone)[0] > 0
    by_size = np.argsort(-leaf_sizes, kind="stable")
    fewest = int(np.searchsorted(np.cumsum(leaf_sizes[by_size]), size.nodes) + 1)
    kept[by_size[:fewest + 2]] = True
    return nodes[kept[candidates.leaf[nodes]]]


def min_serving_seconds(candidates: CandidateNodes, problem: SearchProblem) -> float:
    """Lower bound: seconds in which the best node links can serve all workers, in any zones."""
    size, phase = problem.size, problem.phases[0]
    capacity = np.sort(candidates.node_capacity)[::-1][:size.nodes]
    all_servers, all_workers = len(phase.source), len(phase.target)
    loads = []
    for tasks in {size.tasks // size.nodes, size.max_tasks_per_node}:
        servers = np.arange(min(tasks, all_servers) + 1.0)
        load = count_shards(servers, tasks - servers, all_servers, all_workers)
        # the load may fall with more servers: the bound needs the largest number that fits in a time
        loads.append(np.minimum.accumulate(load[::-1])[::-1] * float(phase.bytes_per_pair))
    min_load = np.array([min(load[i] for load in loads if i < len(load)) for i in range(max(map(len, loads)))])
    times = sorted_unique(min_load[1:, None] / sorted_unique(capacity)) if len(min_load) > 1 else np.zeros(0)

    def can_serve(time: float) -> bool:
        servers = np.searchsorted(min_load, time * capacity * (1 + 1e-9), side="right") - 1
        return bool(servers.clip(0).sum() >= all_servers)

    first = bisect_left(times.tolist(), True, key=can_serve)
    return float(times[first]) * len(problem.phases) if first < len(times) else 0.0


class NodeCountBounds(NamedTuple):
    """Bounds on the number of nodes below each zone, each of shape (splits, zones); empty if fewest > most."""

    fewest: IntArray
    most: IntArray


class PsSearch:
    """Search for the server split of a job on candidate nodes with one root."""

    def __init__(self, candidates: CandidateNodes, size: JobSize, ps: int, bytes_per_pair: float) -> None:
        self.candidates, self.size, self.ps, self.bytes_per_pair = candidates, size, ps, bytes_per_pair
        self.tasks_per_node = size.tasks / size.nodes
        self.workers = size.tasks - ps
        self.leaf_sizes = np.diff(np.append(candidates.leaf_begin, len(candidates.snapshot_index)))
        self.max_leaf_servers = self.leaf_sizes * math.ceil(self.tasks_per_node)
        servers = np.arange(min(ps, math.ceil(self.tasks_per_node)) + 1.0)
        workers = np.maximum(self.tasks_per_node - servers, 0)
        # bytes over the link of a node by its number of servers
        self.bytes_by_servers = bytes_per_pair * count_shards(servers, workers, ps, self.workers)
        self.node_capacities = sorted_unique(candidates.node_capacity)
        # nodes of each leaf with at least each capacity, then 0; shape (capacities + 1, leaves)
        counts = [np.add.reduceat(candidates.node_capacity >= capacity, candidates.leaf_begin, dtype=np.int64)
                  for capacity in self.node_capacities]
        self.nodes_with_capacity = np.stack([*counts, np.zeros_like(self.leaf_sizes)])

    def best_split(self, low: float, high: float) -> tuple[float, IntArray] | None:
        """The least time found for one phase, and servers per leaf that reach it; None if it exceeds `high`."""
        is_small = math.comb(self.ps + len(self.leaf_sizes) - 1, self.ps) <= MAX_SPLITS
        best = self.min_time(self.all_splits() if is_small else self.initial_splits(), low, high)
        if best is None:
            return None
        for _ in range(0 if is_small else MAX_MOVE_ROUNDS):
            better = self.min_time(self.neighbor_splits(best[1][0]), low, best[0] / (1 + 10 * TIME_TOLERANCE))
            if better is None:
                break
            best = better
        seconds, splits = best
        # fewer leaves with servers mean fewer bytes between zones
        return seconds, splits[(splits > 0).sum(axis=1).argmin()]

    def min_time(self, splits: IntArray, low: float, high: float) -> tuple[float, IntArray] | None:
        """The least time in which any split fits, and all splits that fit in it; None if none fits in `high`.

        `splits` has shape (splits, leaves); `low` is a lower bound for all splits.
        """
        if high < low:
            return None
        servers = self.sum_below(splits)
        # most large jobs are limited by the node links only
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

    def sum_below(self, values: IntArray) -> IntArray:
        """Sum over the leaves below each zone: (splits, leaves) -> (splits, zones)."""
        total = np.zeros((len(values), self.candidates.zone_count), np.int64)
        total[:, self.candidates.leaves] = values
        for level in self.candidates.levels:
            total[:, level.parents] += np.add.reduceat(total[:, level.zones], level.child_begin, axis=1)
        return total

    def fits_in_time(self, seconds: float, servers: IntArray) -> BoolArray:
        """Mask of the splits that fit in this time: servers below each zone (splits, zones) -> (splits,)."""
        bounds = self.node_count_bounds(seconds, servers)
        root = int(self.candidates.level.argmax())
        return np.asarray((bounds.fewest[:, root] <= self.size.nodes) & (self.size.nodes <= bounds.most[:, root]))

    def node_count_bounds(self, seconds: float, servers: IntArray) -> NodeCountBounds:
        """Bounds for this time and these servers below each zone, (splits, zones)."""
        candidates, split = self.candidates, servers[:, self.candidates.leaves]
        fast_enough = self.nodes_with_capacity[np.searchsorted(
            self.node_capacities, self.bytes_by_servers / seconds * (1 - 1e-9))]
        servers_per_host = np.minimum(-(-split // self.leaf_sizes), len(self.bytes_by_servers) - 1)
        possible_hosts = fast_enough[servers_per_host, np.arange(split.shape[1])]
        hosts = -(-split // np.maximum(servers_per_host, 1))
        # if a server's node can have a slower link than a worker's, workers leave slow links to servers
        is_lighter = self.bytes_by_servers[servers_per_host] < self.bytes_by_servers[0]
        leaf_most = fast_enough[0] + np.where(is_lighter, np.minimum(hosts, possible_hosts - fast_enough[0]), 0)
        fewest, most = np.zeros_like(servers), np.zeros_like(servers)
        fewest[:, candidates.leaves] = np.maximum(hosts, -(-split // math.ceil(self.tasks_per_node)))
        most[:, candidates.leaves] = np.where(possible_hosts >= hosts, leaf_most, -1)

        shards = seconds * candidates.zone_capacity / self.bytes_per_pair * (1 + 1e-9)
        with np.errstate(divide="ignore", invalid="ignore"):
            min_workers = np.where(servers > 0, self.workers - shards / servers, 0.0)
            max_workers = np.where(servers < self.ps, shards / (self.ps - servers), np.inf)
        low = np.ceil((np.maximum(min_workers, 0.0) + servers) / self.tasks_per_node - 1e-9)
        high = np.floor((np.minimum(max_workers, self.workers) + servers) / self.tasks_per_node + 1e-9)
        has_parent = candidates.parent >= 0
        low = np.where(has_parent & (servers > 0), low, 0).astype(np.int64)
        high = np.where(has_parent, high, self.size.nodes).astype(np.int64)

        is_empty = np.zeros_like(servers, bool)
        for level in candidates.levels:
            zones = level.zones
            fewest[:, zones] = np.maximum(fewest[:, zones], low[:, zones])
            most[:, zones] = np.minimum(most[:, zones], high[:, zones])
            is_empty[:, zones] |= fewest[:, zones] > most[:, zones]
            fewest[:, level.parents] += np.add.reduceat(fewest[:, zones], level.child_begin, axis=1)
            most[:, level.parents] += np.add.reduceat(most[:, zones], level.child_begin, axis=1)
            is_empty[:, level.parents] |= np.logical_or.reduceat(is_empty[:, zones], level.child_begin, axis=1)
        most[is_empty] = -1
        return NodeCountBounds(fewest, most)

    def all_splits(self) -> IntArray:
        """All splits of the servers over the leaves; shape (splits, leaves)."""
        leaves = len(self.leaf_sizes)
        combinations = list(itertools.combinations(range(self.ps + leaves - 1), leaves - 1))
        bars = np.array(combinations, np.int64).reshape(len(combinations), leaves - 1)
        edges = np.column_stack([np.full(len(bars), -1), bars, np.full(len(bars), self.ps + leaves - 1)])
        splits = np.diff(edges, axis=1) - 1
        return splits[(splits <= self.max_leaf_servers).all(axis=1)]

    def initial_splits(self) -> IntArray:
        """Splits with all servers in one of the largest leaves, or in proportion to them; shape (splits, leaves)."""
        limit, splits = self.max_leaf_servers, []
        by_size = np.argsort(-self.leaf_sizes, kind="stable")
        for leaf in by_size[:MAX_MOVE_LEAVES]:
            split = np.zeros_like(limit)
            split[leaf] = min(self.ps, int(limit[leaf]))
            splits.append(split + fill_largest_first(np.where(split > 0, 0, limit), self.ps - int(split.sum())))
        fewest = int(np.searchsorted(np.cumsum(self.leaf_sizes[by_size]), self.size.nodes) + 1)
        for count in sorted({min(len(by_size), c) for c in (2, 3, 4, fewest, fewest + 1, 2 * fewest, len(by_size))}):
            exact = np.zeros(len(limit))
            sizes = self.leaf_sizes[by_size[:count]]
            exact[by_size[:count]] = self.ps * sizes / sizes.sum()
            split = np.minimum(exact.astype(np.int64), limit)
            for leaf in np.argsort(split - exact, kind="stable")[:self.ps - int(split.sum())]:
                split[leaf] += 1
            if split.sum() == self.ps and (split <= limit).all():
                splits.append(split)
        return np.array(sorted({tuple(split.tolist()) for split in splits}))

    def neighbor_splits(self, split: IntArray) -> IntArray:
        """Splits that differ by a move of one server between two leaves; shape (splits, leaves)."""
        most = [leaf for leaf in np.argsort(-split, kind="stable")[:MAX_MOVE_LEAVES] if split[leaf]]
        fewest = [leaf for leaf in np.argsort(split, kind="stable")[::-1] if split[leaf]][-MAX_MOVE_LEAVES:]
        open_leaves = np.flatnonzero(split < self.max_leaf_servers)
        by_free = open_leaves[np.argsort(split[open_leaves] - self.leaf_sizes[open_leaves], kind="stable")]
        moves = [(source, target) for source in {*most, *fewest} for target in by_free[:MAX_MOVE_LEAVES]
                 if source != target]
        neighbors = np.repeat(split[None], len(moves), axis=0)
        for row, (source, target) in zip(neighbors, moves, strict=True):
            row[source] -= 1
            row[target] += 1
        return neighbors

    def split_nodes(self, seconds: float, split: IntArray) -> IntArray:
        """Nodes per leaf: as few as needed, the remainder first with the servers, then in the largest leaves."""
        servers = self.sum_below(split[None])
        fewest, most = (bound[0] for bound in self.node_count_bounds(seconds, servers))
        counts = fewest.copy()
        counts[int(self.candidates.level.argmax())] = self.size.nodes
        for zone in np.argsort(-self.candidates.level, kind="stable"):
            children = np.flatnonzero(self.candidates.parent == zone)
            remaining = int(counts[zone] - fewest[children].sum())
            for child in children[np.lexsort((-most[children], -servers[0, children]))] if len(children) else []:
                extra = min(remaining, int(most[child] - fewest[child]))
                counts[child] = fewest[child] + extra
                remaining -= extra
        return np.asarray(counts[self.candidates.leaves])

    def select_nodes(self, seconds: float, split: IntArray) -> IntArray:
        """Pool indices of the nodes: servers get the widest links, workers the first that are fast enough."""
        selected = []
        for begin, size, servers, wanted in zip(self.candidates.leaf_begin, self.leaf_sizes, split,
                                                self.split_nodes(seconds, split), strict=True):
            nodes = np.arange(begin, begin + size)
            capacity = self.candidates.node_capacity[nodes]
            hosts = nodes[np.argsort(-capacity, kind="stable")[:min(int(servers), int(wanted))]]
            is_slow = capacity < self.bytes_by_servers[0] / seconds * (1 - 1e-9)
            workers = nodes[np.lexsort((nodes, np.where(is_slow, -capacity, -np.inf)))]
            selected += [hosts, workers[~np.isin(workers, hosts)][:wanted - len(hosts)]]
        return np.sort(np.concatenate(selected))
